"""A graph whose tensors are not kept: a layer runs again in the backward, and that run is
differentiated.

The graph of the forward is let go of as soon as it is built, nodes and all, so that micro-batches
cost no memory but their boundary activations. It has shown by then how many tensors it saves: after
the last of them the second run skips the products of matrices that none of them needs, and one
before it (`lema.engine.skip_matmuls`). This is the checkpoint of Chen et al. 2016,
https://arxiv.org/abs/1604.06174. A graph that is kept has its weights packed as references, which
are found in the lease under which the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from lema.activations.offload import Packed
from lema.engine.skip_matmuls import AdaptedLinears, LastLinear, Skipped
from lema.stream import Lease
from lema.stream.lease import WeightReference

__all__ = ["Graph"]


class Graph:
    """The graph of one micro-batch through one layer, which holds no weights and, if it is to be
    recomputed, nothing. `again`: runs the layer once more, from the generator state of the first
    run, and returns what that made, to be differentiated; None: the first run's graph is kept.
    `linears`: the layer's adapted linears, of which one may skip a product then; None: none does.
    `products`: keep the products by frozen weights, which the second run then takes.
    `recompute_all`: compute everything again, after the last saved tensor too, and keep no product.
    `keep`: for a graph that is not recomputed, packs the tensors that it is to hold; None: it holds
    them as they are. Its attribute `storage_bytes`: the storages of those that it holds as they
    are, with their bytes, by address."""

    def __init__(
        self,
        again: Callable[[Lease], Sequence[Tensor]] | None = None,
        linears: AdaptedLinears | None = None,
        *,
        products: bool = False,
        recompute_all: bool = False,
        keep: Callable[[Tensor], Packed] | None = None,
    ) -> None:
        self._again = again
        self._recompute_all = recompute_all
        self._keep = keep
        self._linears = None if again is None or recompute_all else linears
        self._products = (
            self._linears.products() if products and self._linears is not None else None
        )
        self._last = LastLinear()
        self._saved = 0  # how many tensors the first run saved, without weights
        self._lease: Lease | None = None
        self.storage_bytes: dict[int, int] = {}

    @contextmanager
    def built(self, lease: Lease) -> Iterator[None]:
        """Build the graph: what is computed in the `with` block, with grad, refers to weights of
        `lease` by place.
        """

        def pack(tensor: Tensor) -> Any:
            # It reads the lease from `self`, because autograd keeps this function, and a lease kept
            # would pin its slot.
            assert self._lease is not None, "a graph was added to after its layer's forward"
            if self._again is not None:
                self._saved += not self._recompute_all and self._lease.refer(tensor) is None
                return None
            if (reference := self._lease.refer(tensor)) is not None:
                return reference
            if self._keep is not None:
                return self._keep(tensor)
            storage = tensor.untyped_storage()
            self.storage_bytes[storage._cdata] = storage.nbytes()
            # Not the tensor itself, because an operation that keeps what it made would hold itself
            # for ever.
            return tensor.detach()

        self._lease = lease
        try:
            with ExitStack() as stack:
                if self._linears is not None:
                    self._last = stack.enter_context(
                        self._linears.watched(lambda: self._saved, self._products)
                    )
                stack.enter_context(torch.enable_grad())
                stack.enter_context(saved_tensors_hooks(pack, self._unpack))
                yield
            if self._products is not None:
                self._products.drop(self._last, self._saved)
        finally:
            self._lease = None

    def backward(
        self,
        lease: Lease,
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        *,
        again: bool = False,
    ) -> None:
        """Differentiate, with the layer on `lease`, given the gradients of what the first run made,
        which is at `edges` of its graph, if that is kept. The caller has them, because a graph with
        edges of its own would hold itself. `again`: it will be differentiated once more."""
        if self._again is not None:
            torch.autograd.backward(self._rerun(lease, self._again), gradients)
            return
        self._lease = lease
        try:
            torch.autograd.backward(edges, gradients, retain_graph=again)
        finally:
            self._lease = None

    def _unpack(self, packed: Any) -> Tensor:
        assert self._lease is not None, "a leased weight was read outside its layer's backward"
        if isinstance(packed, WeightReference):
            return self._lease.resolve(packed)
        if isinstance(packed, Tensor):
            return packed
        saved: Packed = packed
        return saved.unpack()

    def _rerun(self, lease: Lease, again: Callable[[Lease], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run the layer again, with a graph that lives as long as the lease."""
        if self._recompute_all:
            with torch.enable_grad():
                return again(lease)
        count = 0
        skipped = ExitStack()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if lease.refer(tensor) is None:
                count += 1
                if count == self._saved:
                    # because no value after this one reaches the backward
                    skipped.enter_context(Skipped())
            return tensor.detach()

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        taken = nullcontext() if self._products is None else self._products.taken()
        with (
            skipped,
            taken,
            self._last.skipped(self._saved, lambda: count),
            torch.enable_grad(),
            hooks,
        ):
            outputs = again(lease)
        assert count == self._saved, (
            f"{count} of {self._saved} tensors were recomputed: the layer ran differently"
        )
        return outputs
