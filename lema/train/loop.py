"""What `transformers`' callbacks expect of a trainer: its settings in their words, and the reports asked for.

The end of a step, as a run goes back to it when it is stopped in the midst of what comes after.

A run over a data set: the loop that fires `transformers`' callback events around the trainer's steps.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from lema.backend import Backend
from lema.backend.collectives import check_alike
from lema.backend.interrupt import Stop, StopRequested
from lema.config import LemaConfig
from lema.engine.frozen_prefix import PrefixCache
from lema.engine.optim import make_schedule
from lema.errors import AdapterError, ConfigError, DiskError, DiskFull, NonFiniteError, Stopped
from lema.storage.diskspace import say_passed_over, unsaved
from lema.train.checkpoint.format import PREFIX, TRAINER_STATE
from lema.train.checkpoint.resume import agreed_checkpoint, check_same_run, past_log
from lema.train.checkpoint.rng import Generators
from lema.train.guards import watched
from lema.train.metrics import METRICS_NAME, PICTURE, MetricsLog, Window, cut_back, plot_loss, since
from lema.train.sampler import Course

if TYPE_CHECKING:
    from lema.train.trainer import LemaTrainer

__all__ = ["Mark", "Run", "report_callbacks", "training_arguments"]


def report_callbacks(config: LemaConfig) -> list[Any]:
    """Return a callback for each name in `report_to`.

    Raises:
        ConfigError: a name is unknown, or what it needs is not installed.
    """
    try:
        return [kind() for kind in get_reporting_integration_callbacks(_names(config))]
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"this report cannot be made: {error}",
            where=f"report_to: {', '.join(_names(config))}",
            how="install what it needs, or leave it out of report_to",
        ) from error


def training_arguments(config: LemaConfig, *, evaluates: bool) -> TrainingArguments:
    """Return the settings as callbacks read them.

    Raises:
        ConfigError: they do not go together.
    """
    evaluation = "no" if not evaluates else "steps" if config.eval_steps else "epoch"
    try:
        return TrainingArguments(
            output_dir=config.output_dir,
            run_name=config.run_name,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            lr_scheduler_type=config.lr_scheduler_type,
            max_grad_norm=config.max_grad_norm or 0.0,
            num_train_epochs=config.num_train_epochs,
            max_steps=config.max_steps or -1,
            logging_steps=config.logging_steps,
            eval_strategy=evaluation,
            eval_steps=config.eval_steps,
            metric_for_best_model="eval_loss" if evaluates else None,  # what early stopping asks for
            greater_is_better=False,
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 1,
            save_total_limit=config.save_total_limit,
            report_to=_names(config) or "none",
            seed=config.seed,
            use_cpu=True,  # the device is the backend's business; nothing here may open another
            disable_tqdm=True,
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"these settings do not go together: {error}", how="see the message") from error


def _names(config: LemaConfig) -> list[str]:
    return [config.report_to] if isinstance(config.report_to, str) else list(config.report_to)


@dataclass(frozen=True)
class Mark:
    """What changes between the end of a step and the end of the next, but for what only an optimizer's step changes.

    Attributes:
        generators: where they were.
        fields: of the `TrainerState`, in which callbacks may write at any time.
        num_logged: how many lines its log had; it is long, and not copied.
        left: what was still to be done after the step, as a checkpoint keeps it; None: nothing.
    """

    generators: Generators
    fields: Mapping[str, Any]
    num_logged: int
    left: Mapping[str, Any] | None

    @classmethod
    def of(cls, backend: Backend, state: TrainerState, left: Mapping[str, Any] | None = None) -> Self:
        """Return what to go back to, if it is to be to this moment."""
        return cls(Generators.now(backend), dict(vars(state)), len(state.log_history), left)

    def put_back(self, backend: Backend, state: TrainerState) -> None:
        """Go back."""
        self.generators.put_back(backend)
        vars(state).update(self.fields)
        del state.log_history[self.num_logged :]


Say = Callable[[str], None]


class Run:
    """One call of `LemaTrainer.fit`.

    Args:
        trainer: with its model and callbacks.
        dataset: rows with `input_ids` and `labels`.
        eval_dataset: likewise, or None.
        stop: asked before each layer whether the run is to stop; None: nobody is.
    """

    def __init__(self, trainer: LemaTrainer, dataset: Any, eval_dataset: Any, stop: Stop | None = None) -> None:
        config = trainer.config
        self._trainer, self._eval_dataset, self._stop = trainer, eval_dataset, stop
        self._output = Path(config.output_dir)
        self._replicas = trainer.backend.replicas
        self._course = Course(dataset, config, self._replicas)
        self._num_steps = self._course.num_steps
        self._args = training_arguments(config, evaluates=eval_dataset is not None)
        self._state = TrainerState(
            max_steps=self._num_steps,
            num_train_epochs=self._course.num_epochs,
            train_batch_size=config.batch_size,
            is_local_process_zero=self._replicas.local_rank == 0,
            is_world_process_zero=self._first,
        )
        self._state.compute_steps(self._args, self._num_steps)
        self._control = TrainerControl()
        self._last_eval: dict[str, float] = {}
        self._mark: Mark | None = None  # what a stop goes back to
        self._left: Mapping[str, Any] | None = None  # to be done after the last step, which a stop has cut off
        self._carried = 0.0, 0  # loss and trained tokens of steps since the last line of metrics, before a resume
        self._saved: int | None = None  # the last step whose checkpoint is there

    @property
    def _first(self) -> bool:
        """Whether this process is the one that writes and reports."""
        return self._replicas.first

    def train(self, *, resume: bool, weights_only: bool = False, say: Say = print) -> dict[str, Any]:
        """Train to the end; see `LemaTrainer.fit`."""
        trainer, config = self._trainer, self._trainer.config
        if self._replicas.num_processes > 1:
            check_alike(
                self._replicas, config.to_dict() | {f"data: {name}": one for name, one in self._course.about.items()}
            )
        reports = report_callbacks(config) if self._first else []
        optimizer = trainer.ready()
        if trainer.global_step == 0:
            torch.manual_seed(config.seed + self._replicas.rank)  # dropout: each process draws its own
        if resume:
            self._resume(say if self._first else lambda _: None, weights_only=weights_only)
        else:
            self._check_new()
            if weights_only:
                raise ConfigError(
                    "weights alone are taken of a checkpoint that is gone on from",
                    where="weights_only",
                    how="set resume (--resume) too, or leave it out",
                )
        if config.save_steps:
            trainer.require_room(1 if resume else 2)
        if trainer.schedule is None:
            taken = trainer.global_step - trainer.skipped_steps
            trainer.follow(make_schedule(optimizer, config, self._num_steps, taken))
        self._handler = CallbackHandler(
            [DefaultFlowCallback, *reports, *trainer.callbacks], trainer.peft_model, None, optimizer, trainer.schedule
        )
        summary: dict[str, Any] = {}
        with ExitStack() as stack:
            self._metrics = stack.enter_context(MetricsLog(self._output / METRICS_NAME)) if self._first else None
            stack.callback(trainer.memory.cancel)  # what was announced for a step that never came
            stack.enter_context(self._prefix_kept())
            stack.enter_context(watched(trainer.model, config))
            if self._stop is not None:
                stack.enter_context(trainer.model.interruptible(self._stop))
            self._fire("on_init_end")
            self._fire("on_train_begin")
            self._window, whole = self._open_window(), self._open_window()
            self._window.loss, self._window.trained_tokens = self._carried
            if (why := self._stopped_by(whole)) is not None:
                raise self._cut_short(why)
            if whole.trained_tokens:
                seconds = time.perf_counter() - whole.began
                summary = {
                    "train_loss": whole.mean_loss,
                    "train_runtime": seconds,
                    "train_tokens_per_second": whole.tokens / seconds,
                }
                self._log(summary)
            self._fire("on_train_end")
        try:
            if self._first:
                plot_loss(self._output / METRICS_NAME, self._output / PICTURE)
        except DiskError as error:  # a picture is not worth a trained adapter, which has yet to be saved
            warnings.warn(f"{error.what} ({error.where})", stacklevel=3)
        return summary | self._last_eval

    @contextmanager
    def _prefix_kept(self) -> Iterator[None]:
        """Keep what frozen layers make of each batch, if that is asked for and a batch comes a second time."""
        config, model = self._trainer.config, self._trainer.model
        if not config.cache_frozen_prefix or not self._course.repeats:
            yield
            return
        num_tokens = self._course.tokens_of_an_epoch()
        directory = Path(config.offload_dir or config.output_dir)
        prefix = PrefixCache(model.backend, model.lowest_trained, directory, num_tokens, model.stream.trace)
        with closing(prefix) as model.prefix:
            try:
                yield
            finally:
                model.prefix = None

    def _stopped_by(self, whole: Window) -> str | None:
        """Do what is left of the run; return what has stopped it, None: it has come to its end."""
        try:
            self._loop(whole)
        except StopRequested as request:
            return request.why
        return None

    def _cut_short(self, why: str) -> Stopped:
        """Go back to the end of the last step, save that unless it is saved, and return what ends the run."""
        assert self._mark is not None, "nothing was begun that could be stopped"
        step = self._trainer.global_step
        self._mark.put_back(self._trainer.backend, self._state)
        where = self._output / f"{PREFIX}{step}"
        stopped = Stopped(
            f"stopped by {why} after step {step}", where=str(where), how="go on from there with --resume (resume=True)"
        )
        if self._mark.left is not None or self._saved != step:
            try:
                self._save(self._mark.left)
            except DiskFull as error:
                raise unsaved(stopped, error) from stopped
            self._fire("on_save")
        self._fire("on_train_end")
        return stopped

    def _loop(self, whole: Window) -> None:
        trainer, in_epoch = self._trainer, False
        if (left := self._left) is not None:
            vars(self._control).update(left["asked"])
            self._after_step(left["numbers"], left["after"])
        while trainer.global_step < self._num_steps and not self._control.should_training_stop:
            self._set_mark()
            if not in_epoch:
                self._fire("on_epoch_begin")
                in_epoch = True
            self._fire("on_step_begin")
            numbers = self._step(self._course.batches_of(trainer.global_step), whole)
            self._state.global_step = trainer.global_step
            self._state.epoch = self._course.epoch(trainer.global_step)
            self._fire("on_step_end")
            self._agree()
            in_epoch = self._after_step(numbers)

    def _after_step(self, numbers: Mapping[str, Any], after: str = "step") -> bool:
        """Do what is due after a step, and after the epoch if it has ended; return whether it goes on.

        Args:
            numbers: of the step, for its line of metrics.
            after: `step`; or `epoch`, where what is due after the step has been done.
        """
        if after == "step":
            self._act(numbers, after)
            if self._control.should_epoch_stop:
                raise ConfigError(
                    "a callback set should_epoch_stop: the place in the data follows from the step alone",
                    where=f"step {self._trainer.global_step}",
                    how="set should_training_stop, or lower num_train_epochs",
                )
            self._agree()  # evaluating or saving may have been the last
            if not self._course.ends_epoch(self._trainer.global_step) and not self._control.should_training_stop:
                return True
            self._fire("on_epoch_end")
            self._agree()
        self._act(numbers, "epoch")
        return False

    def _step(self, batches: Sequence[Mapping[str, Any]], whole: Window) -> dict[str, Any]:
        """Run one optimizer step, all its batches in one layer-major pass; return its learning rate and norm."""
        trainer = self._trainer
        assert trainer.schedule is not None
        rate = trainer.schedule.get_last_lr()[0]
        course = self._course
        micro_batches = course.micro_batches(batches)
        rows = [row for batch in batches for row in batch["rows"]]
        more = trainer.global_step + 1 < self._num_steps
        known = more and trainer.model.prefix is not None
        result = trainer.accumulate(
            micro_batches,
            more=more,
            following=course.micro_batches(course.batches_of(trainer.global_step + 1)) if known else None,
            where=f", rows {rows} of the data",
            on_event=self._fire,
        )
        if result.dropped is not None:
            self._note_dropped(result.dropped, rows)
            return {"learning_rate": rate, "grad_norm": None}
        for window in (self._window, whole):
            window.add(result.loss, result.trained_tokens, result.tokens)
        return {"learning_rate": rate, "grad_norm": result.grad_norm}

    def _note_dropped(self, why: NonFiniteError, rows: Sequence[int]) -> None:
        """Have metrics.jsonl say which step was dropped, why, and with which rows of this process."""
        trainer = self._trainer
        about = {"skipped": trainer.skipped_steps, "why": why.what, "at": why.where, "rows": list(rows)}
        if self._metrics is not None:
            self._metrics.note({"step": trainer.global_step, "event": "skipped", **about})

    def _act(self, numbers: Mapping[str, Any], after: str) -> None:
        """Log, evaluate and save as the callbacks have asked, after a step or an epoch."""
        if self._control.should_log and self._window.trained_tokens:
            self._log(self._measured(numbers))
            self._window = self._open_window()
        if self._control.should_evaluate and self._eval_dataset is not None:
            asked = {name: value for name, value in vars(self._control).items() if isinstance(value, bool)}
            self._set_mark({"after": after, "asked": asked, "numbers": dict(numbers)})
            self._last_eval = self._trainer.evaluate(self._eval_dataset)
            self._log(self._last_eval)
            self._fire("on_evaluate", self._last_eval)
            if self._state.best_metric is None or self._last_eval["eval_loss"] < self._state.best_metric:
                self._state.best_metric = self._last_eval["eval_loss"]
                self._state.best_global_step = self._state.global_step
        if self._control.should_save and self._saves_now():
            self._fire("on_save")

    def _measured(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        trainer, window = self._trainer, self._window
        counters, seconds = trainer.model.counters, time.perf_counter() - window.began
        return {
            "loss": window.mean_loss,
            **numbers,
            "tokens_per_second": window.tokens / seconds,
            **since(window.counters, counters),
            "memory": trainer.backend.memory().used,
        }

    def _log(self, logs: dict[str, Any]) -> None:
        row = {"step": self._state.global_step, "epoch": self._state.epoch, **logs}
        if self._metrics is not None:
            self._metrics.note(row)
        self._state.log_history.append(row)
        self._fire("on_log", {**logs, "epoch": self._state.epoch})

    def _saves_now(self) -> bool:
        """Write a checkpoint; return whether it is there. On a full disk the run goes on without, unless it ends.

        Raises:
            DiskFull: there is no room for the checkpoint that the run ends with.
        """
        try:
            self._save()
        except DiskFull as error:
            if self._trainer.global_step >= self._num_steps or self._control.should_training_stop:
                raise
            if self._first:
                say_passed_over(error, f"step {self._trainer.global_step}")
            self._control.should_save = False  # the next interval asks again
            return False
        return True

    def _save(self, left: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of the step; `left`: what is to be done after the step, and has not been."""
        extra = {
            "data": self._course.about,
            "position": self._course.position(self._trainer.global_step),
            "window": [self._window.loss, self._window.trained_tokens],
            "left": left,
        }
        with self._trainer.model.patient("saving a checkpoint"):
            self._trainer.save_step(extra, lambda part: self._state.save_to_json(str(part / TRAINER_STATE)))
        self._saved = self._trainer.global_step

    def _go_on(self, extra: Mapping[str, Any], *, whole: bool) -> None:
        """Take up what a checkpoint says beside the trainer's own; an earlier version wrote none of it.

        Args:
            extra: that.
            whole: whether all that is in the checkpoint was taken up, so that there is nothing to save yet.
        """
        loss, trained = extra.get("window", (0.0, 0))
        self._carried, self._left = (float(loss), int(trained)), extra.get("left")
        self._saved = self._trainer.global_step if whole else None

    def _set_mark(self, left: Mapping[str, Any] | None = None) -> None:
        """Have a stop go back to this moment."""
        self._mark = Mark.of(self._trainer.backend, self._state, left)

    def _check_new(self) -> None:
        trainer = self._trainer
        if trainer.global_step == 0 and trainer.checkpoints():
            raise ConfigError(
                "the output directory holds checkpoints of an earlier run",
                where=str(self._output),
                how="go on from the newest with --resume (resume=True), or choose another output_dir",
            )
        if trainer.global_step >= self._num_steps:
            raise ConfigError(
                f"nothing is left to train: this trainer is at step {trainer.global_step} of {self._num_steps}",
                where="fit",
                how="raise num_train_epochs or max_steps, or begin again with a new trainer",
            )

    def _resume(self, say: Say, *, weights_only: bool) -> None:
        trainer, found = self._trainer, self._trainer.checkpoints()
        if not found:
            raise AdapterError(
                "there is no checkpoint to resume from",
                where=str(self._output),
                how="leave --resume out to begin a new run",
            )
        path = agreed_checkpoint(self._replicas, found, say, weights_only=weights_only)
        changed = check_same_run(path, trainer.config, trainer.peft_model, self._course.about)
        self._go_on(trainer.restore(path, weights_only=weights_only), whole=not weights_only)
        trainer.take_settings({one.name for one in changed})
        say(f"resuming from {path} (step {trainer.global_step} of {self._num_steps})")
        if weights_only:
            say("of this checkpoint the weights are taken, and not the optimizer: its moments begin empty")
        if changed:
            say(f"other settings from here on (then -> now): {'; '.join(str(one) for one in changed)}")
        for name, value in past_log(path / TRAINER_STATE).items():
            setattr(self._state, name, value)
        self._state.global_step, self._state.epoch = trainer.global_step, self._course.epoch(trainer.global_step)
        if self._first and (trainer.global_step < self._num_steps or self._left is not None):
            cut_back(self._output / METRICS_NAME, self._state.log_history, trainer.global_step)

    def _open_window(self) -> Window:
        return Window(time.perf_counter(), self._trainer.model.counters)

    def _agree(self) -> None:
        """Do in every process what a callback has asked for in any: a signal may have come to one of them first."""
        if self._replicas.num_processes == 1:
            return
        asked = self._replicas.everyone([name for name, value in vars(self._control).items() if value is True])
        for name in {name for names in asked for name in names}:
            setattr(self._control, name, True)

    def _fire(self, event: str, *details: Any) -> None:
        self._control = getattr(self._handler, event)(self._args, self._state, self._control, *details)
