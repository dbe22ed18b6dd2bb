"""Kinds of decoder layers: layers of the same modules with the same settings, so that one can replace another.

Nothing here knows an architecture. Two layers are compared module by module: types, names and shapes of tensors, and
every plain attribute. Layers of one kind may differ only in their number in the stack, and in names that contain it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Attribute", "compare_layers"]

# What torch keeps in every module: its parts, which are compared by themselves, and whether it trains and what hooks it
# has, which every caller of a layer must look at, since they change.
KEPT_BY_TORCH = frozenset(vars(nn.Module()))
REPLACED = "forward"  # of a layer; while a part of the model runs, another may stand in its place
DEEPEST = 6  # objects in objects

Attribute: TypeAlias = tuple[str, str]
"""One attribute of a layer or of a module in it: the module's name in the layer, and its own."""


def compare_layers(layers: Sequence[nn.Module], name: str) -> tuple[tuple[int, ...], tuple[Attribute, ...]]:
    """Compare the layers of a stack with each other, whose `name` in the model says that `<name>.3` is a layer's. It
    returns for each layer the number of its kind, in the order in which kinds come: `(0, 0, 1, 0, ...)`; and the
    attributes in which layers of one kind may differ, since they say which layer it is."""
    numbers = frozenset(_numbers(layers))
    labels = set(numbers)
    firsts: list[int] = []
    found: list[int] = []
    for index in range(len(layers)):
        # Compared with the first of each kind only, because what equals one equals all of its kind.
        for kind, first in enumerate(firsts):
            if (named := _difference(layers, name, index, first, numbers)) is not None:
                found.append(kind)
                labels |= named
                break
        else:
            found.append(len(firsts))
            firsts.append(index)
    return tuple(found), tuple(sorted(labels))


def _numbers(layers: Sequence[nn.Module]) -> Iterator[Attribute]:
    """Yield the attributes by which a layer knows its number in the stack: they grow by one from layer to layer. An
    attribute of two neighbours only could as well be a switch that is on in one of them, and is none."""
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
    """Return the attributes in which two layers differ by their names alone; None: they are not alike."""
    mine, theirs = dict(layers[index].named_modules()), dict(layers[first].named_modules())
    if mine.keys() != theirs.keys():
        return None
    found: set[Attribute] = set()
    for path, module in mine.items():
        other = theirs[path]
        if type(module) is not type(other) or _tensors(module) != _tensors(other):
            return None
        settings, others = _settings(path, module), _settings(path, other)
        if settings.keys() != others.keys():
            return None
        for key, value in settings.items():
            if (attribute := (path, key)) in numbers or _same(value, others[key], "", ""):
                continue
            if not _same(value, others[key], f"{name}.{index}.", f"{name}.{first}."):
                return None
            found.add(attribute)
    return found


def _tensors(module: nn.Module) -> list[Any]:
    """Describe a module's own tensors."""
    owned: list[tuple[str, Tensor | None]] = [*module._parameters.items(), *module._buffers.items()]
    return [
        (name, None if one is None else (type(one), one.shape, one.dtype, one.is_meta, one.requires_grad))
        for name, one in owned
    ]


def _settings(path: str, module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in KEPT_BY_TORCH}
    if not path:
        own.pop(REPLACED, None)
    return own


def _same(one: Any, other: Any, mine: str, theirs: str, depth: int = DEEPEST) -> bool:
    """Whether two values are surely equal, once each's own name is taken out of it; what cannot be told differs."""

    def same(a: Any, b: Any) -> bool:
        return _same(a, b, mine, theirs, depth - 1)

    if one is other:
        return True
    if type(one) is not type(other) or depth == 0 or isinstance(one, nn.Module):
        return False
    if isinstance(one, str):
        return bool(one.replace(mine, "") == other.replace(theirs, "")) if mine else bool(one == other)
    if isinstance(one, Tensor):
        described = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        return not one.is_meta and described[0] == described[1] and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, partial):
        return same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    kind: Any = type(one)
    if kind.__eq__ is not object.__eq__:
        return bool(one == other)
    return hasattr(one, "__dict__") and not callable(one) and same(vars(one), vars(other))
