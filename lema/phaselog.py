"""What a run of phases tells while it runs: lines of metrics, and the events of `transformers`' callbacks.

The steps are those of the whole run, so that every curve and bar goes on over the boundaries. A phase has no epochs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from lema.backend import Replicas
from lema.checkpoint import TRAINER_STATE
from lema.config import LemaConfig
from lema.errors import DiskError
from lema.metrics import METRICS_NAME, MetricsLog, plot_loss, read_metrics
from lema.phaseplan import PhasePlan
from lema.reports import report_callbacks, training_arguments
from lema.streamed import StreamedModel
from lema.window import Window, since

__all__ = ["PICTURE", "PhaseLog"]

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
        per_step = self._plan.batch_size * self._plan.block_size
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
