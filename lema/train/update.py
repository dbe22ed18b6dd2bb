"""One optimizer step of adapters, without asking the device: gradients added up, made whole,
clipped, and applied.

`Update` does that. `StepCount` counts the passes and tokens of the step under way, and
`FollowedSchedule` has the learning rate's schedule.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lema.backend import Replicas
from lema.backend.group import sum_gradients
from lema.backend.interrupt import autograd_in_this_thread
from lema.engine import StreamedModel
from lema.engine.optim import set_rates, step_share
from lema.model.skeleton import main_dtype

__all__ = ["FollowedSchedule", "StepCount", "Update", "loss_of_all", "read_numbers"]

LARGE = 1e30  # numbers that a type has whose squares, of many weights, can be added up


class StepCount:
    """Counts steps, and the passes and trained tokens of the one under way.

    Attributes:
        global_step: optimizer steps that were taken or dropped.
        passes: those of the step under way whose gradients have been added up.
        divisor: the trained tokens of its first pass, by which the loss of each is divided, because
            the step's tokens are not known when that pass runs.
    """

    def __init__(self) -> None:
        self.global_step = 0
        self.passes = 0
        self.divisor = 0
        self._trained_tokens = 0

    def begin_pass(self, trained: int) -> int:
        """Begin a pass with so many trained tokens; return what its loss is divided by, 0 where
        nothing is trained, of which there is no mean."""
        if self.passes == 0:
            self.divisor = trained
            self._trained_tokens = 0
        self._trained_tokens += trained
        return self.divisor if trained else 0

    @property
    def factor(self) -> float:
        """What makes gradients divided by `divisor` the mean over the step's trained tokens."""
        return self.divisor / self._trained_tokens

    def end_pass(self) -> None:
        """Count a pass whose gradients have been added up."""
        self.passes += 1

    def begin_step(self) -> None:
        """Begin the step under way again, or another one."""
        self.passes = 0

    def end_step(self) -> None:
        """Count the step under way, which was taken or dropped."""
        self.begin_step()
        self.global_step += 1

    def restore(self, global_step: int) -> None:
        """Count on from a checkpoint after so many steps."""
        self.global_step = global_step


class FollowedSchedule:
    """The schedule that a learning rate follows. A checkpoint may be loaded before the schedule is
    made: its position waits for that."""

    def __init__(self) -> None:
        self.schedule: LRScheduler | None = None
        self._saved: dict[str, Any] | None = None

    def replace(self, schedule: LRScheduler | None) -> None:
        """Follow another schedule, from where that is."""
        self.schedule = schedule

    def follow(self, schedule: LRScheduler, optimizer: Optimizer) -> None:
        """Follow a schedule of the optimizer's rates, from the position in a loaded checkpoint."""
        self.schedule = schedule
        if self._saved is not None:
            schedule.load_state_dict(self._saved)
            self._saved = None
            set_rates(optimizer, schedule.get_last_lr())

    def restore(self, state: dict[str, Any] | None, optimizer: Optimizer) -> None:
        """Take up the position of a checkpoint, now or in the schedule that is made next."""
        self._saved = state
        if self.schedule is not None:
            self.follow(self.schedule, optimizer)

    def forget_saved(self) -> None:
        """Let the next schedule begin without the position of a checkpoint."""
        self._saved = None

    def step(self) -> None:
        """Count a step that the optimizer took, if a schedule is followed."""
        if self.schedule is not None:
            self.schedule.step()


class Update:
    """Turns micro-batches into gradients, and those of a step, clipped to `max_grad_norm`, into
    new parameters.
    """

    def __init__(
        self, model: StreamedModel, max_grad_norm: float | None, *, sharded: bool = False
    ) -> None:
        self._model = model
        self._backend = model.backend
        self._max_grad_norm = max_grad_norm
        self.over: Replicas | None = (
            model.backend.replicas if sharded and model.backend.replicas.size > 1 else None
        )
        """Over which the optimizer's state is divided; None: each process has all."""
        self._unscaled = False  # since the scaler was last updated
        self.size: Tensor | None = None
        """The norm of what trains after the last step, on the device, where it is read with the
        next loss."""
        half = main_dtype(model.split.model) == torch.float16
        self.scaler = torch.amp.GradScaler(self._backend.device.type, enabled=half)

    def forget(self) -> None:
        """Drop the step under way, and what is known of the parameters that the last one left."""
        self.drop()
        self.size = None

    def accumulate(
        self,
        parameters: Sequence[nn.Parameter],
        micro_batches: Sequence[Mapping[str, Tensor]],
        num_tokens: int,
        logits: list[Tensor] | None = None,
        announce: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Add the gradients of one pass through the layers, divided by `num_tokens`; return its
        loss, on the device. Where the device's memory runs out, room is made and the pass begins
        again. Only other processes may have micro-batches. `logits` receives each one's; `announce`
        says, before the backward, what comes next."""

        # whose tensors go when it fails
        def attempt(micro_batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
            # The scale stays on the device. It is asked for also where nothing trains: the scaler
            # begins with it. Not where none is wanted, because a lazy device would compile a graph
            # for it.
            enabled = self.scaler.is_enabled()
            device = self._backend.device
            scale = self.scaler.scale(torch.ones((), device=device)) if enabled else 1.0
            if not micro_batches and num_tokens:  # the other processes have some
                self._model.join_idle()
                loss = torch.zeros((), device=self._backend.device)
            else:
                loss = self._model.loss(
                    micro_batches, num_tokens=num_tokens, scale=scale, logits=logits
                )
            announce()
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            return loss.detach()

        with autograd_in_this_thread():  # so that a stop is seen before each layer
            return self._model.retry.run_pass(
                attempt, micro_batches, parameters=parameters, outputs=logits
            )

    def finish(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], factor: float
    ) -> Tensor:
        """Sum the gradients over all processes, and multiply by `factor`; return their norm, on
        the device.
        """
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
        """Whether the norm of the gradients is not finite, and not for their scale, where the
        scaler skips the step.
        """
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
        """Clip the gradients and step the optimizer, with `on_event` around that; return whether it
        stepped. `norm` is on the device and, as `length`, on the host, where it is not one that
        `fails`."""
        if self._max_grad_norm is not None:
            touched = [parameter for parameter in parameters if parameter.grad is not None]
            clip_grads_with_norm_(touched, self._max_grad_norm, norm)
        on_event("on_pre_optimizer_step")
        if self.over is None:
            self.scaler.step(optimizer)
        else:
            step_share(optimizer, self.over, partial(self.scaler.step, optimizer))
        with torch.no_grad():
            self.size = size_of(parameters)
        self.drop()
        on_event("on_optimizer_step")
        return math.isfinite(length)


def size_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a norm of what trains, which is finite where all of it is. Squares of fp16 would add
    up to infinity; and the largest number takes six times as long on a CPU."""
    narrow = any(torch.finfo(parameter.dtype).max < LARGE for parameter in parameters)
    return get_total_norm(parameters, math.inf if narrow else 2.0)


def read_numbers(
    loss: Tensor, norm: Tensor | None, size: Tensor | None
) -> tuple[float, float | None]:
    """Wait for the device, once, and return the loss and the norm. The loss is NaN, too, where the
    `size` of what trains is not finite, because a batch may not have met the number that is at
    fault."""
    numbers = [
        tensor.to(loss.device).double() for tensor in (loss, norm, size) if tensor is not None
    ]
    value, *norms = torch.stack(numbers).tolist() if len(numbers) > 1 else [float(loss)]
    sound = size is None or math.isfinite(norms[-1])
    return value if sound else math.nan, None if norm is None else norms[0]


def loss_of_all(replicas: Replicas, mine: float) -> float:
    """Return the sum of all processes' losses, rounded to fp32 as in one process, which adds up its
    micro-batches on the device."""
    return c_float(sum(replicas.exchange(mine))).value
