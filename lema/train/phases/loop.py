"""What a run of phases tells while it runs: lines of metrics, and the events of `transformers`' callbacks.

The steps are those of the whole run, so that every curve and bar goes on over the boundaries. A phase has no epochs.

The steps of one phase, and what is due after each: a line of metrics, validation, a checkpoint, an end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from lema.backend import Replicas
from lema.backend.collectives import first_alone
from lema.backend.interrupt import Stop, StopRequested
from lema.config import LemaConfig
from lema.data.mixture import Mixture
from lema.engine import StreamedModel
from lema.engine.loss import split_batch
from lema.errors import DiskError, DiskFull, Stopped
from lema.storage.diskspace import say_passed_over, unsaved
from lema.train.checkpoint.format import TRAINER_STATE
from lema.train.checkpoint.rng import Generators
from lema.train.evaluate import validate
from lema.train.loop import report_callbacks, training_arguments
from lema.train.metrics import METRICS_NAME, MetricsLog, Window, plot_loss, read_metrics, since
from lema.train.model import LemaModel
from lema.train.phases.kinds import Adapters, Weights
from lema.train.phases.places import Places
from lema.train.phases.plan import PhasePlan

__all__ = ["PICTURE", "PhaseLog", "Underway"]


PICTURE = "loss.png"


class PhaseLog:
    """The log of one run; use it in a `with` block. Of several processes the first writes and reports.

    Args:
        config: of the run: `output_dir`, `logging_steps`, `eval_steps`, `save_steps`, `report_to`.
        plan: the phases.
        replicas: the processes.
        callbacks: `transformers.TrainerCallback`s; a phase of weights has no moment at which all its gradients exist,
            so there `on_pre_optimizer_step` and `on_optimizer_step` are not fired.
        evaluates: whether there is validation.
        told: called with each line of metrics.

    Attributes:
        control: what callbacks have asked for.
    """

    def __init__(
        self,
        config: LemaConfig,
        plan: PhasePlan,
        replicas: Replicas,
        callbacks: Sequence[Any] = (),
        *,
        evaluates: bool = False,
        told: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._plan, self._boundaries, self._replicas, self._told = plan, plan.boundaries(), replicas, told
        self._first = replicas.first
        self._directory = Path(config.output_dir)
        steps: dict[str, Any] = {"batch_size": plan.batch_size, "max_steps": plan.num_steps, "seed": plan.seed}
        peak = max(phase.learning_rate for phase in plan.phases)
        self._args = training_arguments(
            LemaConfig(**{**config.to_dict(), **steps, "learning_rate": peak}), evaluates=evaluates
        )
        self._state = TrainerState(
            epoch=None,  # type: ignore[arg-type] # there are none, and whatever shows them leaves them out
            max_steps=plan.num_steps,
            num_train_epochs=1,
            train_batch_size=plan.batch_size,
            is_local_process_zero=replicas.local_rank == 0,
            is_world_process_zero=self._first,
        )
        self._state.compute_steps(self._args, plan.num_steps)
        self.control = TrainerControl()
        reports = report_callbacks(config) if self._first else []
        self._callbacks = [DefaultFlowCallback, *reports, *callbacks]
        self._handler: CallbackHandler | None = None
        self._metrics: MetricsLog | None = None
        self._model: StreamedModel | None = None
        self._index = self._done = 0

    def __enter__(self) -> Self:
        self._metrics = MetricsLog(self._directory / METRICS_NAME) if self._first else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def begin(
        self,
        index: int,
        done: int,
        model: StreamedModel,
        module: Any,
        optimizer: Optimizer,
        schedule: Any,
        best: Mapping[str, Any] | None = None,
        unlogged: tuple[float, int] = (0.0, 0),
    ) -> None:
        """A phase begins, or goes on after `done` of its steps.

        Args:
            index: of the phase.
            done: of its steps.
            model: whose counters are read.
            module: what callbacks see as the model.
            optimizer: likewise.
            schedule: likewise.
            best: `step` and `eval_loss` of the lowest validation loss of the phase so far.
            unlogged: what `unlogged` was after that step.
        """
        self._index, self._done, self._model = index, done, model
        self._state.global_step = self._boundaries[index].first_step + done
        self._state.best_metric = self._state.best_global_step = None  # each phase has its own
        self._note(best)
        if self._handler is None:
            if self._state.global_step and (self._directory / METRICS_NAME).is_file():
                past = read_metrics(self._directory / METRICS_NAME)
                self._state.log_history = [row for row in past if row.get("step", 0) <= self._state.global_step]
            self._handler = CallbackHandler(self._callbacks, module, None, optimizer, schedule)
            self.fire("on_init_end")
            self.fire("on_train_begin")
        self._handler.model, self._handler.optimizer, self._handler.lr_scheduler = module, optimizer, schedule
        self.event("phase_resumed" if done else "phase_begin", trains=self._plan.phases[index].trains)
        self._window = self._opened()
        self._window.loss, self._window.trained_tokens = unlogged

    @property
    def unlogged(self) -> tuple[float, int]:
        """Of the steps since the last line of metrics: the sum of their losses by token, and their trained tokens."""
        return self._window.loss, self._window.trained_tokens

    def save_state(self, directory: Path) -> None:
        """Write what callbacks know of the run as `transformers` does: `trainer_state.json`."""
        self._state.save_to_json(str(directory / TRAINER_STATE))

    def fire(self, event: str, *details: Any) -> None:
        """Call every callback."""
        assert self._handler is not None
        self.control = getattr(self._handler, event)(self._args, self._state, self.control, *details)

    def stepped(self, loss: float, trained: int, tokens: int, *, dropped: bool = False) -> None:
        """A step has been taken, or dropped; afterwards `control` says what is asked for, in all processes alike."""
        self._done += 1
        self._state.global_step += 1
        if not dropped:
            self._window.add(loss, trained, tokens)
        self.fire("on_step_end")
        self.agree()

    def agree(self) -> None:
        """Do in every process what a callback has asked for in any: a signal may have come to one of them first."""
        if self._replicas.num_processes == 1:
            return
        asked = self._replicas.everyone([name for name, value in vars(self.control).items() if value is True])
        for name in {name for names in asked for name in names}:
            setattr(self.control, name, True)

    def measured(self, learning_rate: float, grad_norm: float | None) -> None:
        """Write what was measured since the last time, if anything."""
        window = self._window
        if not window.trained_tokens:
            return
        assert self._model is not None
        seconds = time.perf_counter() - window.began
        self._log(
            {
                "loss": window.mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
                "tokens_per_second": window.tokens / seconds,
                **since(window.counters, self._model.counters),
                "memory": self._model.backend.memory().used,
            }
        )
        self._window = self._opened()

    def evaluated(self, found: Mapping[str, float], best: Mapping[str, Any] | None) -> None:
        """Write what validation has found; `best` is the `step` and `eval_loss` of the lowest of the phase."""
        self._log(dict(found))
        self.fire("on_evaluate", dict(found))
        self.agree()
        self._note(best)

    def event(self, name: str, **details: Any) -> None:
        """Write that something happened between two steps; no loss is in such a line."""
        self._write({"event": name, **details})

    def end(self) -> None:
        """No further step is taken in this run."""
        if self._handler is None:  # nor was any
            return
        self.fire("on_train_end")
        try:
            if self._first:
                plot_loss(self._directory / METRICS_NAME, self._directory / PICTURE)
        except DiskError as error:  # a picture is not worth a run
            warnings.warn(f"{error.what} ({error.where})", stacklevel=2)

    def release(self) -> None:
        """Forget the phase's model and optimizer, that nothing of them is in memory in the next one."""
        self._model = None
        if self._handler is not None:
            self._handler.model = self._handler.optimizer = self._handler.lr_scheduler = None

    def _note(self, best: Mapping[str, Any] | None) -> None:
        """Have callbacks know the lowest validation loss of the phase, and the step of the run it was measured at."""
        if best is not None:
            self._state.best_metric = best["eval_loss"]
            self._state.best_global_step = self._boundaries[self._index].first_step + best["step"]

    def _log(self, logs: dict[str, Any]) -> None:
        row = self._write(logs)
        self._state.log_history.append(row)
        self.fire("on_log", dict(logs))

    def _write(self, what: Mapping[str, Any]) -> dict[str, Any]:
        boundary = self._boundaries[self._index]
        per_step = self._plan.batch_size * self._plan.max_length
        row = {
            "phase": boundary.name,
            "stage": self._index,
            "step": self._state.global_step,
            "step_in_phase": self._done,
            "tokens": boundary.first_token + self._done * per_step,
            **what,
        }
        if self._metrics is not None:
            self._metrics.note(row)
        self._told(row)
        return row

    def _opened(self) -> Window:
        assert self._model is not None
        return Window(time.perf_counter(), self._model.counters)


@dataclass
class Underway:
    """A phase that is being trained.

    Attributes:
        places: where the run's phases are.
        index: of the phase.
        model: what it has opened.
        trains: what trains.
        mixture: its rows.
        eval_rows: rows to validate on; None: there is no validation.
        keep: checkpoints to keep, the newest; None: all.
        data: what tells its rows apart from others, as JSON types.
        done: steps taken.
        eval_loss: of the step just taken, if it was followed by validation.
        best: `step` and `eval_loss` of the lowest so far, and whether its checkpoint is kept `only` for that.
        left: what callbacks have asked for after the step just taken, where a stop has come between; None: none has.
        unlogged: as `PhaseLog.unlogged`.
    """

    places: Places
    index: int
    model: LemaModel
    trains: Adapters | Weights
    mixture: Mixture
    eval_rows: int | None
    keep: int | None
    data: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0
    eval_loss: float | None = field(default=None, init=False)
    best: dict[str, Any] | None = field(default=None, init=False)
    left: Mapping[str, Any] | None = field(default=None, init=False)
    unlogged: tuple[float, int] = field(default=(0.0, 0), init=False)
    _mark: Generators | None = field(default=None, init=False)  # where they were when nothing was under way
    _saved: int | None = field(default=None, init=False)  # the last step whose checkpoint is there

    @property
    def steps(self) -> int:
        """How many the phase has."""
        return self.places.plan.steps(self.index).steps

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of this phase.

        Raises:
            AdapterError: it is damaged, or of another kind of training.
        """
        about = self.trains.load(checkpoint)
        self.done, self.eval_loss, self.best = int(about["step"]), about.get("eval_loss"), about.get("best")
        loss, trained = about.get("unlogged", (0.0, 0))
        self.left, self.unlogged, self._saved = about.get("left"), (float(loss), int(trained)), self.done
        if checkpoint != self.places.checkpoint(self.index, self.done):  # from elsewhere: the run has one of its own
            if self.best is not None and self.best["step"] != self.done:
                self.best = None  # that checkpoint stayed behind
            self.save()
        else:
            self._note()

    def run(self, log: PhaseLog, schedule: Any, stop: Stop, at_layer: Stop | None = None) -> None:
        """Take the steps that are left.

        Args:
            log: of the run.
            schedule: of the learning rate.
            stop: asked after each step.
            at_layer: asked before each layer; None: nobody is.

        Raises:
            Stopped: `stop`, `at_layer` or a callback said so; a checkpoint of the last step was written.
        """
        self.trains.require_room(2 if self.model.config.save_steps and not self.done else 1)
        with ExitStack() as stack:
            if at_layer is not None:
                stack.enter_context(self.model.adapter.polled(at_layer))
            try:
                self._steps(log, schedule, stop)
                return
            except StopRequested as request:
                why = request.why
        raise self._cut_short(log, why)

    def _cut_short(self, log: PhaseLog, why: str) -> Stopped:
        """Go back to the end of the last step, save that unless it is saved, and return what ends the run."""
        assert self._mark is not None, "nothing was begun that could be stopped"
        self._mark.put_back(self.model.backend)
        stopped = self._stop_of(why)
        if self.left is not None or self._saved != self.done:
            self.unlogged = log.unlogged
            try:
                self.save(log)
            except DiskFull as error:
                raise unsaved(stopped, error) from stopped
            log.fire("on_save")
        log.end()
        return stopped

    def _stop_of(self, why: str) -> Stopped:
        return Stopped(
            f"stopped by {why} after step {self.done} of phase {self.places.plan.boundaries()[self.index].name}",
            where=str(self.places.checkpoint(self.index, self.done)),
            how="go on from there with --resume",
        )

    def _steps(self, log: PhaseLog, schedule: Any, stop: Stop) -> None:
        plan, replicas = self.places.plan, self.model.backend.replicas
        rows, size = plan.batch_size, plan.micro_batch_size
        if self.left is not None:
            vars(log.control).update(self.left)
            self._after_step(log, stop)
        for step in range(self.done, self.steps):
            self._mark = Generators.now(self.model.backend)
            log.fire("on_step_begin")
            drawn = self.mixture.rows(step * rows, rows, replicas.rank, replicas.size, size)
            batch = self.mixture.collated(drawn, replicas.size)
            where = f", rows {', '.join(f'{one.row} of {one.source}' for one in drawn)}"
            result = self.trains.step([] if batch is None else split_batch(batch, size), log.fire, where)
            with warnings.catch_warnings():
                # The rate is that of the plan's step, whether or not that was taken; torch warns if the first was not.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
                schedule.step()
            self.done, self.eval_loss = step + 1, None
            log.stepped(result.loss, result.trained_tokens, result.tokens, dropped=result.dropped is not None)
            if result.dropped is not None:
                why, at = result.dropped.what, result.dropped.where
                log.event("skipped", skipped=self.trains.skipped_steps, why=why, at=at)
            if log.control.should_log or self.done == self.steps:
                log.measured(plan.learning_rate(self.index, step), result.grad_norm)
            self._after_step(log, stop)

    def _after_step(self, log: PhaseLog, stop: Stop) -> None:
        """Validate and save, where either is due, and end the run, if that was asked for."""
        plan, ended, better, best = self.places.plan, self.done == self.steps, False, self.best
        if self.eval_rows is not None and (log.control.should_evaluate or ended):
            self.left = {name: value for name, value in vars(log.control).items() if isinstance(value, bool)}
            self._mark = Generators.now(self.model.backend)
            better = self._validated(log, self.eval_rows)
        self.left = None
        if ended:
            log.event("phase_end", final_eval_loss=self.eval_loss, best=self.best)
        why = self._stopped(log, stop)
        if plan.boundaries()[self.index].first_step + self.done == plan.num_steps:
            why = None  # it has come to its end
        due = bool(ended or log.control.should_save or why)
        if better and self.best is not None:
            self.best["only"] = not due
        if better or due:
            self.unlogged = log.unlogged
            if self._saves_now(log, best, ends=ended, why=why):
                log.fire("on_save")
        if why:
            log.end()
            raise self._stop_of(why)

    def _saves_now(self, log: PhaseLog, best: dict[str, Any] | None, *, ends: bool, why: str | None) -> bool:
        """Write a checkpoint; return whether it is there. On a full disk the run goes on without, unless it ends.

        Args:
            log: of the run.
            best: as it was before this step: the best is one that is on disk.
            ends: the phase does.
            why: the run is stopped; None: it is not.

        Raises:
            DiskFull: there is no room for the checkpoint that it ends with.
        """
        try:
            self.save(log)
        except DiskFull as error:
            if why:
                stopped = self._stop_of(why)
                raise unsaved(stopped, error) from stopped
            if ends:
                raise
            self.best, log.control.should_save = best, False  # the next interval asks again
            if self.model.backend.replicas.first:
                say_passed_over(error, f"step {self.done} of phase {self.places.plan.boundaries()[self.index].name}")
            return False
        return True

    def save(self, log: PhaseLog | None = None) -> None:
        """Write a checkpoint of the step just taken, say that it is the latest, and forget those that are too old.

        Args:
            log: what callbacks know of the run, to be saved with it; None: of this run there is nothing yet.

        Raises:
            DiskFull: there was no room for it.
            DiskError: it could not be written.
        """
        plan, phase = self.places.plan, self.places.plan.phases[self.index]
        base = Path(self.model.config.model_name_or_path)
        about = {
            "plan": plan.numbers(self.index + 1),
            "data": dict(self.data),
            "phase": phase.name,
            "kind": phase.trains,
            "step": self.done,
            "ended": self.done == self.steps and self.left is None,
            "left": self.left,
            "unlogged": self.unlogged,
            "base": str(base.absolute()) if base.exists() else str(base),
            "eval_loss": self.eval_loss,
            "best": self.best,
        }
        with self.model.adapter.patient("saving a checkpoint"):
            self.trains.save(self.places.checkpoint(self.index, self.done), about, log.save_state if log else None)
        self._saved = self.done
        self._note()

    def _note(self) -> None:
        def note() -> None:
            self.places.note_latest(self.index, self.done)
            self.places.note_best(self.index, self.best)
            self.places.forget_old(self.index, self.done, self.keep)

        first_alone(self.model.backend.replicas, note)

    def _validated(self, log: PhaseLog, rows: int) -> bool:
        """Validate on so many rows; return whether the loss is the lowest of the phase."""
        plan = self.places.plan
        found = validate(
            self.model.adapter,
            self.mixture,
            rows,
            at_once=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
        )
        self.eval_loss = found["eval_loss"]
        better = self.best is None or self.eval_loss < self.best["eval_loss"]
        if better:
            self.best = {"step": self.done, "eval_loss": self.eval_loss}
        log.evaluated(found, self.best)
        return better

    def _stopped(self, log: PhaseLog, stop: Stop) -> str | None:
        """Why the run ends after this step, in all processes alike; None: it goes on."""
        why = next((one for one in self.model.backend.replicas.everyone(stop()) if one), None)
        return why or ("a callback" if log.control.should_training_stop else None)
