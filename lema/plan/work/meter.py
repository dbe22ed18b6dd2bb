"""A meter for computations on tensors without values: counts the bytes alive at once, and FLOPs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from lema.backend import Exchange, Parallel, SingleProcess
from lema.model.capture import replaced_tensors
from lema.model.skeleton import find_layers
from lema.model.state.attention import attention_without_values
from lema.model.state.rotary import tables_as_they_are
from lema.model.state.snapshot import rehearsed

__all__ = ["FORMULAS", "Tally", "without_values"]


aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
PICKS = {aten.index.Tensor, aten.index_select.default, aten.gather.default}


class Tally(TorchDispatchMode):
    """Counts the bytes of what is made in the `with` block and still alive, and the floating-point
    operations. Views count once, with what they are views of. What existed before is given to
    `leave_out`: it, and views of it, are not counted. Neither is what is picked out of it by index,
    as stand-ins for experts' weights are: an implementation that computes with values in hand
    copies no weights. What the processes of `parallel` exchange is counted as well.

    Each operation is noted for `flops_to_saved`, and no number of a tensor's memory is used twice
    meanwhile, which takes a kilobyte or so for each. `only_memory`: none is noted, as of a long run
    of which only the bytes alive are asked."""

    def __init__(self, parallel: Parallel | None = None, *, only_memory: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._only_memory = only_memory
        self._parallel = parallel or SingleProcess()
        self._before = self._parallel.exchanged
        self.exchanged_to_saved = Exchange()  # up to the last saved tensor
        self.flops = 0
        self.peak = 0
        self._saved: set[int] = set()
        self._steps: list[_Step] = []
        self._steps_to_saved = 0
        # By number, which nothing else may get while it tells steps apart.
        self._storages: dict[int, StorageWeakRef] = {}
        self._left_out: dict[int, Tensor] = {}
        self.live = 0  # bytes made here and alive now

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Count none of these."""
        self._left_out.update(
            {_storage(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
        )

    def restart_peak(self) -> int:
        """Measure the peak from now on; return the bytes that are alive now."""
        self.peak = self.live
        return self.live

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was made here."""
        return _storage(tensor) not in self._left_out

    def save(self, tensor: Tensor) -> None:
        """Take note that the backward needs a tensor."""
        self._saved.add(_storage(tensor))
        self._steps_to_saved = len(self._steps)
        self.exchanged_to_saved = self.exchanged

    @property
    def exchanged(self) -> Exchange:
        """What the processes have exchanged since the beginning of the block."""
        return self._parallel.exchanged.plus(self._before, -1)

    def flops_to_saved(self) -> int:
        """Return the operations up to the last saved tensor, without matrix products that reach
        no saved tensor.
        """
        needed = set(self._saved)
        flops = 0
        assert not self._only_memory, "no operation was noted"
        for step in reversed(self._steps[: self._steps_to_saved]):
            if step.outputs & needed or not step.product:
                needed |= step.inputs
                flops += step.flops
        return flops

    def _gone(self, number: int, nbytes: int) -> None:
        self.live -= nbytes
        if self._only_memory:
            del self._storages[number]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = (_grouped if func is aten._grouped_mm.default else func)(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        self.flops += flops
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if func in PICKS and not self.counts(args[0]):
            self.leave_out(outputs)
        for tensor in outputs:
            if self.counts(tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
                    self.live += storage.nbytes()
                    gone = weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                    gone.atexit = False
        self.peak = max(self.peak, self.live)
        if self._only_memory:
            return result
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        product = func._overloadpacket in PRODUCTS or formula is None
        self._steps.append(
            _Step(
                flops,
                product,
                *(frozenset(map(_storage, tensors)) for tensors in (inputs, outputs)),
            )
        )
        return result


@contextmanager
def without_values(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's tensors have no values in a `with` block; layers' weights, given to each
    call, stay on `meta`.
    """
    training = model.training
    inside = {
        id(parameter) for parameter in find_layers(model)[1].parameters() if parameter.is_meta
    }

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) in inside or not isinstance(tensor, nn.Parameter):
            return tensor
        parameter = nn.Parameter(
            torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad
        )
        vars(parameter).update(vars(tensor))  # which say how it lies over processes
        return parameter

    contexts = rehearsed(model.modules(), values=False), FakeTensorMode(allow_non_fake_inputs=True)
    by = attention_without_values(model), tables_as_they_are(model)
    with by[0], by[1], contexts[0], contexts[1], replaced_tensors(model, like):
        try:
            model.train()
            yield
        finally:
            model.train(training)


@dataclass(frozen=True)
class _Step:
    """One operation; `product`: a matrix product, or an operation that is negligible compared
    with one.
    """

    flops: int
    product: bool
    inputs: frozenset[int]
    outputs: frozenset[int]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _grouped(
    first: Tensor, second: Tensor, offs: Tensor | None = None, *_: object, **__: object
) -> Tensor:
    """Return what `torch._grouped_mm` would; its own rule for shapes refuses dtypes that its
    kernel takes.
    """
    if first.dim() == 2 and second.dim() == 2:
        assert offs is not None
        return first.new_empty(len(offs), first.shape[0], second.shape[1])
    if first.dim() == 2 or second.dim() == 2:
        return first.new_empty(first.shape[-2], second.shape[-1])
    return first.new_empty(first.shape[0], first.shape[1], second.shape[2])


def _grouped_flops(first: Tensor, second: Tensor, *_: object, **__: object) -> int:
    if first.dim() == 2:
        return int(2 * first.numel() * second.shape[-1])
    return int(2 * first.shape[-2] * second.numel())


def _attention(count: Callable[..., int], tensors: int, *args: Tensor, **_: object) -> int:
    """Return the operations of attention, which depend on the shapes of its first `tensors`
    arguments.
    """
    return int(count(*(tensor.shape for tensor in args[:tensors])))


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # What torch's own table leaves out.
    aten._grouped_mm: _grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: partial(_attention, sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(
        _attention, sdpa_backward_flop_count, 4
    ),
}
