"""A model run for its shapes alone: nothing is computed, and nothing is asked of the device.

A lazy device compiles whatever is run on it. What is wanted of a run is often no number: which of its arguments a layer
hands on, whether the head looks at more layers than the last. That is the same for tensors that have no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["has_values", "with_bytes", "without_values"]


def has_values(tensor: Tensor) -> bool:
    """Whether there is more to a tensor than its shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@contextmanager
def without_values(model: nn.Module, given: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model's parameters and buffers have no values in a `with` block, and no tensor that is made there.

    Args:
        model: it.
        given: the part of it whose parameters on `meta` are given to each call: they stay there.
        device: where all others seem to be.
    """
    inside = {id(parameter) for parameter in given.parameters() if parameter.is_meta}
    owned = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    made: dict[int, Tensor] = {}  # tied tensors stay one

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            trains = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            for module, parameters, buffers in owned:
                kinds: list[tuple[Any, Mapping[str, Tensor | None]]]
                kinds = [(module._parameters, parameters), (module._buffers, buffers)]
                for kept, tensors in kinds:
                    there = {name: one for name, one in tensors.items() if one is not None and id(one) not in inside}
                    kept.update({name: like(one) for name, one in there.items()})
            yield
        finally:
            for module, parameters, buffers in owned:
                module._parameters.update(parameters)
                module._buffers.update(buffers)


def with_bytes(value: object, device: torch.device) -> object:
    """Return a tensor without values as zeros on `device`, which it need not compute; any other value as it is."""
    if not isinstance(value, Tensor) or has_values(value):
        return value
    return torch.zeros(value.shape, dtype=value.dtype).to(device)
