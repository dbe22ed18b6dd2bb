"""A graph without its tensors: what a layer's backward needs is dropped in the forward, and computed again when needed.

In the backward the graph's first look at a dropped tensor runs the layer again, only as far as the last tensor that was
dropped, and without a matrix product that none of them needs (`lema.engine.skip_matmuls`). This is the non-reentrant
checkpoint of `torch.utils.checkpoint` (Chen et al. 2016, https://arxiv.org/abs/1604.06174), with one promise more:
weights are packed as references, and found in the lease under which the backward runs. A compiled layer is run again as
a whole, and that run is differentiated, because which of its graphs a compiler takes for a shape can change from one
run to the next, and each saves tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from lema.activations.offload import Packed
from lema.engine.skip_matmuls import AdaptedLinears, LastLinear
from lema.stream import Lease
from lema.stream.lease import WeightReference

__all__ = ["Graph"]


class _Dropped:
    """The place in the graph of a tensor that was dropped. Autograd frees it when the backward is done with it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None  # while it is back


class _Enough(Exception):
    """Ends a recomputation: every dropped tensor is there again."""


class Graph:
    """The graph of one micro-batch through one layer, which holds no weights and, if it is to be recomputed, nothing.
    `again`: runs the layer once more, from the generator state of the first run; None: tensors are kept. `linears`: the
    layer's adapted linears, of which one may skip a product then; None: everything is computed. `anew`: differentiate
    what `again` returns, instead of the graph of the first run. `keep`: for a graph that is not recomputed, packs the
    tensors that it is to hold; None: it holds them as they are. Its attribute `held`: the storages of those that it
    holds as they are, with their bytes, by address."""

    def __init__(
        self,
        again: Callable[[Lease], Any] | None = None,
        linears: AdaptedLinears | None = None,
        *,
        anew: bool = False,
        keep: Callable[[Tensor], Packed] | None = None,
    ) -> None:
        self._again, self._anew, self._keep = again, anew and again is not None, keep
        self._linears = None if again is None or anew else linears
        self._last = LastLinear()
        self._dropped: list[ref[_Dropped]] = []
        self._count = 0  # how many of these the recomputation has come to
        self._lease: Lease | None = None
        self.held: dict[int, int] = {}

    @contextmanager
    def built(self, lease: Lease) -> Iterator[None]:
        """Build the graph: what is computed in the `with` block, with grad, refers to weights of `lease` by place."""

        def pack(tensor: Tensor) -> Any:
            # It reads the lease from `self`, because autograd keeps this function, and a lease kept would pin its slot.
            assert self._lease is not None, "a graph was added to after its layer's forward"
            if self._anew:
                return None
            if (reference := self._lease.refer(tensor)) is not None:
                return reference
            if self._again is None:
                if self._keep is not None:
                    return self._keep(tensor)
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = storage.nbytes()
                # Not the tensor itself, because an operation that keeps what it made would hold itself for ever.
                return tensor.detach()
            dropped = _Dropped()
            self._dropped.append(ref(dropped))
            return dropped

        self._lease = lease
        try:
            with ExitStack() as stack:
                if self._linears is not None:
                    self._last = stack.enter_context(self._linears.watched(lambda: len(self._dropped)))
                stack.enter_context(torch.enable_grad())
                stack.enter_context(saved_tensors_hooks(pack, self._unpack))
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

    def backward(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Differentiate, in the `with` block of `differentiated`: `gradients` are those of the output and of what else
        the first run made, at `edges`. What is run anew makes the output alone."""
        if not self._anew:
            torch.autograd.backward(edges, gradients)
            return
        assert self._lease is not None and self._again is not None
        with torch.enable_grad():
            output = self._again(self._lease)
        torch.autograd.backward(output, gradients[0])

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
        """Run the layer again, as far as the last dropped tensor, and bring back those that autograd still wants."""
        assert self._again is not None
        self._count = 0

        def pack(tensor: Tensor) -> None:
            if lease.refer(tensor) is not None:
                return
            if (dropped := self._dropped[self._count]()) is not None:
                dropped.tensor = tensor.detach()
            self._count += 1
            if self._count == len(self._dropped):
                raise _Enough  # because nothing after this reaches the backward

        def unpack(_: None) -> Tensor:
            raise AssertionError("a recomputation is not differentiated")

        try:
            with (
                self._last.skipped(len(self._dropped), lambda: self._count),
                torch.enable_grad(),
                saved_tensors_hooks(pack, unpack),
            ):
                self._again(lease)
        except _Enough:
            return
        raise AssertionError(f"{self._count} of {len(self._dropped)} tensors came back: the layer ran another way")
