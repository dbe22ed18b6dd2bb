"""What the run loop drives: something that takes optimizer steps, saves itself and is restored.

`LemaTrainer` does so for adapters, `FullTraining` for a model's own weights. The loop knows only
the protocol `Steps`. What both do alike when tokens are counted or a checkpoint needs room is here,
too. What both do with a step that is not finite is `lema.train.health.stepguard`.
"""

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
from lema.storage.diskspace import check_free_bytes
from lema.train.checkpoint.format import Writer


@dataclass(frozen=True)
class StepResult:
    """What one pass did, in all processes together."""

    loss: float  # the mean over its trained tokens; of an objective of examples, over those
    trained_tokens: int  # how many these are
    tokens: int  # all that are not padding
    grad_norm: float | None  # of the gradients before clipping, where the optimizer stepped
    # why the step was dropped that ended with this pass; None: it was not
    dropped: NonFiniteError | None = None
    # What an objective has measured, by name: a sum, and the number of things it is the sum of.
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def no_event(_: str) -> None:
    """Is called where no callback listens."""


class Steps(Protocol):
    """Optimizer steps over one selection of parameters of a streamed model."""

    config: LemaConfig
    model: StreamedModel

    @property
    def global_step(self) -> int:
        """Optimizer steps taken or dropped, as this object and its checkpoints count them."""

    @property
    def skipped_steps(self) -> int:
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
        """Take one optimizer step; of several processes each gives its share of the rows, which may
        be none.

        The `micro_batches` have `labels`; every layer is leased once for all of them. `more`:
        another step follows at once, and its first layers may be read while this one ends; the
        `following` are its micro-batches, where some of its layers may be left out. `where` tells
        which rows these are, for the error where the loss or a gradient is not finite. `on_event`
        is called with the names of the events around the optimizer's step, where they exist.
        """

    def require_room(self, count: int) -> None:
        """Raise `DiskFull`, in every process, unless `output_dir` has room for so many
        checkpoints.
        """

    def save_checkpoint(
        self,
        directory: Path,
        extra: Mapping[str, Any] | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        """Write a checkpoint with `extra` in its state, and with the files that `writers` add;
        all or nothing.
        """

    def restore(self, directory: Path) -> dict[str, Any]:
        """Go on from a checkpoint whose files were compared with its manifest; return its
        `extra`.
        """

    def take_settings(self, changed: Collection[str]) -> None:
        """Let the settings of these names hold from the next step on, as `config` has them now."""


def count_tokens(
    micro_batches: Sequence[Mapping[str, Tensor]], model: StreamedModel
) -> tuple[int, int]:
    """Return how many tokens all processes train (with an objective of examples 1, because the loss
    of a pass is a mean already), and how many are not padding; each gives its share of the rows."""
    shifted = model.objective is not None or model.shifts_labels
    here = trained_tokens(micro_batches, shifted=shifted), attended_tokens(micro_batches)
    # those that divide rows count the same ones
    counted = model.backend.replicas.exchange(here)[:: model.num_dividing]
    trained = sum(count for count, _ in counted)
    return trained if model.objective is None else min(trained, 1), sum(
        tokens for _, tokens in counted
    )


def measured_here(model: StreamedModel) -> dict[str, tuple[float, float]]:
    """Return what the objective has measured in the last pass of this process, if there is one;
    one read tells all.
    """
    if not model.measured:
        return {}
    sums = torch.stack([total.float() for total, _ in model.measured.values()]).tolist()
    counts = [count for _, count in model.measured.values()]
    return {
        name: (total, count)
        for name, total, count in zip(model.measured, sums, counts, strict=True)
    }


def read_measured(model: StreamedModel) -> dict[str, tuple[float, float]]:
    """Return the objective's measurements in the last pass, over all processes; each of them
    must call this.
    """
    nothing = model.objective is None and model.engine.routers is None
    return {} if nothing else added(*model.backend.replicas.exchange(measured_here(model)))


def added(*measurements: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the sums, by name, of sums and numbers of things."""
    totals: dict[str, tuple[float, float]] = {}
    for name, (total, count) in chain(*(measured.items() for measured in measurements)):
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + total, before[1] + count
    return totals


def means(measured: Mapping[str, tuple[float, float]], prefix: str = "") -> dict[str, float]:
    """Return the mean of each, by its name after `prefix`."""
    return {f"{prefix}{name}": total / count for name, (total, count) in measured.items() if count}


def warn_of_no_use(config: LemaConfig, *, shared: bool, lazy: bool) -> None:
    """Warn of settings without effect on a device that computes in host memory, or that compiles
    its code.
    """
    if config.offloading_tier == "host" and shared:
        what = (
            "activation_offloading saves no memory on a device that computes in host memory: "
            "`disk` would"
        )
        warnings.warn(what, stacklevel=3)
    if lazy and config.gradient_checkpointing is False:
        warnings.warn(
            "gradient_checkpointing: false does nothing on this device: a layer whose "
            "activations are kept would "
            "keep a copy of its weights with them, so every layer is computed again; set "
            "it to true",
            stacklevel=3,
        )


def check_free_bytes_for(count: int, nbytes: int, directory: Path, replicas: Replicas) -> None:
    """Raise `DiskFull` in all processes, which all call this, unless a directory has room for so
    many checkpoints.
    """
    what = "a checkpoint" if count == 1 else f"{count} checkpoints"
    first_alone(replicas, lambda: check_free_bytes(directory, count * nbytes, what))
