"""Which saved tensors are moved: everything on the device except weights, small tensors, and those
that are used soon.

A weight is a parameter, a view of one, or a cast that autocast made of one (`Weights`). A linear
layer saves `W.t()`, which is no parameter but a view. Weights are on the device anyway, or come
back to it by themselves, so they are never moved; a view is kept as a reference, which pins nothing
of a weight whose memory is away between forward and backward.
"""

from collections.abc import Collection, Iterator
from typing import Any, Self, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lema.activations.hooks import Scope, current
from lema.activations.protocols import Choice, StayReason

__all__ = ["WeightStorages", "WeightView", "everything", "storages_of"]

CAST = "ToCopyBackward0"  # what autograd calls it
WEIGHTS = (nn.Parameter, nn.Buffer)


class WeightView:
    """A view of a parameter or its cast, which is found again in the memory that the parameter
    has later.
    """

    __slots__ = ("_cast", "_first", "_laid", "_parameter", "_shape", "_stride", "_version")

    def __init__(
        self, parameter: Tensor, view: Tensor, first: int, cast: torch.dtype | None = None
    ) -> None:
        self._parameter = parameter
        self._version = parameter._version
        self._laid = _laid(parameter)
        self._shape = view.shape
        self._stride = view.stride()
        self._first = first
        self._cast = cast

    @classmethod
    def of(cls, tensor: Tensor) -> Self | None:
        """Return the reference that stands for `tensor`; None: it is no plain view of a
        parameter.
        """
        parameter = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        plain = isinstance(parameter, nn.Parameter) and type(tensor) in (Tensor, nn.Parameter)
        if not plain or parameter is None or parameter.dtype != tensor.dtype:
            return None
        if parameter.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            return None
        return cls(parameter, tensor, int(tensor.storage_offset() - parameter.storage_offset()))

    @classmethod
    def of_cast(cls, tensor: Tensor) -> Self | None:
        """Return what stands for `tensor`, cast again on demand; None: it is no cast of a
        parameter, or view of one.
        """
        base = tensor if tensor._base is None else tensor._base
        made_by = base.grad_fn
        if made_by is None or made_by.name() != CAST:
            return None
        parameter = getattr(made_by.next_functions[0][0], "variable", None)
        if not isinstance(parameter, nn.Parameter) or base.dtype != tensor.dtype:
            return None
        alike = (base.shape, base.stride(), base.storage_offset()) == (
            parameter.shape,
            parameter.stride(),
            0,
        )
        here = alike and base.device == parameter.device
        return cls(parameter, tensor, int(tensor.storage_offset()), tensor.dtype) if here else None

    def unpack(self) -> Tensor:
        """Return the view; `RuntimeError`: the parameter was written into, or laid out
        otherwise, since.
        """
        parameter = self._parameter
        if parameter._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by "
                "an inplace operation: "
                f"a parameter {list(parameter.shape)} is at version {parameter._version}, "
                f"not {self._version}"
            )
        if _laid(parameter) != self._laid:
            raise RuntimeError(
                f"a parameter that the backward needs was {self._laid} in the forward, and "
                f"is {_laid(parameter)}"
            )
        if self._cast is not None:
            return (
                parameter.detach().to(self._cast).as_strided(self._shape, self._stride, self._first)
            )
        return parameter.detach().as_strided(
            self._shape, self._stride, parameter.storage_offset() + self._first
        )


class WeightStorages:
    """The weights of a model: its parameters and buffers; without a model, what are parameters
    or views of one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else ref(model)
        self._storages: dict[int, ref[Tensor]] = {}
        self._casts: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()

    def refresh(self) -> None:
        """Look up the addresses of the weights again, because they may have moved."""
        self._storages.clear()
        model = None if self._model is None else self._model()
        if model is not None:
            for weight in (*model.parameters(), *model.buffers()):
                self._storages.update((key, ref(weight)) for key in storages_of(weight))

    def holds(self, tensor: Tensor, scope: Scope | None = None) -> bool:
        """Return whether `tensor` is a weight, or shares its memory with one. What the modules of
        `scope` that are being run compute with may have been put there for the moment."""
        if isinstance(tensor, WEIGHTS) or isinstance(tensor._base, WEIGHTS):
            return True
        for key in storages_of(tensor):
            reference = self._storages.get(key)
            weight = None if reference is None else reference()
            # else the address is somebody else's by now
            if weight is not None and key in storages_of(weight):
                return True
            running = () if scope is None or not scope.modules else _of(scope.modules[-1][0])
            if any(key in storages_of(weight) for weight in running):
                return True
        return False

    def casts(self, tensor: Tensor, scope: Scope | None) -> bool:
        """Return whether `tensor` is, or is a view of, a weight of the innermost module, cast by
        autocast. What looks like one is compared with the weight where it first occurs: nothing
        else tells them from activations of the same shape. A mistake later, where the same module
        saves something else in the same place, would leave an activation on the device, and change
        no number."""
        if scope is None or not scope.modules:
            # whether autocast is on cannot be asked here: it is off while an operation runs
            return False
        module, saved = scope.modules[-1]
        base = tensor if tensor._base is None else tensor._base
        likes = [
            weight
            for weight in _of(module)
            if weight.shape == base.shape and weight.dtype != base.dtype
        ]
        if not likes:
            return False
        learnt = self._casts.setdefault(module, {})
        key = (saved[0], tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in learnt:
            learnt[key] = any(
                torch.equal(like.detach().to(base.dtype), base.detach()) for like in likes
            )
        return learnt[key]


def storages_of(tensor: Tensor) -> list[int]:
    """Return the storages that `tensor` lies in: one, or of a tensor made of others, theirs."""
    if is_traceable_wrapper_subclass(wrapper := cast(Any, tensor)):
        names, _ = wrapper.__tensor_flatten__()
        return [key for name in names for key in storages_of(getattr(tensor, name))]
    if tensor.layout != torch.strided:
        return []
    return [tensor.untyped_storage()._cdata]


def _of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that a module has itself, whatever they are at the
    moment.
    """
    for tensors in (module._parameters, module._buffers):
        for weight in tensors.values():
            if weight is not None:
                yield weight


def _laid(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


PLAIN = (Tensor, nn.Parameter)


def everything(
    weights: WeightStorages,
    on: Collection[str],
    *,
    min_bytes: int = 1024,
    but: Choice | None = None,
    excluded_storages: Collection[int] = (),
) -> Choice:
    """Return the choice of everything that is worth moving from the types of device `on`; tensors
    of less than `min_bytes` stay. What is left to be moved, the choice `but` may keep all the same.
    `excluded_storages` are storages (`_cdata`) that others hold until the backward. Both sets are
    asked at every tensor."""

    def reason_to_stay(tensor: Tensor) -> StayReason | None:
        scope = current()
        if scope is not None and scope.modules:
            scope.modules[-1][1][0] += 1
        if torch._C._current_graph_task_id() != -1:
            return StayReason.BACKWARD  # because what a recomputation saves is used at once
        if weights.holds(tensor, scope):
            return StayReason.WEIGHT
        if tensor.device.type not in on:
            return StayReason.ELSEWHERE
        if scope is not None and scope.excluded:
            return StayReason.EXCLUDED
        if scope is not None and scope.past_head:
            return StayReason.LOSS
        if type(tensor) not in PLAIN:
            return StayReason.QUANTIZED
        if (
            tensor.layout != torch.strided
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return StayReason.LAYOUT
        if tensor.nbytes < min_bytes:
            return StayReason.SMALL
        if weights.casts(tensor, scope):
            return StayReason.CAST
        if excluded_storages and tensor.untyped_storage()._cdata in excluded_storages:
            return StayReason.REFERENCED
        return None if but is None else but(tensor)

    return reason_to_stay
