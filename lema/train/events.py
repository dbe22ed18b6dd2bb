"""What a run tells while it runs: lines of metrics, and the events of `transformers`' callbacks.

Steps are those of the whole run, so that every curve and bar goes on over the boundaries of phases.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers.trainer_callback as hooks
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    EarlyStoppingCallback,
    SchedulerType,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from lema.backend import Replicas
from lema.config import LemaConfig
from lema.errors import ConfigError, LemaError
from lema.storage.atomic import replace_file
from lema.train.checkpoint.format import TRAINER_STATE, about_run
from lema.train.health.signs import Sign, Signs
from lema.train.metrics import (
    METRICS_NAME,
    PICTURE,
    PLAN_NAME,
    MetricsLog,
    StageMetrics,
    plot_loss,
)
from lema.train.steps import StepResult, Steps

__all__ = [
    "NotePlan",
    "Position",
    "RunEvents",
    "report_callbacks",
    "training_arguments",
    "with_bar",
]


def report_callbacks(config: LemaConfig) -> list[Any]:
    """Return a callback for each name in `report_to`; `ConfigError` where one is unknown, or its
    library is missing.
    """
    try:
        return [kind() for kind in get_reporting_integration_callbacks(_names(config))]
    except (ValueError, ImportError, RuntimeError) as error:
        what = f"this report cannot be made: {error}"
        how = "install its packages, or remove it from report_to"
        raise ConfigError(what, where=f"report_to: {', '.join(_names(config))}", how=how) from error


# Settings that `transformers` calls and reads as they are here.
SAME_SETTINGS = (
    *(
        "output_dir",
        "run_name",
        "seed",
        "learning_rate",
        "weight_decay",
        "gradient_accumulation_steps",
    ),
    *("num_train_epochs", "logging_steps", "eval_steps", "save_total_limit"),
)


def training_arguments(config: LemaConfig, *, evaluates: bool) -> TrainingArguments:
    """Return the settings as callbacks read them; `ConfigError` where they do not go together."""
    # no callback goes by it: each sees the schedule itself
    theirs = {scheduler.value for scheduler in SchedulerType}
    evaluation = "no" if not evaluates else "steps" if config.eval_steps else "epoch"
    try:
        arguments = TrainingArguments(
            **{name: getattr(config, name) for name in SAME_SETTINGS},
            per_device_train_batch_size=config.batch_size,
            lr_scheduler_type=config.lr_scheduler_type
            if config.lr_scheduler_type in theirs
            else "constant",
            max_grad_norm=config.max_grad_norm or 0.0,
            max_steps=config.max_steps or -1,
            eval_strategy=evaluation,
            metric_for_best_model=config.best_by[0]
            if evaluates
            else None,  # what early stopping asks for
            greater_is_better=config.best_by[1],
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 1,
            report_to=_names(config) or "none",
            use_cpu=True,  # the device is the backend's business; nothing here may open another
            disable_tqdm=True,
        )
        # Set here, because given above it asks that checkpoints and evaluations fall together: here
        # the best is saved.
        arguments.load_best_model_at_end = config.load_best_model_at_end
        return arguments
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"these settings do not go together: {error}", how="see the message"
        ) from error


def with_bar(callbacks: Sequence[Any], config: LemaConfig) -> Sequence[Any]:
    """Return callbacks, and before them one that shows a bar as `transformers.Trainer` does, on a
    terminal or in a notebook, unless one of them does."""
    has_bar = any(
        isinstance(callback, hooks.ProgressCallback) or hasattr(callback, "shows_progress")
        for callback in callbacks
    )
    is_interactive = sys.stderr.isatty() or "ipykernel" in sys.modules
    return (
        [_Bar(), *callbacks]
        if is_interactive and not (has_bar or config.disable_tqdm)
        else callbacks
    )


class _Bar(hooks.ProgressCallback):
    """The bar of `transformers.Trainer`; the other numbers of a line are in metrics.jsonl."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Write what people look at."""
        logged_names = (
            "loss",
            "eval_loss",
            "learning_rate",
            "grad_norm",
            "epoch",
            "train_loss",
            "train_runtime",
        )
        shown = {name: number for name, number in (logs or {}).items() if name in logged_names}
        super().on_log(args, state, control, logs=shown, **kwargs)  # type: ignore[no-untyped-call] # transformers' own


class NotePlan(hooks.TrainerCallback):
    """Writes `plan.json` before the first step: the plan, how many steps there are, the
    settings; or `DiskError`.
    """

    def __init__(self, config: LemaConfig, plan: Mapping[str, Any], **about: object) -> None:
        about |= {
            "plan": plan,
            "settings": config.to_dict(),
            "versions": about_run(config, "", None)["versions"],
        }
        self._file = Path(config.output_dir) / PLAN_NAME
        self._contents = about

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - called so
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - called so
        **kwargs: object,  # noqa: ARG002 - called so
    ) -> None:
        """Write it."""
        replace_file(
            self._file, json.dumps({"steps": state.max_steps, **self._contents}, indent=1).encode()
        )


def _names(config: LemaConfig) -> list[str]:
    named = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to)
    return list(get_available_reporting_integrations()) if named == ["all"] else named


@dataclass(frozen=True)
class Position:
    """Where a run is after a step."""

    step: int  # optimizer steps of the whole run
    epoch: float | None  # passes over the data; None: the run does not count them
    row: Mapping[str, Any]  # what a line of metrics begins with
    name: str  # what messages call the step
    checkpoint: Path  # where the checkpoint of the step is, or would be
    is_epoch_end: bool = False  # whether the step took the last batch of an epoch


class RunEvents:
    """Metrics and callbacks of one run, until `close`; of several processes the first writes and
    reports. `num_steps` and `num_epochs` are of the whole run. `on_row` is called with each line of
    metrics. `control` is what callbacks have asked for, `state` what they know of the run."""

    def __init__(
        self,
        config: LemaConfig,
        num_steps: int,
        replicas: Replicas,
        callbacks: Sequence[Any] = (),
        *,
        num_epochs: int | None = None,
        evaluates: bool = False,
        on_row: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._replicas = replicas
        self._on_row = on_row
        self._directory = Path(config.output_dir)
        self._args = training_arguments(config, evaluates=evaluates)
        self.state = TrainerState(
            max_steps=num_steps,
            num_train_epochs=num_epochs or 1,
            train_batch_size=config.batch_size,
            is_local_process_zero=replicas.local_rank == 0,
            is_world_process_zero=replicas.first,
        )
        self.state.compute_steps(self._args, num_steps)
        self.control = hooks.TrainerControl()
        reports = report_callbacks(config) if replicas.first else []
        self._callbacks = [hooks.DefaultFlowCallback, *reports, *callbacks]
        if evaluates and (patience := config.early_stopping_patience):
            # Last, because a stop that comes while another callback works must not find this
            # evaluation counted.
            self._callbacks.append(EarlyStoppingCallback(patience, config.early_stopping_threshold))
        self._handler: hooks.CallbackHandler | None = None
        self._log_file = MetricsLog(self._directory / METRICS_NAME) if replicas.first else None
        self._at = Position(0, None, {}, "the beginning", self._directory)
        self._stage_metrics: StageMetrics | None = None  # of what trains now; None: nothing does

    def close(self) -> None:
        """Close the file of metrics."""
        if self._log_file is not None:
            self._log_file.close()

    @property
    def begun(self) -> bool:
        """Whether any step was about to be taken."""
        return self._handler is not None

    def begin(
        self, steps: Steps, schedule: LRScheduler, at: Position, carried: Mapping[str, Any]
    ) -> None:
        """Begin to train something, or go on with it where `carried` was this; callbacks see
        module and optimizer.
        """
        self.move(at)
        optimizer = steps.ready()
        if self._handler is None:
            self._handler = hooks.CallbackHandler(
                self._callbacks, steps.module, None, optimizer, schedule
            )
            self.fire("on_init_end")
            self.fire("on_train_begin")
            self._go_on_with(self._handler.callbacks)
        self._attach(steps.module, optimizer, schedule)
        self._stage_metrics = StageMetrics(steps, carried)
        if self.signs.odd is not None:
            self._report_sign(Sign("rate", self.signs.odd))

    def _attach(
        self,
        module: nn.Module | None,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
    ) -> None:
        """Have callbacks see what trains."""
        if self._handler is not None:
            self._handler.model = module
            self._handler.optimizer = optimizer
            self._handler.lr_scheduler = schedule

    @property
    def _metrics(self) -> StageMetrics:
        """What is measured of what trains now."""
        assert self._stage_metrics is not None, "nothing was begun"
        return self._stage_metrics

    @property
    def signs(self) -> Signs:
        """The signs that what trains now learns nothing."""
        return self._metrics.signs

    def take_past(self, past: Mapping[str, Any]) -> None:
        """Go on from what an earlier process had logged (`log_history`), and from the states that
        its callbacks were in (`stateful_callbacks`); to be called before `begin`."""
        self.state.log_history = past.get("log_history", [])
        self.state.stateful_callbacks = past.get("stateful_callbacks", {})

    def _go_on_with(self, callbacks: Sequence[Any]) -> None:
        """Let callbacks be in the states that a checkpoint has of them; a run that one of them
        has ended stays so.
        """
        stateful: Any = self.state.stateful_callbacks
        saved = {name: list(states) for name, states in stateful.items()}
        for callback in callbacks:
            if not (states := saved.get(type(callback).__name__)):
                continue
            vars(callback).update(states.pop(0)["attributes"])
            if isinstance(callback, EarlyStoppingCallback):
                ended = callback.early_stopping_patience_counter >= callback.early_stopping_patience
                self.control.should_training_stop |= ended

    def move(self, at: Position) -> None:
        """Be somewhere else in the run."""
        self._at = at
        self.state.global_step = at.step
        self.state.epoch = at.epoch  # type: ignore[assignment] # None is left out

    @property
    def carried(self) -> dict[str, Any]:
        """What a checkpoint keeps of the measurements: those of `StageMetrics`, and the bytes of
        metrics.jsonl (`record`), in the process that writes it."""
        carried = self._metrics.carried
        if self._log_file is None:
            return carried
        return carried | {"record": self._log_file.path.stat().st_size}

    def save_state(self, directory: Path) -> None:
        """Write what callbacks know of the run, and their own states, as `transformers` does:
        `trainer_state.json`. The lines of metrics are on the disk then, because the checkpoint that
        this is part of goes on after them."""
        if self._log_file is not None:
            self._log_file.flush()
        states: Any = {}
        for callback in () if self._handler is None else self._handler.callbacks:
            if isinstance(callback, hooks.ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = states
        self.state.save_to_json(str(directory / TRAINER_STATE))

    def fire(self, event: str, *details: object) -> None:
        """Call every callback."""
        assert self._handler is not None, "nothing was begun"
        if event in (
            "on_pre_optimizer_step",
            "on_optimizer_step",
        ):
            self._metrics.time_optimizer()
        self.control = getattr(self._handler, event)(self._args, self.state, self.control, *details)

    def agree(self) -> None:
        """Do in every process the actions that a callback requested in any: a signal may have
        come to one first.
        """
        if self._replicas.num_processes == 1:
            return
        asked = self._replicas.everyone([name for name, value in self.asked().items() if value])
        for name in {name for names in asked for name in names}:
            setattr(self.control, name, True)

    def asked(self) -> dict[str, bool]:
        """Return what callbacks may ask for, and whether they have."""
        return {
            name: value for name, value in vars(self.control).items() if isinstance(value, bool)
        }

    def counted(self, result: StepResult, rate: float) -> None:
        """Count a step that was taken, at a learning rate, for the next line of metrics; tell at
        once if it looks as if nothing were learnt."""
        self._metrics.count(result)
        for sign in self.signs.observe(result, rate):
            self._report_sign(sign)

    def _report_sign(self, sign: Sign) -> None:
        if self.signs.records(sign):
            self.event("dead", sign=sign.kind, why=sign.why, dead_steps=self.signs.steps)
        if self._replicas.first:
            warnings.warn(f"this run may learn nothing: {self._at.name}: {sign.why}", stacklevel=4)

    def log_steps(self, numbers: Mapping[str, Any]) -> None:
        """Write the mean loss since the last line, if a step was taken, with the `numbers` of
        the last step.
        """
        line = self._metrics.line(numbers)
        if line is not None:
            self.log(line)
            self._metrics.begin_line()

    def summary(self) -> dict[str, Any]:
        """Return loss and speed over all steps, `carried` ones too; nothing, where none was
        taken.
        """
        return self._metrics.summary()

    def log(self, logs: Mapping[str, Any]) -> None:
        """Write a line of metrics, and have callbacks see it."""
        kind = "train" if "loss" in logs else "eval" if "eval_loss" in logs else "summary"
        self.state.log_history.append(self._write(kind, logs))
        epoch = {} if self._at.epoch is None else {"epoch": self._at.epoch}
        self.fire("on_log", {**logs, **epoch})

    def event(self, name: str, **details: object) -> None:
        """Write that something happened between two steps; no loss is in such a line."""
        self._write("event", {"event": name, **details})

    def end(self) -> None:
        """Have callbacks know that no further step is taken in this run."""
        if self._handler is not None:
            self.fire("on_train_end")

    def draw(self) -> None:
        """Draw the curve of the loss, if any was measured; a picture is not worth a run, and is
        only warned of.
        """
        if not self._replicas.first:
            return
        try:
            name = self._directory.absolute().name
            plot_loss(self._directory / METRICS_NAME, self._directory / PICTURE, f"{name}: loss")
        except LemaError as error:
            # The disk refuses the picture, or something that is no file stands in its place.
            warnings.warn(f"cannot draw {PICTURE}: {error}", stacklevel=3)

    def release(self) -> None:
        """Forget the model and the optimizer, so that nothing of them is in memory in the next
        phase.
        """
        self._stage_metrics = None
        self._attach(None, None, None)

    def _write(self, kind: str, what: Mapping[str, Any]) -> dict[str, Any]:
        row = {"type": kind, **self._at.row, "time": time.time(), **what}  # seconds since 1970, UTC
        if self._log_file is not None:
            self._log_file.note(row)
        self._on_row(row)
        return row
