"""One training step after the other: micro-batches, accumulation, guards, clipping, optimizer, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lema.adapter import check_same_adapter, load_weights, save_adapter
from lema.batch import as_batch
from lema.checkpoint import (
    checkpoints,
    forget_old_checkpoints,
    generator_states,
    read_state,
    restore_generators,
    restore_optimizer,
    write_checkpoint,
)
from lema.config import LemaConfig
from lema.errors import AdapterError, ConfigError
from lema.evaluation import evaluate
from lema.loss import split_batch, trained_tokens
from lema.nonfinite import non_finite_gradient, non_finite_loss
from lema.optim import check_optimizer, make_optimizer, set_rates
from lema.stream.lease import LayerStream
from lema.streamed import StreamedModel
from lema.weights import GlobalBinaryIndex

__all__ = ["LemaTrainer", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What one pass did: the mean loss over its trained tokens; the gradients' norm where the optimizer stepped."""

    loss: float
    trained_tokens: int
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
        half = model_adapter.split.model.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.backend.device.type, enabled=half)
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

        Args:
            micro_batches: with `labels`; every layer is leased once for all of them.
            num_passes: passes of this optimizer step.
            more: another pass follows at once, and its first layers may be read while this one ends.
            following: the micro-batches of that pass, where some of its layers may be left out.
            logits: a list that receives each micro-batch's logits.
            where: which rows these are, for an error.
            on_event: called with `"on_pre_optimizer_step"` once the gradients are whole, and with
                `"on_optimizer_step"` before they are dropped.
        """
        optimizer = self.ready()
        trained = trained_tokens(micro_batches)
        if self.accumulation_step == 0:
            self._denominator, self._trained_tokens = trained, 0
        self._trained_tokens += trained
        try:
            loss = self.model.loss(
                micro_batches, num_tokens=self._denominator, scale=self.scaler.get_scale(), logits=logits
            )
            value = float(loss.detach()) * (self._denominator / trained)
            if not math.isfinite(value):
                place = f"step {self.global_step + 1}{where}; the optimizer was not stepped"
                raise non_finite_loss(self.model, micro_batches, value, place)
            if more:
                self.model.announce_step(following)
            self.scaler.scale(loss).backward()
            self.accumulation_step += 1
            last = self.accumulation_step == num_passes
            norm = None
            if last:
                with self.memory.trace.span("optimizer", f"step {self.global_step + 1}"):
                    norm = self._step(optimizer, on_event or (lambda _: None))
        except BaseException:
            self._forget()
            raise
        return StepResult(value, trained, norm)

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
        forget_old_checkpoints(output_dir, directory, self.config.save_total_limit)

    def save_checkpoint(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a checkpoint that `load_checkpoint` and `PeftModel.from_pretrained` read.

        It holds whole steps: batches of a step that has not been taken yet are not in it.

        Args:
            directory: its name; replaced if it is there.
            extra: further JSON state, for the caller's own use.
            write_more: writes further files into the directory it is given, before the checkpoint gets its name.

        Raises:
            DiskError: it could not be written.
        """
        optimizer, peft_model = self.ready(), self._adapters()

        def write_files(part: Path) -> None:
            save_adapter(peft_model, part, self.config.model_name_or_path, self.config.revision)
            self.config.save_pretrained(part)
            if write_more is not None:
                write_more(part)

        state = {
            "global_step": self.global_step,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generator_states(self.backend.rng_state()),
            "extra": dict(extra or {}),
        }
        write_checkpoint(Path(directory), optimizer, state, write_files)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore adapters, optimizer, schedule, generators and step; return the `extra` that was saved.

        Raises:
            AdapterError: the checkpoint is damaged or of another model or optimizer.
            ConfigError: the settings of the adapter have changed since it was saved.
        """
        path, optimizer = Path(directory), self.ready()
        state = read_state(path)
        check_same_adapter(self._adapters(), path)
        load_weights(self._adapters(), path, self.model.split.layers_name)
        restore_optimizer(optimizer, path, state["optimizer"])
        try:
            self._saved_schedule = state["schedule"]
            if self.schedule is not None:
                self.follow(self.schedule)
            self.scaler.load_state_dict(state["scaler"])
            restore_generators(state["generators"], self.backend.set_rng_state)
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

    def checkpoints(self) -> list[Path]:
        """Return this run's checkpoints, the oldest first."""
        return checkpoints(Path(self.config.output_dir))

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

    def _step(self, optimizer: Optimizer, on_event: Callable[[str], None]) -> float:
        """Check and clip the gradients, step the optimizer; return the gradients' norm before clipping."""
        self.scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self._parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._denominator != self._trained_tokens:  # the step's tokens were not known when its first batch ran
            torch._foreach_mul_(gradients, self._denominator / self._trained_tokens)
        self.backend.parallel.reduce_gradients(parameters)
        norm = get_total_norm(gradients)
        scale = self.scaler.get_scale()
        # Half-precision gradients overflow now and then: the scaler skips that step and halves the scale. Where nothing
        # is scaled (any more), the fault is not the scale's.
        if not bool(norm.isfinite()) and scale <= 1.0:
            self.scaler.update()
            raise non_finite_gradient(self.model.split, f"step {self.global_step + 1}")
        if self.config.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        on_event("on_pre_optimizer_step")
        self.scaler.step(optimizer)
        self.scaler.update()
        on_event("on_optimizer_step")
        if self.schedule is not None and self.scaler.get_scale() >= scale:
            self.schedule.step()
        self._drop_gradients()
        self.backend.end_step()
        self.accumulation_step = 0
        self.global_step += 1
        return float(norm)

    def _forget(self) -> None:
        """Drop a step that failed: its gradients and what was announced for it."""
        self.accumulation_step = 0
        self.memory.cancel()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():  # also those that the user's optimizer leaves out
            parameter.grad = None
