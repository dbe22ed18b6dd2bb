"""What flows where in a model's forward: the questions asked before its layers are visited one by one.

Visiting layer by layer is exact only if a layer gets the hidden state the layer below it returned, untouched, and
nothing else that a layer made. Autograd knows what a tensor was made of, so it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["alike", "as_leaf", "depends_on", "same_structure", "structure", "tensors_in", "without_dropout"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def as_leaf(value: Any) -> Any:
    """Return the value with every floating tensor in it cut off from its past, and asking for a gradient."""
    if isinstance(value, Tensor):
        leaf = value.detach().clone()
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(as_leaf, value))
    if isinstance(value, list):
        return [as_leaf(item) for item in value]
    return value


def depends_on(made: Iterable[Tensor], sources: Iterable[Tensor]) -> bool:
    """Whether one of the tensors `made` is one of `sources`, or was computed from one with a graph."""
    sources = list(sources)
    leaves = [source for source in sources if source.requires_grad]
    for tensor in made:
        if any(tensor is source for source in sources):
            return True
        if tensor.requires_grad and leaves:
            with torch.enable_grad():
                found = torch.autograd.grad(tensor.sum(), leaves, allow_unused=True, retain_graph=True)
            if any(gradient is not None for gradient in found):
                return True
    return False


def structure(value: Any) -> Any:
    """Return what tells whether a container was written into: its items by identity, containers in it likewise.

    The items themselves are kept, so that no other object can take their identity.
    """
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [structure(item) for item in value]
    return value


def same_structure(one: Any, other: Any) -> bool:
    """Whether two results of `structure` are of the same items."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_structure(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_structure, one, other))
    return one is other


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Let two runs of the model give the same logits, for the length of a `with` block."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are those expected, but for the rounding of their dtype; without bytes, whether they have their
    shape."""
    if found.shape != expected.shape:
        return False
    if found.is_meta or isinstance(found, FakeTensor):
        return True
    # A matmul over fewer rows may add in another order, which half precision shows as a whole last place.
    places = 4 * torch.finfo(expected.dtype).eps
    usual = 2 * places * float(expected.abs().median())
    return torch.allclose(found, expected, rtol=max(1e-3, places), atol=max(1e-3, usual))
