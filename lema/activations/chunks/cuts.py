"""How a hidden state is cut into chunks, and how a layer gets at them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ChunkInputs", "Cut", "Cuts"]


@dataclass(frozen=True)
class Cut:
    """One chunk of a hidden state `[rows, sequence, hidden]`."""

    rows: slice
    tokens: slice

    def of(self, state: Tensor) -> Tensor:
        """Return that part of a hidden state."""
        return state[self.rows, self.tokens]

    def like(self, state: Tensor) -> Tensor:
        """Return what a copy of that part looks like: a tensor without bytes."""
        shape = self.of(torch.empty_like(state, device="meta", requires_grad=False)).shape
        return torch.empty(shape, dtype=state.dtype, device="meta")


@dataclass(frozen=True)
class Cuts:
    """All chunks of a layer's input, and the order in which its backward reads them. It may read
    some of them twice."""

    chunks: tuple[Cut, ...]
    order: tuple[int, ...]


class ChunkInputs(Protocol):
    """The chunks of a hidden state, wherever it is."""

    def chunk(self, number: int) -> AbstractContextManager[Tensor]:
        """Return a context that yields a chunk `[rows, tokens, hidden]` on the device; its memory
        is used again afterwards. Chunks are asked for in an order that was announced."""
