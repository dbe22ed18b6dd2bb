"""What the run loop drives: something that takes optimizer steps, saves itself and is restored.

`LemaTrainer` does so for adapters, `FullTraining` for a model's own weights. The loop knows only the protocol `Steps`.
What both do alike when a step is dropped or a checkpoint needs room is here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lema.backend import Replicas
from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.engine import StreamedModel
from lema.engine.head.loss import attended_tokens, trained_tokens
from lema.errors import NonFiniteError
from lema.storage.diskspace import check_room
from lema.train.checkpoint.format import Writer


@dataclass(frozen=True)
class StepResult:
    """What one pass did, in all processes together."""

    loss: float  # the mean over its trained tokens; of an objective of examples, over those
    trained_tokens: int  # how many these are
    tokens: int  # all that are not padding
    grad_norm: float | None  # of the gradients before clipping, where the optimizer stepped
    dropped: NonFiniteError | None = None  # why the step was dropped that ended with this pass; None: it was not
    # What an objective has measured, by name: a sum, and the number of things it is the sum of.
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def no_event(_: str) -> None:
    """Is called where no callback listens."""


class Steps(Protocol):
    """Optimizer steps over one selection of parameters of a streamed model."""

    config: LemaConfig
    model: StreamedModel
    global_step: int
    """Optimizer steps taken or dropped, as this object and its checkpoints count them."""
    skipped_steps: int
    """How many of these were dropped, for a loss or a gradient that was not finite."""

    @property
    def module(self) -> nn.Module | None:
        """What callbacks see as the model."""

    def ready(self) -> Optimizer:
        """Return the optimizer, made if need be, with the model in training mode."""

    def accumulate(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        more: bool = False,
        following: Sequence[Mapping[str, Tensor]] | None = None,
        where: str = "",
        on_event: Callable[[str], None] = no_event,
    ) -> StepResult:
        """Take one optimizer step; of several processes each gives its share of the rows, which may be none.

        Args:
            micro_batches: with `labels`; every layer is leased once for all of them.
            more: another step follows at once, and its first layers may be read while this one ends.
            following: the micro-batches of that step, where some of its layers may be left out.
            where: which rows these are, for the error where the loss or a gradient is not finite.
            on_event: called with the names of the events around the optimizer's step, where such moments exist.
        """

    def require_room(self, count: int) -> None:
        """Raise `DiskFull`, in every process, unless `output_dir` has room for so many checkpoints."""

    def save_checkpoint(
        self, directory: Path, extra: Mapping[str, Any] | None = None, writers: Sequence[Writer] = ()
    ) -> None:
        """Write a checkpoint with `extra` in its state, and with the files that `writers` add; all or nothing."""

    def restore(self, directory: Path) -> dict[str, Any]:
        """Go on from a checkpoint whose files were compared with its manifest; return its `extra`."""

    def take_settings(self, changed: Collection[str]) -> None:
        """Let the settings of these names hold from the next step on, as `config` has them now."""


def count_tokens(micro_batches: Sequence[Mapping[str, Tensor]], model: StreamedModel) -> tuple[int, int]:
    """Return how many tokens all processes train (with an objective of examples 1, because the loss of a pass is a mean
    already), and how many are not padding; each gives its share of the rows.
    """
    shifted = model.objective is not None or model.shifts_labels
    here = trained_tokens(micro_batches, shifted=shifted), attended_tokens(micro_batches)
    counted = model.backend.replicas.exchange(here)
    trained = sum(one for one, _ in counted)
    return trained if model.objective is None else min(trained, 1), sum(tokens for _, tokens in counted)


def measured_here(model: StreamedModel) -> dict[str, tuple[float, float]]:
    """Return what the objective has measured in the last pass of this process, if there is one; one read tells all."""
    if model.objective is None or not model.measured:
        return {}
    sums = torch.stack([total.float() for total, _ in model.measured.values()]).tolist()
    counts = [count for _, count in model.measured.values()]
    return {name: (total, count) for name, total, count in zip(model.measured, sums, counts, strict=True)}


def read_measured(model: StreamedModel) -> dict[str, tuple[float, float]]:
    """Return what the objective has measured in the last pass, in all processes together, each of which calls this."""
    return {} if model.objective is None else added(*model.backend.replicas.exchange(measured_here(model)))


def added(*found: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the sums, by name, of sums and numbers of things."""
    whole: dict[str, tuple[float, float]] = {}
    for name, (total, count) in chain(*(one.items() for one in found)):
        before = whole.get(name, (0.0, 0.0))
        whole[name] = before[0] + total, before[1] + count
    return whole


def means(measured: Mapping[str, tuple[float, float]], prefix: str = "") -> dict[str, float]:
    """Return the mean of each, its name behind `prefix`."""
    return {f"{prefix}{name}": total / count for name, (total, count) in measured.items() if count}


def may_drop(error: NonFiniteError, skipped: int, limit: int) -> bool:
    """Whether a step may be dropped after `skipped` others, of at most `limit`; if not, `error` says how many were."""
    if skipped < limit:
        return True
    if limit:
        error.how = f"{limit} steps were dropped before this one (max_skipped_steps); {error.how}"
    return False


def warn_dropped(error: NonFiniteError, step: int, skipped: int, limit: int, replicas: Replicas) -> None:
    """Have the first process warn that a step, counted from 1, was dropped: the `skipped`th of at most `limit`."""
    if replicas.first:
        what = f"step {step} was dropped, {skipped} of at most {limit}: {error.what} ({error.where})"
        warnings.warn(what, stacklevel=4)


def warn_of_no_use(config: LemaConfig, *, shared: bool, lazy: bool) -> None:
    """Warn of settings that do nothing on a device that computes in host memory, or that compiles what it runs."""
    if config.offloading_tier == "host" and shared:
        what = "activation_offloading saves no memory on a device that computes in host memory: `disk` would"
        warnings.warn(what, stacklevel=3)
    if lazy and not config.gradient_checkpointing:
        warnings.warn(
            "gradient_checkpointing: false does nothing on this device: a layer whose activations are kept would "
            "keep a copy of its weights with them, so every layer is computed again; set it to true",
            stacklevel=3,
        )


def check_room_for(count: int, nbytes: int, directory: Path, replicas: Replicas) -> None:
    """Raise `DiskFull` in all processes, which all call this, unless a directory has room for so many checkpoints."""
    what = "a checkpoint" if count == 1 else f"{count} checkpoints"
    first_alone(replicas, lambda: check_room(directory, count * nbytes, what))
