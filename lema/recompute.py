"""A graph without its tensors: what a layer's backward needs is dropped in the forward, and computed again when needed.

The graph is built once, in the forward. In the backward, its first look at a dropped tensor runs the layer again, only
as far as the last tensor that was dropped: what comes after, a last matrix product without an adapter for one, is not
recomputed.
This is the non-reentrant checkpoint of `torch.utils.checkpoint` (Chen et al. 2016, https://arxiv.org/abs/1604.06174),
with one promise more: weights are packed as references, and found in the lease under which the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lema.stream.lease import Lease, WeightReference

__all__ = ["Graph"]


class _Dropped:
    """Stands in the graph for a tensor that was dropped; gone when autograd needs it no more."""

    __slots__ = ("__weakref__",)


class _Enough(Exception):
    """Ends a recomputation: every dropped tensor is there again."""


class Graph:
    """The graph of one micro-batch through one layer, which holds no weights and, if it is to be recomputed, nothing.

    Args:
        again: runs the layer once more, from the generator state of the first run; None: tensors are kept.
    """

    def __init__(self, again: Callable[[Lease], Any] | None = None) -> None:
        self._again = again
        self._dropped: list[ref[_Dropped]] = []
        self._found: WeakKeyDictionary[_Dropped, Tensor] = WeakKeyDictionary()
        self._lease: Lease | None = None

    @contextmanager
    def built(self, lease: Lease) -> Iterator[None]:
        """Build the graph: what is computed in the `with` block, with grad, refers to weights of `lease` by place."""

        def pack(tensor: Tensor) -> Any:
            # Autograd keeps this function with every tensor: it must not keep the lease, which holds the slot.
            assert self._lease is not None, "a graph was added to after its layer's forward"
            if (reference := self._lease.refer(tensor)) is not None:
                return reference
            if self._again is None:
                return tensor
            dropped = _Dropped()
            self._dropped.append(ref(dropped))
            return dropped

        self._lease = lease
        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            self._lease = None

    @contextmanager
    def differentiated(self, lease: Lease) -> Iterator[None]:
        """Let the graph find its tensors in the `with` block: weights in `lease`, the others by recomputing."""
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            self._found.clear()

    def _unpack(self, packed: Any) -> Tensor:
        assert self._lease is not None, "a leased weight was read outside its layer's backward"
        if isinstance(packed, WeightReference):
            return self._lease.resolve(packed)
        if isinstance(packed, Tensor):
            return packed
        if packed not in self._found:
            self._recompute(self._lease)
        return self._found[packed]

    def _recompute(self, lease: Lease) -> None:
        assert self._again is not None
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if lease.refer(tensor) is not None:
                return
            if (dropped := self._dropped[count]()) is not None:
                self._found[dropped] = tensor.detach()
            count += 1
            if count == len(self._dropped):
                raise _Enough

        def unpack(_: None) -> Tensor:
            raise AssertionError("a recomputation is not differentiated")

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                self._again(lease)
        except _Enough:
            return
        raise AssertionError(f"{count} of {len(self._dropped)} tensors came back: the layer ran another way")
