"""A run over a data set: the loop that fires `transformers`' callback events around the trainer's steps."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from lema.data import Batch, Batches
from lema.errors import AdapterError, ConfigError, DiskError
from lema.loss import split_batch
from lema.metrics import METRICS_NAME, MetricsLog, plot_loss
from lema.optim import make_schedule
from lema.prefix import PrefixCache
from lema.replicate import check_alike
from lema.reports import report_callbacks, training_arguments
from lema.window import Window, since

if TYPE_CHECKING:
    from lema.trainer import LemaTrainer

__all__ = ["PICTURE", "Run"]

PICTURE = "loss.png"
TRAINER_STATE = "trainer_state.json"


class Run:
    """One call of `LemaTrainer.fit`.

    Args:
        trainer: with its model and callbacks.
        dataset: rows with `input_ids` and `labels`.
        eval_dataset: likewise, or None.
    """

    def __init__(self, trainer: LemaTrainer, dataset: Any, eval_dataset: Any) -> None:
        config = trainer.config
        self._trainer, self._dataset, self._eval_dataset = trainer, dataset, eval_dataset
        self._output = Path(config.output_dir)
        self._replicas = trainer.backend.replicas
        self._batches = Batches(
            dataset,
            config.batch_size,
            config.seed,
            config.shuffle,
            rank=self._replicas.rank,
            size=self._replicas.size,
            micro_batch_size=config.micro_batch_size,
        )
        per_step, per_epoch = config.gradient_accumulation_steps, self._batches.steps_per_epoch
        all_epochs = max(1, round(config.num_train_epochs * per_epoch))
        self._num_batches = config.max_steps * per_step if config.max_steps else all_epochs
        self._num_steps = -(-self._num_batches // per_step)
        self._args = training_arguments(config, evaluates=eval_dataset is not None)
        self._state = TrainerState(
            max_steps=self._num_steps,
            num_train_epochs=-(-self._num_batches // per_epoch),
            train_batch_size=config.batch_size,
            is_local_process_zero=self._replicas.local_rank == 0,
            is_world_process_zero=self._first,
        )
        self._state.compute_steps(self._args, self._num_steps)
        self._control = TrainerControl()
        self._last_eval: dict[str, float] = {}

    @property
    def _first(self) -> bool:
        """Whether this process is the one that writes and reports."""
        return self._replicas.first

    def train(self, *, resume: bool) -> dict[str, Any]:
        """Train to the end; see `LemaTrainer.fit`."""
        trainer, config = self._trainer, self._trainer.config
        if self._replicas.num_processes > 1:
            check_alike(self._replicas, config.to_dict() | {f"data: {name}": one for name, one in self._data.items()})
        reports = report_callbacks(config) if self._first else []
        optimizer = trainer.ready()
        if trainer.global_step == 0:
            torch.manual_seed(config.seed + self._replicas.rank)  # dropout: each process draws its own
        if resume:
            self._resume()
        else:
            self._check_new()
        if trainer.schedule is None:
            trainer.follow(make_schedule(optimizer, config, self._num_steps, trainer.global_step))
        self._handler = CallbackHandler(
            [DefaultFlowCallback, *reports, *trainer.callbacks], trainer.peft_model, None, optimizer, trainer.schedule
        )
        summary: dict[str, Any] = {}
        with ExitStack() as stack:
            self._metrics = stack.enter_context(MetricsLog(self._output / METRICS_NAME)) if self._first else None
            stack.callback(trainer.memory.cancel)  # what was announced for a step that never came
            stack.enter_context(self._prefix_kept())
            self._fire("on_init_end")
            self._fire("on_train_begin")
            self._window, whole = self._open_window(), self._open_window()
            self._loop(whole)
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
        config, model, per_epoch = self._trainer.config, self._trainer.model, self._batches.steps_per_epoch
        if not config.cache_frozen_prefix or self._num_batches <= per_epoch:
            yield
            return
        num_tokens = sum(batch["input_ids"].numel() for batch in self._batches.epoch() if batch is not None)
        directory = Path(config.offload_dir or config.output_dir)
        prefix = PrefixCache(model.backend, model.lowest_trained, directory, num_tokens, model.stream.trace)
        with closing(prefix) as model.prefix:
            try:
                yield
            finally:
                model.prefix = None

    def _loop(self, whole: Window) -> None:
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
            numbers = self._step(self._batches_of(trainer.global_step), whole)
            self._state.global_step, self._state.epoch = trainer.global_step, stop / per_epoch
            self._fire("on_step_end")
            self._agree()
            self._act(numbers)
            if self._control.should_epoch_stop:
                raise ConfigError(
                    "a callback set should_epoch_stop: the place in the data follows from the step alone",
                    where=f"step {trainer.global_step}",
                    how="set should_training_stop, or lower num_train_epochs",
                )
            self._agree()  # evaluating or saving may have been the last
            if stop // per_epoch > first // per_epoch or self._control.should_training_stop:
                self._fire("on_epoch_end")
                self._agree()
                self._act(numbers)
                in_epoch = False

    def _step(self, batches: Sequence[Mapping[str, Any]], whole: Window) -> dict[str, Any]:
        """Run one optimizer step, all its batches in one layer-major pass; return its learning rate and norm."""
        trainer = self._trainer
        assert trainer.schedule is not None
        rate = trainer.schedule.get_last_lr()[0]
        micro_batches = self._micro_batches(batches)
        rows = [row for batch in batches for row in batch["rows"]]
        more = trainer.global_step + 1 < self._num_steps
        known = more and trainer.model.prefix is not None
        result = trainer.accumulate(
            micro_batches,
            more=more,
            following=self._micro_batches(self._batches_of(trainer.global_step + 1)) if known else None,
            where=f", rows {rows} of the data",
            on_event=self._fire,
        )
        for window in (self._window, whole):
            window.add(result.loss, result.trained_tokens, result.tokens)
        return {"learning_rate": rate, "grad_norm": result.grad_norm}

    def _batches_of(self, step: int) -> list[Batch]:
        """Return this process's shares of the batches of one optimizer step."""
        first = step * self._trainer.config.gradient_accumulation_steps
        stop = min(first + self._trainer.config.gradient_accumulation_steps, self._num_batches)
        shares = [self._batches.batch(index) for index in range(first, stop)]
        return [share for share in shares if share is not None]

    def _micro_batches(self, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        return [part for batch in batches for part in split_batch(batch, self._trainer.config.micro_batch_size)]

    def _act(self, numbers: Mapping[str, Any]) -> None:
        """Log, evaluate and save as the callbacks have asked."""
        if self._control.should_log and self._window.trained_tokens:
            self._log(self._measured(numbers))
            self._window = self._open_window()
        if self._control.should_evaluate and self._eval_dataset is not None:
            self._last_eval = self._trainer.evaluate(self._eval_dataset)
            self._log(self._last_eval)
            self._fire("on_evaluate", self._last_eval)
            if self._state.best_metric is None or self._last_eval["eval_loss"] < self._state.best_metric:
                self._state.best_metric = self._last_eval["eval_loss"]
                self._state.best_global_step = self._state.global_step
        if self._control.should_save:
            self._save()
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
            self._metrics.write(row)
        self._state.log_history.append(row)
        self._fire("on_log", {**logs, "epoch": self._state.epoch})

    def _save(self) -> None:
        self._trainer.save_step({"data": self._data}, lambda part: self._state.save_to_json(str(part / TRAINER_STATE)))

    @cached_property
    def _data(self) -> dict[str, Any]:
        """What, with the step, says where in the data a run is."""
        config, fingerprint = self._trainer.config, getattr(self._dataset, "fingerprint", None)
        return {
            "rows": len(self._dataset),
            "fingerprint": fingerprint() if callable(fingerprint) else None,
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "shuffle": config.shuffle,
            "seed": config.seed,
        }

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

    def _resume(self) -> None:
        found = self._trainer.checkpoints()
        if not found:
            raise AdapterError(
                "there is no checkpoint to resume from",
                where=str(self._output),
                how="leave --resume out to begin a new run",
            )
        then = self._trainer.load_checkpoint(found[-1]).get("data", self._data)
        if changed := [
            f"{name} (it was {then.get(name)})" for name, now in self._data.items() if then.get(name) != now
        ]:
            raise ConfigError(
                f"the run began with other data or batches: {', '.join(changed)} changed",
                where=str(found[-1]),
                how="resume with the data and settings it began with, or begin a new run in another output_dir",
            )
        for name, value in _past(found[-1] / TRAINER_STATE).items():
            setattr(self._state, name, value)
        self._state.global_step = self._trainer.global_step
        done = self._trainer.global_step * self._trainer.config.gradient_accumulation_steps
        self._state.epoch = done / self._batches.steps_per_epoch

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


def _past(file: Path) -> dict[str, Any]:
    """Read what an earlier process logged and found best; a checkpoint that `train_step` wrote has none of it."""
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return {name: state[name] for name in ("log_history", "best_metric", "best_global_step")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"the checkpoint's log cannot be read: {error!r}", where=str(file)) from error
