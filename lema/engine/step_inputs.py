"""What a step is given: its micro-batches on the device, and the loss that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from lema.backend import Backend
from lema.engine.head.labels import shifts_labels
from lema.engine.head.loss import LossChunks, targets_of
from lema.engine.head.objectives import LossSettings, Objective
from lema.engine.head.rows import RowLoss, row_targets
from lema.engine.padding import Padding
from lema.model import Split
from lema.model.inputs import Inputs

__all__ = ["MicroBatches", "StepInputs"]

MicroBatches: TypeAlias = Sequence[Mapping[str, Tensor]]


class StepInputs:
    """Brings micro-batches to the device, and makes their loss.

    Args:
        split: the model in its parts.
        backend: the device.
        settings: what a step is trained by.
        padding: gives rows the shapes that the device is to see.
        chunk_tokens: logits exist for this many tokens at a time.

    Attributes:
        objective: what the loss of rows is; None: the cross-entropy of tokens.
        inputs: brings tensors to the device.
    """

    def __init__(
        self,
        split: Split,
        backend: Backend,
        settings: LossSettings,
        padding: Padding,
        chunk_tokens: int,
    ) -> None:
        self._split = split
        self._settings = settings
        self.objective = settings.objective
        self.padding = padding
        self.chunk_tokens = chunk_tokens
        self.inputs = Inputs(backend)

    def train_by(self, objective: Objective | None) -> None:
        """Take another loss of rows; None: the cross-entropy of tokens."""
        self.objective = objective

    @cached_property
    def shifts_labels(self) -> bool:
        """Whether a position is trained on the label of the next one; if not, on its own, as the
        model does itself.
        """
        return shifts_labels(self._split.model, self._split.layers)

    def to_device(self, micro_batches: MicroBatches) -> list[dict[str, Tensor]]:
        """Return micro-batches on the device, without a loss."""
        return self.inputs.to_device(list(map(self.padding.of, micro_batches)))

    def prepare(
        self, micro_batches: MicroBatches, **options: Any
    ) -> tuple[list[dict[str, Tensor]], LossChunks | RowLoss]:
        """Return micro-batches on the device, and their loss; the options are those of
        `LossChunks`.
        """
        split = self._split
        split.state.hooks.check_none()
        batches = list(map(self.padding.of, micro_batches))
        objective = self.objective
        if objective is None:
            targets = [targets_of(batch["labels"], shifted=self.shifts_labels) for batch in batches]
            options |= {
                "host_targets": targets,
                "dft": self._settings.dft,
                "smoothing": self._settings.smoothing,
            }
        else:
            targets = [row_targets(batch, objective) for batch in batches]
        device_batches, there = self.inputs.step_to_device(batches, targets, split.tables)
        chunk = self.chunk_tokens
        over = split.parallel
        if objective is None:
            return device_batches, LossChunks(split.head, there, chunk, parallel=over, **options)
        scale = options.get("scale", 1.0)
        return device_batches, RowLoss(
            split.head, objective, batches, there, chunk, scale=scale, parallel=over
        )
