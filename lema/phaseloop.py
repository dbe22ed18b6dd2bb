"""The steps of one phase, and what is due after each: a line of metrics, validation, a checkpoint, an end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema.data.mixture import Mixture
from lema.errors import DiskFull, Stopped
from lema.freespace import say_passed_over, unsaved
from lema.generators import Generators
from lema.loss import split_batch
from lema.model import LemaModel
from lema.phasekinds import Adapters, Weights
from lema.phaselog import PhaseLog
from lema.phaseplaces import Places
from lema.polled import Stop, StopRequested
from lema.replicate import first_alone
from lema.validation import validate

__all__ = ["Underway"]


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
