"""The rows of a call that a micro-batch has, and what else of the call's arguments belongs to them.

Most arguments have a row for each row of the batch. Features of images that later layers are given
may have an entry for each token of an image instead, in the order of the rows, and a mask `[batch,
sequence]` that says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lema.errors import ConfigError
from lema.model.sequence.marks import TokenMarks

__all__ = ["Cut", "RowCuts"]

POSITIONS = "position_ids"


class Cut(NamedTuple):
    """Which rows of a call a micro-batch has, and how many of their tokens."""

    rows: list[int]
    end: int
    width: int  # as it was


class RowCuts:
    """Cuts the arguments of one call.

    Args:
        arguments: of the module that holds the layers, by name.
        cuts: the micro-batches.
        images_inside: whether that module is given images, as they are. Whether a tensor that has
            as many entries as there are rows has one for each row, or for each image, cannot be
            told then.
    """

    def __init__(
        self, arguments: Mapping[str, Any], cuts: Sequence[Cut], *, images_inside: bool = False
    ) -> None:
        self._arguments = arguments
        self._size = sum(len(cut.rows) for cut in cuts)
        self._width = cuts[0].width
        self._images_inside = images_inside
        self._marks = TokenMarks(arguments if len(cuts) > 1 else {}, (self._size, self._width))

    @property
    def ambiguous(self) -> bool:
        """Whether a tensor may have an entry for each row or for each marked token, or for each
        token of one mask or of another.
        """
        return self._marks.several or (
            self._marks.name(self._size)
            and any(
                isinstance(leaf, Tensor)
                and leaf.dim() > 1
                and len(leaf) == self._size
                and leaf.is_floating_point()
                and (leaf.dim() == 2 or leaf.shape[:2] != (self._size, self._width))
                for leaf in tree_leaves(dict(self._arguments))
            )
        )

    def of(self, cut: Cut) -> dict[str, Any]:
        """Return the arguments of one micro-batch. `ConfigError`: something has neither one row nor
        one for each of the batch."""
        return {
            name: tree_map(partial(self._part, name, cut), value)
            for name, value in self._arguments.items()
        }

    def _part(self, name: str, cut: Cut, value: object) -> object:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        # before them several kinds of positions for each token
        across = int(name == POSITIONS and value.dim() == 3)
        by_token = value.shape[across : across + 2] == (self._size, self._width)
        rows = torch.tensor(cut.rows, device=value.device)
        marks = None if by_token else self._marks.of(value)
        if marks is not None:
            # in the order of the rows of the micro-batch, which is another than that of the call
            return self._marks.cut(value, marks, rows, slice(cut.end))
        if value.shape[across + 1] == self._width:
            value = value.narrow(across + 1, 0, cut.end)
        if value.shape[across] == 1:
            return value
        is_mask = value.dim() == 4 and value.shape[1] == 1 and value.shape[-1] == self._width
        unclear = self._images_inside and value.is_floating_point() and not by_token and not is_mask
        if value.shape[across] != self._size or unclear:
            shape = f"{name} {list(value.shape)}"
            what = f"{shape} has no row for each of the {self._size} of the batch"
            if unclear:
                what = f"it cannot be told which entries of {shape} belong to which row"
            raise ConfigError(
                what, where=name, how="remove micro_batch_size, so that batches are computed whole"
            )
        return value.index_select(across, rows)
