"""`tensor.view(dtype)` on a lazy device: the same bits under another dtype, within the graph.

`torch_xla` has no such operation, and would run the graph, take the tensor to the host, and bring it back under its
new dtype, for every weight of every layer. Its compiler has one (`BitcastConvert`), which torch is told of here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["change_of_sizes", "register"]

_registered: list[Any] = []  # what is registered lasts as long as its library object


def register() -> None:
    """Let `view(dtype)` of this device's tensors be an operation of its graphs; once is enough."""
    if _registered:
        return
    builder, registry = (import_module(f"torch_xla.core.xla_{name}") for name in ("builder", "op_registry"))
    library = torch.library.Library("aten", "IMPL", "XLA")
    library.impl("view_copy.dtype", viewer(registry.register("lema_view_dtype", _lowered), builder._PT_XLA_TYPE_MAP))
    _registered.append(library)


def viewer(operation: Any, types: Any) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return what views a tensor under another dtype.

    Args:
        operation: given a tensor, the type's name, and sizes before and after, adds the operation to the graph.
        types: dtype -> what the compiler calls it.
    """

    def view(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == torch.bool:  # a byte, but not for the compiler
            return view(tensor, torch.uint8) != 0
        before, after = change_of_sizes(list(tensor.shape), tensor.dtype.itemsize, dtype.itemsize)
        made: Tensor = operation(tensor, to=types[dtype], before=before, after=after)
        return made

    return view


def change_of_sizes(shape: list[int], width: int, wanted: int) -> tuple[list[int] | None, list[int] | None]:
    """Return what a tensor is reshaped to before its bits are taken otherwise, and after; None: it is not.

    The compiler joins elements along a last dimension that goes, or cuts them along one that comes.

    Args:
        shape: of the tensor.
        width: bytes of an element.
        wanted: bytes of an element afterwards.
    """
    if wanted == width:
        return None, None
    *others, last = shape
    if wanted > width:
        return [*others, last * width // wanted, wanted // width], None
    return None, [*others, last * (width // wanted)]


def _lowered(operand: Any, *, to: Any, before: list[int] | None, after: list[int] | None) -> Any:
    operand = operand if before is None else operand.reshape(before)
    made = operand.bitcast(to)
    return made if after is None else made.reshape(after)
