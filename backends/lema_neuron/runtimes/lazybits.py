"""`tensor.view(dtype)` on a lazy device: the same bits under another dtype, within the graph.

`torch_xla` has no such operation. It would run the graph, copy the tensor to the host, and copy it
back with its new dtype, for every weight of every layer. Its compiler has one (`BitcastConvert`),
which is registered with torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["change_of_sizes", "register"]

_registered: list[Any] = []  # a registration lasts as long as its library object


def register() -> None:
    """Make `view(dtype)` of this device's tensors an operation of its graphs; once is enough."""
    if _registered:
        return
    builder, registry = (
        import_module(f"torch_xla.core.xla_{name}") for name in ("builder", "op_registry")
    )
    library = torch.library.Library("aten", "IMPL", "XLA")
    library.impl(
        "view_copy.dtype",
        viewer(registry.register("lema_view_dtype", _lowered), builder._PT_XLA_TYPE_MAP),
    )
    _registered.append(library)


def viewer(operation: Any, types: Any) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return a function that views a tensor under another dtype.

    Args:
        operation: adds the operation to the graph, from a tensor, the type's name, and sizes before
            and after.
        types: dtype -> the compiler's name of it.
    """

    def view(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == torch.bool:  # one byte in torch, but not for the compiler
            return view(tensor, torch.uint8) != 0
        before, after = change_of_sizes(list(tensor.shape), tensor.dtype.itemsize, dtype.itemsize)
        viewed: Tensor = operation(tensor, to=types[dtype], before=before, after=after)
        return viewed

    return view


def change_of_sizes(
    shape: list[int], width: int, new_width: int
) -> tuple[list[int] | None, list[int] | None]:
    """Return the shapes of a tensor just before and just after its dtype changes; None: no
    reshaping is needed.

    The compiler joins elements along the last dimension, which vanishes, or splits them along a new
    last dimension.

    Args:
        shape: the tensor's shape.
        width: bytes of an element.
        new_width: bytes of an element afterwards.
    """
    if new_width == width:
        return None, None
    *leading, last = shape
    if new_width > width:
        return [*leading, last * width // new_width, new_width // width], None
    return None, [*leading, last * (width // new_width)]


def _lowered(operand: Any, *, to: Any, before: list[int] | None, after: list[int] | None) -> Any:
    operand = operand if before is None else operand.reshape(before)
    converted = operand.bitcast(to)
    return converted if after is None else converted.reshape(after)
