"""One training step after the other: micro-batches, accumulation, guards, clipping, optimizer, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lema.adapter import check_same_adapter, load_weights, save_adapter
from lema.adapterbase import check_base, write_base
from lema.batch import as_batch
from lema.checkpoint import (
    checkpoints,
    forget_old_checkpoints,
    optimizer_state,
    read_state,
    restore_optimizer,
    restore_own,
    states_of_all,
    write_checkpoint,
)
from lema.config import LemaConfig
from lema.errors import AdapterError, ConfigError, NonFiniteError
from lema.evaluation import evaluate
from lema.fingerprint import base_fingerprint
from lema.held import whole_adapter
from lema.loss import attended_tokens, split_batch, trained_tokens
from lema.nonfinite import non_finite_loss
from lema.optim import check_optimizer, make_optimizer, set_rates
from lema.replicate import first_alone
from lema.stream.lease import LayerStream
from lema.streamed import StreamedModel
from lema.update import Update, read_numbers
from lema.weights import GlobalBinaryIndex

__all__ = ["LemaTrainer", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What one pass did, in all processes together.

    Attributes:
        loss: the mean over its trained tokens.
        trained_tokens: how many these are.
        tokens: all that are not padding.
        grad_norm: of the gradients before clipping, where the optimizer stepped.
    """

    loss: float
    trained_tokens: int
    tokens: int
    grad_norm: float | None


class LemaTrainer:
    """Trains the adapters of a streamed model.

    Args:
        config: settings of the run.
        model_adapter: the streamed model (`LemaModel.adapter`).
        gbi: where its weights lie.
        lora_manager: PEFT's model, with the adapters; None: the trainer can only evaluate.
        optimizer: over the adapters' parameters; None: AdamW as the config says, made at the first step.
        memory_manager: the stream of layers; None: the model's own.
        callbacks: `transformers.TrainerCallback`s that `fit` calls.
    """

    def __init__(
        self,
        config: LemaConfig,
        model_adapter: StreamedModel,
        gbi: GlobalBinaryIndex,
        lora_manager: PeftModel | None = None,
        optimizer: Optimizer | None = None,
        memory_manager: LayerStream | None = None,
        *,
        callbacks: Sequence[Any] = (),
    ) -> None:
        if memory_manager is not None and memory_manager is not model_adapter.stream:
            raise ConfigError("memory_manager is not the stream of model_adapter", how="leave it out")
        self.config, self.model, self.gbi, self.peft_model = config, model_adapter, gbi, lora_manager
        self.memory, self.backend = model_adapter.stream, model_adapter.backend
        self.callbacks = list(callbacks)
        self.optimizer = optimizer
        if optimizer is not None and lora_manager is not None:
            check_optimizer(optimizer, self._parameters())
        self.schedule: LRScheduler | None = None
        self._saved_schedule: dict[str, Any] | None = None
        self.global_step = 0
        self.accumulation_step = 0
        self.update = Update(model_adapter.split, self.backend, config.max_grad_norm)
        self._denominator = 0  # trained tokens by which the gradients accumulated so far were divided
        self._trained_tokens = 0

    def train_step(
        self, inputs: Any, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Train on one batch; step the optimizer when `gradient_accumulation_steps` batches have been seen.

        Args:
            inputs: token ids, int64 `[batch, sequence]`, or a mapping that also holds the other two.
            labels: `[batch, sequence]`, not shifted, -100 where nothing is learnt; None: the inputs themselves, padding
                excepted.
            attention_mask: `[batch, sequence]`, 0 where a row is padded.

        Returns:
            The logits `[batch, sequence, vocabulary]`, and the mean cross-entropy of the trained tokens.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite; the optimizer was not stepped.
            DataError: no token is trained, or the batch is malformed.
        """
        vocab_size = getattr(self.model.split.model.config.get_text_config(), "vocab_size", None)
        batch = as_batch(inputs, labels, attention_mask, vocab_size)
        logits: list[Tensor] = []
        micro_batches = split_batch(batch, self.config.micro_batch_size)
        result = self.accumulate(micro_batches, self.config.gradient_accumulation_steps, logits=logits)
        if self.accumulation_step == 0 and self.config.save_steps and self.global_step % self.config.save_steps == 0:
            self.save_step()
        return torch.cat(logits), result.loss

    def accumulate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_passes: int = 1,
        *,
        more: bool = False,
        following: Sequence[Mapping[str, Tensor]] | None = None,
        logits: list[Tensor] | None = None,
        where: str = "",
        on_event: Callable[[str], None] | None = None,
    ) -> StepResult:
        """Add the gradients of one layer-major pass; the last pass of a step steps the optimizer.

        The device is waited for once, when all of the pass is queued, for the loss and the gradients' norm.

        Args:
            micro_batches: with `labels`; every layer is leased once for all of them. Of several processes each gives
                its share, and one at least has some.
            num_passes: passes of this optimizer step.
            more: another pass follows at once, and its first layers may be read while this one ends.
            following: the micro-batches of that pass, where some of its layers may be left out.
            logits: a list that receives each micro-batch's logits.
            where: which rows these are, for an error.
            on_event: called with `"on_pre_optimizer_step"` once the gradients are whole, and with
                `"on_optimizer_step"` before they are dropped.
        """
        optimizer, replicas = self.ready(), self.backend.replicas
        counted = replicas.exchange((trained_tokens(micro_batches), attended_tokens(micro_batches)))
        trained, tokens = (sum(column) for column in zip(*counted, strict=True))
        if self.accumulation_step == 0:
            self._denominator, self._trained_tokens = trained, 0
        self._trained_tokens += trained
        try:
            divisor = self._denominator if trained else 0  # of nothing trained there is no mean
            loss = self.model.room.fitted(
                micro_batches,
                lambda parts: self._pass(parts, divisor, more=more, following=following, logits=logits),
                parameters=self._parameters(),
                made=logits,
            )
            self.accumulation_step += 1
            last = self.accumulation_step == num_passes
            norm = None
            if last:  # the step's tokens were not known when its first batch ran
                factor = self._denominator / self._trained_tokens if trained else 1.0
                with self.model.room.once("where the step's gradients are put together"):
                    norm = self.update.finish(optimizer, self._parameters(), factor)
            mine, length = read_numbers(loss, norm)
            value = sum(replicas.exchange(mine)) * (self._denominator / trained)
            if not math.isfinite(value):
                raise self._non_finite(micro_batches, value, mine, where)
            if norm is not None and length is not None:
                with self.memory.trace.span("optimizer", f"step {self.global_step + 1}"):
                    self._step(optimizer, norm, length, on_event or (lambda _: None))
        except BaseException:
            self._forget()
            raise
        return StepResult(value, trained, tokens, length)

    def _pass(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_tokens: int,
        *,
        more: bool,
        following: Sequence[Mapping[str, Tensor]] | None,
        logits: list[Tensor] | None,
    ) -> Tensor:
        """Queue the forward and the backward of one pass; return the loss, divided by `num_tokens`."""
        scale = self.update.scale()  # also where nothing is scaled: the scaler begins with it
        if not micro_batches and num_tokens:  # the other processes have some
            self.model.accompany()
            loss = torch.zeros((), device=self.backend.device)
        else:
            loss = self.model.loss(micro_batches, num_tokens=num_tokens, scale=scale, logits=logits)
        if more:
            self.model.announce_step(following)
        if loss.requires_grad:
            self.update.scaler.scale(loss).backward()
        return loss.detach()

    def fit(self, dataset: Any, eval_dataset: Any = None, *, resume: bool = False) -> dict[str, Any]:
        """Train for the epochs or steps of the config, with evaluation, checkpoints, metrics and callbacks.

        A trainer that has stepped already, or loaded a checkpoint, goes on at its `global_step`.

        Args:
            dataset: a `TokenDataset`, or any sequence of rows with `input_ids` and `labels`.
            eval_dataset: likewise, evaluated every `eval_steps`, or after each epoch.
            resume: go on from the newest checkpoint in `output_dir`.

        Returns:
            What was logged last: `train_loss`, `train_tokens_per_second`, ..., and `eval_loss` where it was measured.
        """
        from lema.fit import Run

        return Run(self, dataset, eval_dataset).train(resume=resume)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Return `eval_loss` (mean over trained tokens), `eval_perplexity`, `eval_tokens` of a data set.

        Raises:
            NonFiniteError: the loss of a batch is NaN or infinite; names its rows and the layer where it began.
        """
        return evaluate(self.model, dataset, self.config)

    def save_step(
        self, extra: Mapping[str, Any] | None = None, write_more: Callable[[Path], None] | None = None
    ) -> None:
        """Write `checkpoint-<global_step>` into `output_dir`, then delete what `save_total_limit` says is too old."""
        output_dir = Path(self.config.output_dir)
        directory = output_dir / f"checkpoint-{self.global_step}"
        self.save_checkpoint(directory, extra, write_more)
        keep = self.config.save_total_limit
        first_alone(self.backend.replicas, lambda: forget_old_checkpoints(output_dir, directory, keep))

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint that `load_checkpoint` and `PeftModel.from_pretrained` read.

        It holds whole steps: batches of a step that has not been taken yet are not in it. Of several processes, all of
        which call this, the first writes; directories are on a disk that all of them see.

        Args:
            directory: its name; replaced if it is there.
            extra: further JSON state, for the caller's own use.
            write_more: writes further files into the directory it is given, before the checkpoint gets its name.

        Raises:
            DiskError: it could not be written.
        """
        peft_model, parallel = self._adapters(), self.backend.parallel
        optimizer, whole = optimizer_state(self.ready(), parallel), whole_adapter(peft_model, parallel)

        def write_files(part: Path) -> None:
            save_adapter(peft_model, part, self.config.model_name_or_path, self.config.revision, whole)
            self.config.save_pretrained(part)
            write_base(part, self._base)
            if write_more is not None:
                write_more(part)

        state = {
            "global_step": self.global_step,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.update.state_dict(),
            **states_of_all(self.backend),
            "extra": dict(extra or {}),
        }
        first_alone(self.backend.replicas, lambda: write_checkpoint(Path(directory), optimizer, state, write_files))

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore adapters, optimizer, schedule, generators and step; return the `extra` that was saved.

        Raises:
            AdapterError: the checkpoint is damaged, of another optimizer, or of a model whose files have changed since.
            ConfigError: the settings of the adapter have changed since it was saved.
        """
        path, optimizer = Path(directory), self.ready()
        state = read_state(path)
        check_same_adapter(self._adapters(), path)
        check_base(path, self.gbi)
        load_weights(self._adapters(), path, self.model.split.layers_name, self.backend.parallel)
        restore_optimizer(optimizer, path, state["optimizer"], self.backend.parallel)
        try:
            self._saved_schedule = state["schedule"]
            if self.schedule is not None:
                self.follow(self.schedule)
            self.update.load_state_dict(state["scaler"])
            restore_own(self.backend, state, self.config.seed)
            self._forget()
            self.global_step = int(state["global_step"])
            return dict(state["extra"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise AdapterError(f"the checkpoint's state is damaged: {error!r}", where=str(path)) from error

    def follow(self, schedule: LRScheduler) -> None:
        """Let the learning rate follow `schedule`, from where the checkpoint that was loaded left it."""
        self.schedule = schedule
        if self._saved_schedule is not None:
            schedule.load_state_dict(self._saved_schedule)
            self._saved_schedule = None
            set_rates(self.ready(), schedule.get_last_lr())

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """What scales half-precision gradients; idle for other dtypes."""
        return self.update.scaler

    def checkpoints(self) -> list[Path]:
        """Return this run's checkpoints, the oldest first."""
        return checkpoints(Path(self.config.output_dir))

    @cached_property
    def _base(self) -> str:
        return base_fingerprint(self.gbi)

    def _adapters(self) -> PeftModel:
        if self.peft_model is None:
            raise ConfigError("there is no adapter to train", how="call initialize_lora() before get_trainer()")
        return self.peft_model

    def ready(self) -> Optimizer:
        """Return the optimizer, made if need be, with the model in training mode."""
        self._adapters().train()
        if self.optimizer is None:
            self.optimizer = make_optimizer(self._parameters(), self.config)
        return self.optimizer

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._adapters().parameters() if parameter.requires_grad]

    def _step(self, optimizer: Optimizer, norm: Tensor, length: float, on_event: Callable[[str], None]) -> None:
        """Step the optimizer and the schedule; `norm` is that of the gradients on the device, `length` on the host."""
        where = f"step {self.global_step + 1}"
        with self.model.room.once("in the optimizer's step"):
            stepped = self.update.step(optimizer, self._parameters(), norm, length, where, on_event)
        if self.schedule is not None and stepped:
            self.schedule.step()
        self._drop_gradients()
        self.backend.end_step()
        self.accumulation_step = 0
        self.global_step += 1

    def _non_finite(
        self, micro_batches: Sequence[Mapping[str, Tensor]], value: float, mine: float, where: str
    ) -> NonFiniteError:
        """Return the error of a loss that is not finite, `mine` being this process's part of it."""
        place = f"step {self.global_step + 1}{where}; the optimizer was not stepped"
        if math.isfinite(mine):
            self.model.accompany(training=False)  # while the other looks for the layer
            return NonFiniteError(f"the loss is {value}", where=f"{place}; it comes from another process")
        return non_finite_loss(self.model, micro_batches, value, place)

    def _forget(self) -> None:
        """Drop a step that failed: its gradients and what was announced for it."""
        self.accumulation_step = 0
        self.memory.cancel()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():  # also those that the user's optimizer leaves out
            parameter.grad = None
