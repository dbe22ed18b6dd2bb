"""One optimizer step of adapters, without asking the device: gradients added up, made whole, clipped, and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lema.backend.group import sum_gradients
from lema.engine import StreamedModel
from lema.model.skeleton import main_dtype

__all__ = ["Update", "read_numbers"]


class Update:
    """Turns micro-batches into gradients, and those of a step, clipped to `max_grad_norm`, into new parameters."""

    def __init__(self, model: StreamedModel, max_grad_norm: float | None) -> None:
        self._model, self._backend, self._max_grad_norm = model, model.backend, max_grad_norm
        self._unscaled = False  # since the scaler was last updated
        half = main_dtype(model.split.model) == torch.float16
        self.scaler = torch.amp.GradScaler(self._backend.device.type, enabled=half)

    def accumulate(
        self,
        parameters: Sequence[nn.Parameter],
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_tokens: int,
        logits: list[Tensor] | None = None,
        announce: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Add the gradients of one pass through the layers, divided by `num_tokens`; return its loss, on the device.

        Where the device's memory runs out, room is made and the pass begins again. Only other processes may have
        micro-batches. `logits` receives each one's; `announce` says, before the backward, what comes after this pass.
        """

        def attempt(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:  # whose tensors go when it fails
            # The scale stays on the device. It is asked for also where nothing trains: the scaler begins with it.
            one = torch.ones((), device=self._backend.device)
            scale = self.scaler.scale(one) if self.scaler.is_enabled() else 1.0
            if not micro_batches and num_tokens:  # the other processes have some
                self._model.accompany()
                loss = torch.zeros((), device=self._backend.device)
            else:
                loss = self._model.loss(micro_batches, num_tokens=num_tokens, scale=scale, logits=logits)
            announce()
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            return loss.detach()

        return self._model.retry.run_pass(attempt, micro_batches, parameters=parameters, made=logits)

    def finish(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], factor: float) -> Tensor:
        """Sum the gradients over all processes, and multiply by `factor`; return their norm, on the device."""
        sum_gradients(self._backend.replicas, parameters)
        self.scaler.unscale_(optimizer)
        self._unscaled = True
        touched = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in touched if parameter.grad is not None]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self._backend.parallel.reduce_gradients(touched)
        return self._backend.parallel.norm(touched)

    def fails(self, length: float) -> bool:
        """Whether the norm of the gradients is not finite, and not for their scale, where the scaler skips the step."""
        return not math.isfinite(length) and self.scaler.get_scale() <= 1.0

    def drop(self) -> None:
        """Take no step with the gradients that `finish` was given, if it was given any."""
        if self._unscaled:
            self._unscaled = False
            self.scaler.update()

    def step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        norm: Tensor,
        length: float,
        on_event: Callable[[str], None],
    ) -> bool:
        """Clip the gradients and step the optimizer, with `on_event` around that; return whether it stepped. `norm` is
        on the device and, as `length`, on the host, where it is not one that `fails`.
        """
        if self._max_grad_norm is not None:
            touched = [parameter for parameter in parameters if parameter.grad is not None]
            clip_grads_with_norm_(touched, self._max_grad_norm, norm)
        on_event("on_pre_optimizer_step")
        self.scaler.step(optimizer)
        self.drop()
        on_event("on_optimizer_step")
        return math.isfinite(length)


def read_numbers(loss: Tensor, norm: Tensor | None) -> tuple[float, float | None]:
    """Wait for the device, once, and return both numbers."""
    if norm is None:
        return float(loss), None
    value, length = torch.stack([loss.double(), norm.to(loss.device).double()]).tolist()
    return value, length
