"""Activation checkpointing of one layer: the graph stays, its tensors are dropped and computed again in the backward.

The graph is built once, in the forward. In the backward, its first look at a dropped tensor runs the layer again, only
as far as the last tensor that was dropped, and without the matrix products that reach none of them
(`lema.model.skip_matmuls`). This is the non-reentrant checkpoint of `torch.utils.checkpoint` (Chen et al. 2016,
https://arxiv.org/abs/1604.06174) with one more promise: weights are packed as references, and are found in the lease
under which the backward runs.

A compiled layer is run again as a whole, and that run is differentiated, because a compiler may take another of its
graphs for the same shape in the second run, and each graph saves tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from lema.activations.offload import Packed
from lema.model.skip_matmuls import Needless, Reach
from lema.stream import Lease
from lema.stream.lease import WeightReference

__all__ = ["Graph"]


class _Dropped:
    """Stands in the graph for a tensor that was dropped; gone when autograd needs it no more."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None  # while it is back


class _Enough(Exception):
    """Ends a recomputation: every dropped tensor is there again."""


class Graph:
    """The graph of one micro-batch through one layer, which holds no weights and, if it is to be recomputed, nothing.

    Args:
        again: runs the layer once more, from the generator state of the first run; None: tensors are kept.
        needless: what to leave out then; None: nothing.
        anew: differentiate what `again` returns, instead of what it is to bring tensors back to.
        keep: of a graph that is not recomputed, packs the tensors that it is to hold; None: it holds them as they are.
    """

    def __init__(
        self,
        again: Callable[[Lease], Any] | None = None,
        needless: Needless | None = None,
        *,
        anew: bool = False,
        keep: Callable[[Tensor], Packed] | None = None,
    ) -> None:
        self._again, self._needless, self._anew = again, needless, anew and again is not None
        self._keep = keep
        self._dropped: list[ref[_Dropped]] = []
        self._kinds = bytearray()  # of what was dropped
        self._count = 0  # of these, how many the recomputation under way has come to
        self._lease: Lease | None = None

    @contextmanager
    def built(self, lease: Lease) -> Iterator[None]:
        """Build the graph: what is computed in the `with` block, with grad, refers to weights of `lease` by place."""

        def pack(tensor: Tensor) -> Any:
            # Autograd keeps this function with every tensor: it must not keep the lease, which holds the slot.
            assert self._lease is not None, "a graph was added to after its layer's forward"
            if self._anew:
                return None
            if (reference := self._lease.refer(tensor)) is not None:
                return reference
            if self._again is None:
                # Not the tensor itself: an operation that keeps what it made would hold itself, for ever.
                return tensor.detach() if self._keep is None else self._keep(tensor)
            dropped = _Dropped()
            self._dropped.append(ref(dropped))
            if self._needless is not None:
                self._kinds.append(self._needless.kinds.of(tensor))
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
            for one in self._dropped:
                if (dropped := one()) is not None:
                    dropped.tensor = None

    def backward(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Differentiate, in the `with` block of `differentiated`: `gradient` is that of the output, at `edge`."""
        if not self._anew:
            torch.autograd.backward(edge, gradient)
            return
        assert self._lease is not None and self._again is not None
        with torch.enable_grad():
            output = self._again(self._lease)
        torch.autograd.backward(output, gradient)

    def _unpack(self, packed: Any) -> Tensor:
        assert self._lease is not None, "a leased weight was read outside its layer's backward"
        if isinstance(packed, WeightReference):
            return self._lease.resolve(packed)
        if isinstance(packed, Tensor):
            return packed
        if not isinstance(packed, _Dropped):
            kept: Packed = packed
            return kept.unpack()
        if packed.tensor is None:
            self._recompute(self._lease)
        assert packed.tensor is not None, "a tensor did not come back"
        return packed.tensor

    def _recompute(self, lease: Lease) -> None:
        """Bring back what was dropped."""
        needless = self._needless
        if needless is None:
            self._run(lease, self._bring_back)
        elif not needless.learnt:
            self._recompute_and_learn(lease, needless)
        else:
            with needless.left_out(self._kinds, self._to_come):
                self._run(lease, self._bring_back)

    def _recompute_and_learn(self, lease: Lease, needless: Needless) -> None:
        """Recompute everything; see what was needless for that; then try to leave it out."""
        reach, spoilt = Reach(needless.layer), False

        def follow(dropped: _Dropped | None, tensor: Tensor) -> None:
            reach.save(tensor)
            self._bring_back(dropped, tensor)

        def compare(dropped: _Dropped | None, tensor: Tensor) -> None:
            nonlocal spoilt
            if dropped is not None and dropped.tensor is not None:
                spoilt |= not torch.equal(tensor.isnan(), dropped.tensor.isnan())

        with reach.followed():
            self._run(lease, follow)
        needless.learn(reach.needless(), self._kinds)
        try:
            with needless.left_out(self._kinds, self._to_come) as any_left_out:
                if any_left_out:
                    self._run(lease, compare)
        except BaseException:
            needless.forget()  # a trial that did not end, as where memory runs out, proves nothing
            raise
        if spoilt:
            needless.learn((), self._kinds)

    def _bring_back(self, dropped: _Dropped | None, tensor: Tensor) -> None:
        if dropped is not None:
            dropped.tensor = tensor.detach()

    def _to_come(self) -> int:
        """Return how many dropped tensors the recomputation under way has still to bring back."""
        return len(self._dropped) - self._count

    def _run(self, lease: Lease, take: Callable[[_Dropped | None, Tensor], None]) -> None:
        """Run the layer again, as far as the last dropped tensor.

        Args:
            lease: of the layer's weights.
            take: what is done with each tensor, given what stands for it if autograd still wants it.
        """
        assert self._again is not None
        self._count = 0

        def pack(tensor: Tensor) -> None:
            if lease.refer(tensor) is not None:
                return
            take(self._dropped[self._count](), tensor)
            self._count += 1
            if self._count == len(self._dropped):
                raise _Enough

        def unpack(_: None) -> Tensor:
            raise AssertionError("a recomputation is not differentiated")

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                self._again(lease)
        except _Enough:
            return
        raise AssertionError(f"{self._count} of {len(self._dropped)} tensors came back: the layer ran another way")
