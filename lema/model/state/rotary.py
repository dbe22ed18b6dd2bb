"""Rotary embeddings whose table goes by the longest position that they have seen, where positions have no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["tables_as_they_are"]

# In the name of a type, for `transformers`: its forward looks at the positions, and may replace its table.
BY_VALUES = "dynamic"
FIXED = "default"


@contextmanager
def tables_as_they_are(model: nn.Module) -> Iterator[None]:
    """Have rotary embeddings keep the table that they have in a `with` block. Any other has the same shape."""
    types = {module: kind for module in model.modules() if (kind := vars(module).get("rope_type")) is not None}
    try:
        for module, kind in types.items():
            vars(module)["rope_type"] = _fixed(kind)
        yield
    finally:
        for module, kind in types.items():
            vars(module)["rope_type"] = kind


def _fixed(kind: Any) -> Any:
    if isinstance(kind, dict):  # because each kind of layers has its own
        return {name: _fixed(one) for name, one in kind.items()}
    return FIXED if BY_VALUES in kind else kind
