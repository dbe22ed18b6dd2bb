"""One training step after the other: micro-batches, accumulation, guards, clipping, optimizer, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lema.adapter import load_weights, save_adapter
from lema.checkpoint import (
    checkpoints,
    generator_states,
    read_state,
    restore_generators,
    restore_optimizer,
    write_checkpoint,
)
from lema.config import LemaConfig
from lema.errors import ConfigError, DataError, NonFiniteError
from lema.loss import IGNORED, split_batch, trained_tokens
from lema.optim import make_optimizer
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
        self.schedule: LRScheduler | None = None
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
        batch = as_batch(inputs, labels, attention_mask)
        logits: list[Tensor] = []
        micro_batches = split_batch(batch, self.config.micro_batch_size)
        result = self.accumulate(micro_batches, self.config.gradient_accumulation_steps, logits=logits)
        if self.accumulation_step == 0 and self.config.save_steps and self.global_step % self.config.save_steps == 0:
            self.save_checkpoint(Path(self.config.output_dir) / f"checkpoint-{self.global_step}")
        return torch.cat(logits), result.loss

    def accumulate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_passes: int = 1,
        *,
        more: bool = False,
        logits: list[Tensor] | None = None,
        where: str = "",
    ) -> StepResult:
        """Add the gradients of one layer-major pass; the last pass of a step steps the optimizer.

        Args:
            micro_batches: with `labels`; every layer is leased once for all of them.
            num_passes: passes of this optimizer step.
            more: another pass follows at once, and its first layers may be read while this one ends.
            logits: a list that receives each micro-batch's logits.
            where: which rows these are, for an error.
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
                raise self._non_finite_loss(value, micro_batches, where)
            if more:
                self.model.announce_step()
            (loss * self.scaler.get_scale()).backward()
            self.accumulation_step += 1
            norm = self._step(optimizer) if self.accumulation_step == num_passes else None
        except BaseException:
            self._forget()
            raise
        return StepResult(value, trained, norm)

    def fit(self, dataset: Any, eval_dataset: Any = None, *, resume: bool = False) -> dict[str, Any]:
        """Train for the epochs or steps of the config, with evaluation, checkpoints, metrics and callbacks.

        Args:
            dataset: a `TokenDataset`, or any sequence of rows with `input_ids` and `labels`.
            eval_dataset: likewise, evaluated every `eval_steps`, or after each epoch.
            resume: go on from the newest checkpoint in `output_dir`.

        Returns:
            What was logged last: `train_loss`, `train_tokens_per_second`, ..., and `eval_loss` where it was measured.
        """
        from lema.fit import Run

        return Run(self, dataset, eval_dataset).train(resume=resume)

    @torch.no_grad()
    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Return `eval_loss` (mean over trained tokens), `eval_perplexity`, `eval_tokens` of a data set."""
        from lema.data import Batches

        batches = Batches(dataset, self.config.batch_size, shuffle=False)
        module = self.model.split.model
        was_training = module.training
        module.eval()
        total, tokens = 0.0, 0
        try:
            for batch in batches.epoch():
                loss, count = self.model.evaluate(split_batch(batch, self.config.micro_batch_size))
                total, tokens = total + float(loss) * count, tokens + count
        finally:
            module.train(was_training)
        mean = total / tokens
        perplexity = math.exp(mean) if mean < 700 else math.inf
        return {"eval_loss": mean, "eval_perplexity": perplexity, "eval_tokens": tokens}

    def save_checkpoint(self, directory: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that `load_checkpoint` and `PeftModel.from_pretrained` read.

        Args:
            directory: its name; replaced if it is there.
            extra: further JSON state, for the caller's own use.

        Raises:
            DiskError: it could not be written.
        """
        optimizer, peft_model = self.ready(), self._adapters()

        def write_adapter(part: Path) -> None:
            save_adapter(peft_model, part, self.config.model_name_or_path)
            self.config.save_pretrained(part)

        state = {
            "global_step": self.global_step,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generator_states(self.backend.rng_state()),
            "extra": dict(extra or {}),
        }
        write_checkpoint(Path(directory), optimizer, state, write_adapter)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore adapters, optimizer, schedule, generators and step; return the `extra` that was saved.

        Raises:
            AdapterError: the checkpoint is damaged or of another model or optimizer.
        """
        path, optimizer = Path(directory), self.ready()
        state = read_state(path)
        load_weights(self._adapters(), path, self.model.split.layers_name)
        restore_optimizer(optimizer, path, state["optimizer"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        restore_generators(state["generators"], self.backend.set_rng_state)
        self.global_step, self.accumulation_step = int(state["global_step"]), 0
        extra: dict[str, Any] = state["extra"]
        return extra

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

    def _step(self, optimizer: Optimizer) -> float:
        """Check and clip the gradients, step the optimizer; return the gradients' norm before clipping."""
        self.scaler.unscale_(optimizer)
        parameters = [parameter for parameter in self._parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._denominator != self._trained_tokens:  # the step's tokens were not known when its first batch ran
            torch._foreach_mul_(gradients, self._denominator / self._trained_tokens)
        self.backend.parallel.reduce_gradients(parameters)
        norm = get_total_norm(gradients)
        if not self.scaler.is_enabled() and not bool(norm.isfinite()):
            raise self._non_finite_gradient()
        if self.config.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        optimizer.zero_grad(set_to_none=True)
        self.backend.end_step()
        self.accumulation_step = 0
        self.global_step += 1
        return float(norm)

    def _forget(self) -> None:
        """Drop a step that failed: its gradients and what was announced for it."""
        self.accumulation_step = 0
        self.memory.cancel()
        for parameter in self._parameters():
            parameter.grad = None

    def _non_finite_loss(self, value: float, micro_batches: Sequence[Mapping[str, Any]], where: str) -> NonFiniteError:
        place = self.model.first_non_finite(micro_batches) or "the loss itself"
        return NonFiniteError(
            f"the loss is {value}; the optimizer was not stepped",
            where=f"step {self.global_step + 1}{where}; first non-finite output: {place}",
            how="check the base weights and the data; lower learning_rate, or set max_grad_norm, if it grew before",
        )

    def _non_finite_gradient(self) -> NonFiniteError:
        """Name the highest layer with a non-finite gradient: gradients flow down, so it is where the fault began."""
        split = self.model.split
        for layer in reversed(range(split.num_layers)):
            for name, parameter in split.layers[layer].named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    place = f"{split.layers_name}.{layer}.{name}"
                    return NonFiniteError(
                        "a gradient is not finite; the optimizer was not stepped",
                        where=f"step {self.global_step + 1}, {place}",
                        how="lower learning_rate, or check the base weights of this layer",
                    )
        return NonFiniteError("the gradients' norm is not finite", where=f"step {self.global_step + 1}")


def as_batch(inputs: Any, labels: Tensor | None, attention_mask: Tensor | None) -> dict[str, Tensor]:
    """Return one mapping of `input_ids`, `labels` and, where given, `attention_mask`; see `LemaTrainer.train_step`.

    Raises:
        DataError: the tensors are missing or their shapes differ.
    """
    if isinstance(inputs, Tensor):
        batch: dict[str, Tensor] = {"input_ids": inputs}
    elif isinstance(inputs, Mapping) and "input_ids" in inputs:
        batch = {name: inputs[name] for name in ("input_ids", "labels", "attention_mask") if name in inputs}
    else:
        raise DataError("a batch is a tensor of token ids, or a mapping with input_ids", where="train_step")
    if labels is not None:
        batch["labels"] = labels
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask
    if "labels" not in batch:
        mask = batch.get("attention_mask")
        ids = batch["input_ids"]
        batch["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if len(set(shapes.values())) != 1 or batch["input_ids"].ndim != 2:
        raise DataError(f"a batch is [batch, sequence] throughout, not {shapes}", where="train_step")
    return batch
