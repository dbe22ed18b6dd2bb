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
from lema.model.sequence.division import RowDivision

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
        division: how processes divide rows; None: they do not.

    Attributes:
        division: how processes divide rows, of which this one forms its part of the loss; None:
            they do not.
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
        division: RowDivision | None = None,
    ) -> None:
        self._split = split
        self._settings = settings
        self.objective = settings.objective
        self.padding = padding
        self.chunk_tokens = chunk_tokens
        self.inputs = Inputs(backend)
        self.division = division

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
        return self.inputs.to_device(list(map(self._padded, micro_batches)))

    def _padded(self, micro_batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        batch = self.padding.of(micro_batch)
        division = self.division
        if division is None or batch["input_ids"].shape[1] >= division.shortest:
            return batch
        return Padding(division.shortest).of(batch)

    def _parts(self, targets: Sequence[Tensor], options: dict[str, Any]) -> list[Tensor]:
        """Return this process's targets; the loss is divided by the number of all, and logits of
        a part of each row are kept for nobody.
        """
        division = self.division
        if division is None:
            return list(targets)
        undivided = LossChunks(self._split.head, targets, 1, num_tokens=options.get("num_tokens"))
        options |= {"num_tokens": undivided.num_tokens, "logits": None}
        return list(map(division.cut, targets))

    def prepare(
        self, micro_batches: MicroBatches, *, divided: bool = True, **options: Any
    ) -> tuple[list[dict[str, Tensor]], LossChunks | RowLoss]:
        """Return micro-batches on the device, and their loss; the options are those of
        `LossChunks`. `divided`: of rows that processes divide, the loss of this one's parts.
        """
        split = self._split
        split.state.hooks.check_none()
        batches = list(map(self._padded, micro_batches))
        objective = self.objective
        if objective is None:
            targets = [targets_of(batch["labels"], shifted=self.shifts_labels) for batch in batches]
            if divided:
                targets = self._parts(targets, options)
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
