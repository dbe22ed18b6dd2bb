"""What an arrangement of tensors copies from where, seen by running it on tensors without bytes.

Only copies are understood: stacking, concatenating, cloning, and whatever makes a view. Anything that computes is found
out, because its result shares no memory with what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lema.storage.slices import Box, Move, contiguous, follow

__all__ = ["CopyTrace"]

_aten = torch.ops.aten
MAKE_ONE = (_aten.clone.default, _aten._to_copy.default)


class CopyTrace(TorchDispatchMode):
    """Writes down the copies that are made while it is active, between tensors on `meta`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self._sources: dict[int, int] = {}  # by storage, the number of the source that it is
        self._filled: dict[int, tuple[tuple[int, ...], list[Box]]] = {}  # by storage, its shape and where it came from
        self._alive: list[Tensor] = []  # so that no address of a storage is used again

    def source(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that stands for a source."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = number
        self._alive.append(tensor)
        return tensor

    def moves(self, tensor: Tensor) -> list[tuple[int, Move]] | None:
        """Return which elements of which source go where in a tensor, as a contiguous array.

        Returns:
            None where some are computed, or copied in a way that is not followed.
        """
        dims = zip(tensor.shape, tensor.stride(), contiguous(tensor.shape), strict=True)
        waiting = [(_storage(tensor), Move(int(tensor.storage_offset()), 0, tuple(dims)).joined())]
        found: list[tuple[int, Move]] = []
        try:
            while waiting:
                storage, move = waiting.pop()
                if storage in self._sources:
                    found.append((self._sources[storage], move))
                elif storage in self._filled:
                    waiting += follow(move, *self._filled[storage])
                else:
                    return None
        except ValueError:
            return None
        return found if sum(move.count for _, move in found) == tensor.numel() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if not isinstance(result, Tensor):
            return result
        if func in (_aten.cat.default, _aten.stack.default):
            dim, stacked = args[1] if len(args) > 1 else given.get("dim", 0), func is _aten.stack.default
            parts = args[0] if stacked else [one for one in args[0] if one.numel()]
            self._note(result, parts, dim % result.ndim, stacked=stacked)
        elif func in MAKE_ONE and result.dtype == args[0].dtype:
            self._note(result, [args[0]], 0, stacked=False)
        return result

    def _note(self, result: Tensor, parts: Sequence[Tensor], dim: int, *, stacked: bool) -> None:
        if not result.is_contiguous():
            return  # where it lies is not followed, so neither is what becomes of it
        boxes, at = [], 0
        for part in parts:
            size, strides = list(part.shape), list(part.stride())
            if stacked:
                size.insert(dim, 1)
                strides.insert(dim, 0)
            low = [0] * result.ndim
            if result.ndim:
                low[dim], at = at, at + size[dim]
            boxes.append(Box(_storage(part), tuple(low), tuple(size), int(part.storage_offset()), tuple(strides)))
        self._filled[_storage(result)] = (tuple(result.shape), boxes)
        self._alive += [result, *parts]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
