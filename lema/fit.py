"""A run over a data set: the loop that fires `transformers`' callback events around the trainer's steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from lema.config import LemaConfig
from lema.data import Batches
from lema.errors import AdapterError, ConfigError
from lema.loss import split_batch
from lema.metrics import MetricsLog, plot_loss
from lema.optim import make_schedule
from lema.stream.lease import StreamCounters

if TYPE_CHECKING:
    from lema.trainer import LemaTrainer

__all__ = ["METRICS", "PICTURE", "Run"]

METRICS = "metrics.jsonl"
PICTURE = "loss.png"
TRAINER_STATE = "trainer_state.json"


@dataclass
class _Window:
    """What happened since `began`: between two lines of metrics, or over the whole run."""

    began: float
    counters: StreamCounters
    loss: float = 0.0
    trained_tokens: int = 0
    tokens: int = 0

    def add(self, loss: float, trained: int, tokens: int) -> None:
        self.loss += loss * trained
        self.trained_tokens += trained
        self.tokens += tokens

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.trained_tokens, 1)


class Run:
    """One call of `LemaTrainer.fit`.

    Args:
        trainer: with its model and callbacks.
        dataset: rows with `input_ids` and `labels`.
        eval_dataset: likewise, or None.
    """

    def __init__(self, trainer: LemaTrainer, dataset: Any, eval_dataset: Any) -> None:
        config = trainer.config
        self._trainer, self._eval_dataset, self._output = trainer, eval_dataset, Path(config.output_dir)
        self._batches = Batches(dataset, config.batch_size, config.seed, config.shuffle)
        per_step, per_epoch = config.gradient_accumulation_steps, self._batches.steps_per_epoch
        all_epochs = max(1, round(config.num_train_epochs * per_epoch))
        self._num_batches = config.max_steps * per_step if config.max_steps else all_epochs
        self._num_steps = -(-self._num_batches // per_step)
        self._args = _arguments(config, evaluates=eval_dataset is not None)
        self._state = TrainerState(
            max_steps=self._num_steps,
            num_train_epochs=-(-self._num_batches // per_epoch),
            train_batch_size=config.batch_size,
        )
        self._state.compute_steps(self._args, self._num_steps)
        self._control = TrainerControl()
        self._last_eval: dict[str, float] = {}

    def train(self, *, resume: bool) -> dict[str, Any]:
        """Train to the end; see `LemaTrainer.fit`."""
        trainer, config = self._trainer, self._trainer.config
        torch.manual_seed(config.seed)
        optimizer = trainer.ready()
        trainer.schedule = trainer.schedule or make_schedule(optimizer, config, self._num_steps)
        if resume:
            self._resume()
        elif trainer.global_step == 0 and trainer.checkpoints():
            raise ConfigError(
                "the output directory holds checkpoints of an earlier run",
                where=config.output_dir,
                how="go on from the newest with --resume (resume=True), or choose another output_dir",
            )
        self._handler = CallbackHandler(
            [DefaultFlowCallback, *get_reporting_integration_callbacks(_reports(config)), *trainer.callbacks],
            trainer.peft_model,
            None,
            optimizer,
            trainer.schedule,
        )
        with ExitStack() as stack:
            self._metrics = stack.enter_context(MetricsLog(self._output / METRICS))
            stack.callback(trainer.memory.cancel)  # what was announced for a step that never came
            self._fire("on_train_begin")
            self._window, whole = self._open_window(), self._open_window()
            self._loop(whole)
            seconds = time.perf_counter() - whole.began
            summary = {
                "train_loss": whole.mean_loss,
                "train_runtime": seconds,
                "train_tokens_per_second": whole.tokens / seconds,
            }
            self._log(summary)
            self._fire("on_train_end")
        plot_loss(self._output / METRICS, self._output / PICTURE)
        return summary | self._last_eval

    def _loop(self, whole: _Window) -> None:
        trainer, per_epoch = self._trainer, self._batches.steps_per_epoch
        per_step = trainer.config.gradient_accumulation_steps
        in_epoch = False
        while trainer.global_step < self._num_steps and not self._control.should_training_stop:
            if not in_epoch:
                self._fire("on_epoch_begin")
                in_epoch = True
            first = trainer.global_step * per_step
            stop = min(first + per_step, self._num_batches)
            self._fire("on_step_begin")
            norm = self._step([self._batches.batch(index) for index in range(first, stop)], whole)
            self._state.global_step, self._state.epoch = trainer.global_step, stop / per_epoch
            self._fire("on_step_end")
            if stop // per_epoch > first // per_epoch or self._control.should_training_stop:
                self._fire("on_epoch_end")
                in_epoch = False
            self._act(norm)

    def _step(self, batches: Sequence[Mapping[str, Any]], whole: _Window) -> float:
        """Run one optimizer step, all its batches in one layer-major pass; return the norm of its gradients."""
        trainer = self._trainer
        micro_batches = [part for batch in batches for part in split_batch(batch, trainer.config.micro_batch_size)]
        rows = [row for batch in batches for row in batch["rows"]]
        self._fire("on_pre_optimizer_step")
        more = trainer.global_step + 1 < self._num_steps
        result = trainer.accumulate(micro_batches, more=more, where=f", rows {rows} of the data")
        self._fire("on_optimizer_step")
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        for window in (self._window, whole):
            window.add(result.loss, result.trained_tokens, tokens)
        assert result.grad_norm is not None
        return result.grad_norm

    def _act(self, norm: float) -> None:
        """Log, evaluate and save as the callbacks have asked."""
        if self._control.should_log:
            self._log(self._numbers(norm))
            self._window = self._open_window()
        if self._control.should_evaluate and self._eval_dataset is not None:
            self._last_eval = self._trainer.evaluate(self._eval_dataset)
            self._log(self._last_eval)
            self._fire("on_evaluate", self._last_eval)
        if self._control.should_save:
            self._save()
            self._fire("on_save")

    def _numbers(self, norm: float) -> dict[str, Any]:
        trainer, window = self._trainer, self._window
        counters, seconds = trainer.memory.counters, time.perf_counter() - window.began
        assert trainer.schedule is not None
        return {
            "loss": window.mean_loss,
            "learning_rate": trainer.schedule.get_last_lr()[0],
            "grad_norm": norm,
            "tokens_per_second": window.tokens / seconds,
            "bytes_read": counters.bytes_read - window.counters.bytes_read,
            "layers_read": counters.layers_read - window.counters.layers_read,
            "seconds_blocked": counters.seconds_blocked - window.counters.seconds_blocked,
            "memory": trainer.backend.memory().used,
        }

    def _log(self, logs: dict[str, Any]) -> None:
        row = {"step": self._state.global_step, "epoch": self._state.epoch, **logs}
        self._metrics.write(row)
        self._state.log_history.append(row)
        self._fire("on_log", {**logs, "epoch": self._state.epoch})

    def _save(self) -> None:
        directory = self._output / f"checkpoint-{self._trainer.global_step}"
        self._trainer.save_checkpoint(directory)
        self._state.save_to_json(str(directory / TRAINER_STATE))
        limit = self._trainer.config.save_total_limit
        for old in self._trainer.checkpoints()[: -limit if limit else 0]:
            shutil.rmtree(old)

    def _resume(self) -> None:
        found = self._trainer.checkpoints()
        if not found:
            raise AdapterError(
                "there is no checkpoint to resume from",
                where=str(self._output),
                how="leave --resume out to begin a new run",
            )
        self._trainer.load_checkpoint(found[-1])
        if (found[-1] / TRAINER_STATE).is_file():
            self._state.log_history = TrainerState.load_from_json(str(found[-1] / TRAINER_STATE)).log_history
        self._state.global_step = self._trainer.global_step
        done = self._trainer.global_step * self._trainer.config.gradient_accumulation_steps
        self._state.epoch = done / self._batches.steps_per_epoch

    def _open_window(self) -> _Window:
        return _Window(time.perf_counter(), self._trainer.memory.counters)

    def _fire(self, event: str, *details: Any) -> None:
        self._control = getattr(self._handler, event)(self._args, self._state, self._control, *details)


def _reports(config: LemaConfig) -> list[str]:
    return [config.report_to] if isinstance(config.report_to, str) else list(config.report_to)


def _arguments(config: LemaConfig, *, evaluates: bool) -> TrainingArguments:
    """Return the settings as callbacks expect to read them."""
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
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 1,
            save_total_limit=config.save_total_limit,
            report_to=_reports(config) or "none",
            seed=config.seed,
            use_cpu=True,  # the device is the backend's business; nothing here may open another
            disable_tqdm=True,
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"these settings do not go together: {error}", how="see the message") from error
