"""Kinds of decoder layers: layers of the same modules with the same settings, so that one can
replace another.

Nothing here knows an architecture. Two layers are compared module by module: types, names and
shapes of tensors, and every plain attribute. Layers of one kind may differ only in their number in
the stack, and in names that contain it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Attribute", "compare_layers"]

# What torch keeps in every module: its parts, which are compared by themselves, and whether it
# trains and what hooks it has, which every caller of a layer must look at, since they change.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
REPLACED = "forward"  # of a layer; while a part of the model runs, another may stand in its place
DEEPEST = 6  # objects in objects

Attribute: TypeAlias = tuple[str, str]
"""One attribute of a layer or of a module in it: the module's name in the layer, and its own."""


def compare_layers(
    layers: Sequence[nn.Module], name: str
) -> tuple[tuple[int, ...], tuple[Attribute, ...]]:
    """Compare the layers of a stack with each other, whose `name` in the model says that `<name>.3`
    is a layer's. It returns for each layer the number of its kind, in the order in which kinds
    come: `(0, 0, 1, 0, ...)`; and the attributes in which layers of one kind may differ, since they
    say which layer it is."""
    numbers = frozenset(_numbers(layers))
    labels = set(numbers)
    firsts: list[int] = []
    kinds: list[int] = []
    for index in range(len(layers)):
        # Compared with the first of each kind only, because what equals one equals all of its kind.
        for kind, first in enumerate(firsts):
            if (named := _difference(layers, name, index, first, numbers)) is not None:
                kinds.append(kind)
                labels |= named
                break
        else:
            kinds.append(len(firsts))
            firsts.append(index)
    return tuple(kinds), tuple(sorted(labels))


def _numbers(layers: Sequence[nn.Module]) -> Iterator[Attribute]:
    """Yield the attributes by which a layer knows its number in the stack: they grow by one from
    layer to layer. An attribute of two neighbours only could as well be a switch that is on in one
    of them, and is none."""
    seen: dict[Attribute, dict[int, int]] = {}
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    seen.setdefault((path, name), {})[index] = value - index
    for attribute, offsets in seen.items():
        if max(offsets) - min(offsets) > 1 and len(set(offsets.values())) == 1:
            yield attribute


def _difference(
    layers: Sequence[nn.Module], name: str, index: int, first: int, numbers: Collection[Attribute]
) -> set[Attribute] | None:
    """Return the attributes in which two layers differ by their names alone; None: they are not
    alike.
    """
    mine = dict(layers[index].named_modules())
    theirs = dict(layers[first].named_modules())
    if mine.keys() != theirs.keys():
        return None
    differences: set[Attribute] = set()
    for path, module in mine.items():
        counterpart = theirs[path]
        if type(module) is not type(counterpart) or _tensors(module) != _tensors(counterpart):
            return None
        settings = _settings(path, module)
        counterpart_settings = _settings(path, counterpart)
        if settings.keys() != counterpart_settings.keys():
            return None
        for key, value in settings.items():
            if (attribute := (path, key)) in numbers or _same(
                value, counterpart_settings[key], "", ""
            ):
                continue
            if not _same(value, counterpart_settings[key], f"{name}.{index}.", f"{name}.{first}."):
                return None
            differences.add(attribute)
    return differences


def _tensors(module: nn.Module) -> list[Any]:
    """Describe a module's own tensors."""
    owned: list[tuple[str, Tensor | None]] = [*module._parameters.items(), *module._buffers.items()]
    return [
        (
            name,
            None
            if tensor is None
            else (type(tensor), tensor.shape, tensor.dtype, tensor.is_meta, tensor.requires_grad),
        )
        for name, tensor in owned
    ]


def _settings(path: str, module: nn.Module) -> dict[str, Any]:
    settings = {
        name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES
    }
    if not path:
        settings.pop(REPLACED, None)
    return settings


def _same(left: Any, right: Any, mine: str, theirs: str, depth: int = DEEPEST) -> bool:
    """Whether two values are surely equal, once each's own name is taken out of it; what cannot
    be told differs.
    """

    def same(a: object, b: object) -> bool:
        return _same(a, b, mine, theirs, depth - 1)

    if left is right:
        return True
    if type(left) is not type(right) or depth == 0 or isinstance(left, nn.Module):
        return False
    if isinstance(left, str):
        return (
            bool(left.replace(mine, "") == right.replace(theirs, ""))
            if mine
            else bool(left == right)
        )
    if isinstance(left, Tensor):
        described = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (left, right)]
        return not left.is_meta and described[0] == described[1] and bool(torch.equal(left, right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, partial):
        return same((left.func, left.args, left.keywords), (right.func, right.args, right.keywords))
    kind: Any = type(left)
    if kind.__eq__ is not object.__eq__:
        return bool(left == right)
    return hasattr(left, "__dict__") and not callable(left) and same(vars(left), vars(right))
