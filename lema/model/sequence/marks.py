"""Features of some tokens of a batch, such as those of images, that follow one another.

They are given to later layers beside masks `[rows, sequence]` that say which tokens these are: the
features have an entry for each of them, in the order of the rows. Which mask is meant shows in
their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["TokenMarks"]


class TokenMarks:
    """The masks of tokens among the arguments of a call.

    Args:
        arguments: by name.
        shape: the number of rows, and of their tokens.

    Attributes:
        several: whether masks that differ name as many tokens, so that it cannot be told whose
            features are given.
    """

    def __init__(self, arguments: Mapping[str, Any], shape: tuple[int, int]) -> None:
        self._by_count: dict[int, Tensor] = {}
        self.several = False
        for leaf in tree_leaves(dict(arguments)):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.bool and leaf.shape == shape:
                mask = self._by_count.setdefault(int(leaf.sum()), leaf)
                self.several |= not torch.equal(mask, leaf)

    def name(self, count: int) -> bool:
        """Whether there is a mask of so many tokens."""
        return count in self._by_count

    def of(self, value: Tensor) -> Tensor | None:
        """Return the mask of the tokens that have features `value`; None: it is no such thing."""
        return self._by_count.get(len(value)) if value.is_floating_point() else None

    @staticmethod
    def cut(value: Tensor, mask: Tensor, rows: Tensor | slice, tokens: slice) -> Tensor:
        """Return the features of some tokens of some rows, in the order of these.

        Args:
            value: the features of all tokens.
            mask: which these are.
            rows: the rows, by number.
            tokens: the tokens.
        """
        numbers = torch.full(mask.shape, -1, device=value.device)
        numbers[mask] = torch.arange(len(value), device=value.device)
        chosen = numbers[rows][:, tokens].flatten()
        return value.index_select(0, chosen[chosen >= 0])
