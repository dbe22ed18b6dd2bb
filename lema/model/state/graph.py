"""What the graph of a tensor reaches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["leaves"]


def leaves(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the `id` of every tensor to which a backward from `tensors` would add a gradient."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    leaf_ids = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaf_ids.add(id(leaf))
        waiting.extend(following for following, _ in node.next_functions)
    return frozenset(leaf_ids)
