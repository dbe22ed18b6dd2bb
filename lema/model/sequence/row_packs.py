"""What a model makes of some rows before its layers, joined into packs.

The model's own code has made embeddings, positions and masks of the rows as they are, side by side.
So whatever it makes of a whole row, such as positions of several kinds around an image, is that of
the row alone. Only then are tokens of rows put behind one another. By positions that begin again
`transformers` keeps attention within the rows, and a mask of pairs of tokens is that of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lema.model.sequence.blockmask import BlockMask
from lema.model.sequence.states import Span
from lema.model.sequence.token_inputs import POSITIONS, TokenInputs

__all__ = ["RowPacks"]


class RowPacks:
    """Where the tokens of packs are in their rows.

    Args:
        lengths: of each pack, the tokens of each of its rows; these follow one another in the batch
            that the rows are.
        width: tokens of a pack; what is behind its rows is padding, each token a row of its own.
        device: of the model.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], width: int, device: torch.device) -> None:
        shape = len(lengths), width
        rows = torch.zeros(shape, dtype=torch.long)
        tokens = torch.zeros(shape, dtype=torch.long)
        self._inside = torch.zeros(shape, dtype=torch.bool)
        number = 0
        for pack, of_pack in enumerate(lengths):
            start = 0
            for length in of_pack:
                part = slice(start, start + length)
                rows[pack, part] = number
                tokens[pack, part] = torch.arange(length)
                self._inside[pack, part] = True
                start += length
                number += 1
        # no number is another token's at padding
        numbers = torch.where(self._inside, rows, number + torch.arange(width))
        self._rows = rows.to(device)
        self._tokens = tokens.to(device)
        self._inside = self._inside.to(device)
        self._numbers = numbers.to(device)

    def packed(self, inputs: TokenInputs) -> dict[str, Any]:
        """Return what belongs to the tokens of the packs.

        Args:
            inputs: what belongs to those of the rows, `[rows, sequence]`, padded on the right.
        """
        values = {
            name: tree_map(partial(self._value, inputs, name), value)
            for name, value in inputs.values.items()
            if inputs.padding is None or value is not inputs.padding
        }
        values.setdefault(POSITIONS, self._tokens)
        return values

    def _value(self, inputs: TokenInputs, name: str, value: Tensor) -> Tensor:
        match inputs.belonging(name, value):
            case "features":
                return value
            case "kinds":
                kinds = value[:, self._rows, self._tokens].masked_fill(~self._inside, 0)
                # before them those of text, by which rows of a pack are told apart
                return torch.cat([self._tokens[None].to(kinds.dtype), kinds])
            case "pairs":
                return self._pairs(value)
        of_tokens = value[self._rows if len(value) > 1 else 0, self._tokens]
        inside = self._inside.reshape(*self._inside.shape, *[1] * (of_tokens.dim() - 2))
        return of_tokens.masked_fill(~inside, 0)

    def _pairs(self, mask: Tensor) -> Tensor:
        """Return the mask of packs of that of rows, `[rows, 1, sequence, sequence]`."""
        of_rows = mask.full() if isinstance(mask, BlockMask) else mask

        def make(queries: Span, keys: Span) -> Tensor:
            rows = self._rows[:, queries.slice, None] if len(of_rows) > 1 else 0
            tokens = self._tokens[:, queries.slice, None], self._tokens[:, None, keys.slice]
            numbers = self._numbers[:, queries.slice, None], self._numbers[:, None, keys.slice]
            added = of_rows.is_floating_point()
            unseen = torch.finfo(of_rows.dtype).min if added else 0
            pairs = of_rows[rows, 0, tokens[0], tokens[1]]
            return pairs.masked_fill(numbers[0] != numbers[1], unseen)[:, None]

        packs, width = self._rows.shape
        tokens = Span(0, width)
        if of_rows.is_floating_point():
            return make(tokens, tokens)
        return BlockMask.standing_for(make, packs, tokens, tokens, of_rows.device)
