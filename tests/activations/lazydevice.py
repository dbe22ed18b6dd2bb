"""A lazy device: what is computed there waits to be run, and its tensors have no memory that
could be looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # for the name's sake: autograd has no queue of its own for it


class LazyDevice(TorchDispatchMode):
    """The device, while it is entered; there is one at a time.

    Attributes:
        graphs: of each graph that was run, how many operations it had.
        forced: graphs that were run because somebody looked at a tensor.
        uploads: how often a tensor of the host came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.forced = self.uploads = 0
        self._pending: list[LazyTensor] = []

    def run(self) -> None:
        """Run what waits to be run."""
        if self._pending:
            self.graphs.append(len(self._pending))
        for tensor in self._pending:
            tensor.is_there = True
        self._pending.clear()

    def made(self, value: Tensor, *, is_there: bool) -> LazyTensor:
        tensor = LazyTensor(value)
        tensor.is_there = is_there
        if not is_there:
            self._pending.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        lazy = [one for one in args if isinstance(one, LazyTensor)]
        target = kwargs.get("device")
        if function is torch.ops.aten._to_copy.default and target == torch.device("cpu") and lazy:
            return self._fetched(args[0])
        if function is torch.ops.aten._to_copy.default and target == DEVICE and not lazy:
            self.uploads += 1
            return self.made(args[0].clone(), is_there=True)
        if target == DEVICE:
            kwargs["device"] = torch.device("cpu")
        result = function(*tree_map(_value, args), **tree_map(_value, kwargs))
        if function._schema.is_mutable and lazy:
            return args[0]
        here = lazy or target == DEVICE or any(isinstance(one, LazyTensor) for one in _flat(args))
        return (
            tree_map(
                lambda one: self.made(one, is_there=False) if isinstance(one, Tensor) else one,
                result,
            )
            if here
            else result
        )

    def _fetched(self, tensor: LazyTensor) -> Tensor:
        if not tensor.is_there:
            self.forced += 1
            self.run()
        return tensor.value.clone()


class LazyTensor(Tensor):
    value: Tensor
    is_there: bool

    @staticmethod
    def __new__(cls, value: Tensor) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=DEVICE
        )  # type: ignore[attr-defined]
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} on a device that nobody has entered")

    def untyped_storage(self) -> Any:
        raise NotImplementedError("tensors of this device have no storage")

    def data_ptr(self) -> int:
        raise NotImplementedError("tensors of this device have no address")


def _value(one: Any) -> Any:
    return one.value if isinstance(one, LazyTensor) else one


def _flat(args: Any) -> list[Any]:
    return [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
