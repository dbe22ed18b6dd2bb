"""Rotary embeddings whose table goes by the longest position that they have seen, where
positions have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

__all__ = ["goes_by_length", "tables_as_they_are", "types_by_length"]

# In the name of a type, for `transformers`: its forward looks at the positions, and may replace its
# table.
BY_VALUES = "dynamic"
# whose forward chooses one of two tables by the longest position, in some releases by its value
LONG = "longrope"
FIXED = "default"
RopeTypes: TypeAlias = "str | dict[str, RopeTypes]"  # one, or one for each kind of layers


def types_by_length(model: nn.Module) -> list[str]:
    """Return the types of rotary embeddings whose table goes by the longest row of a call, so that
    the rows that are computed at once change what is computed of each."""
    types = {rope_type for module in model.modules() for rope_type in _types_of(module)}
    return sorted(filter(_is_by_length, types))


def goes_by_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose table goes by the longest row of a call."""
    return any(map(_is_by_length, _types_of(module)))


def _types_of(module: nn.Module) -> list[str]:
    """Return the types of a rotary embedding, one for each kind of layers; of another module
    none."""
    kind: str | dict[str, str] | None = vars(module).get("rope_type")
    if kind is None:
        return []
    return [*kind.values()] if isinstance(kind, dict) else [kind]


def _is_by_length(rope_type: str) -> bool:
    return BY_VALUES in rope_type or rope_type == LONG


@contextmanager
def tables_as_they_are(model: nn.Module) -> Iterator[None]:
    """Have rotary embeddings keep the table that they have in a `with` block. Any other has the
    same shape.
    """
    types = {
        module: kind
        for module in model.modules()
        if (kind := vars(module).get("rope_type")) is not None
    }
    try:
        for module, kind in types.items():
            vars(module)["rope_type"] = _fixed(kind)
        yield
    finally:
        for module, kind in types.items():
            vars(module)["rope_type"] = kind


def _fixed(kind: RopeTypes) -> RopeTypes:
    if isinstance(kind, dict):  # because each kind of layers has its own
        return {name: _fixed(rope_type) for name, rope_type in kind.items()}
    return FIXED if BY_VALUES in kind or kind == LONG else kind
