"""Captures how a model calls its layers, and checks that layer by layer the model computes the same.

`HandedOn` and its neighbours hold a layer's arguments besides the hidden state. Visiting layer by layer is exact only
if a layer gets the hidden state that the layer below returned, untouched, and nothing else that a layer made. Autograd
knows what a tensor was made of, so it is asked.

Such questions are answered by tensors that have shapes and no values, because a lazy device would compile whatever is
run on it. Masks are made without a look at values: `transformers` leaves a mask out where it finds that nothing is
masked, and asks the device for that in every forward, which on a lazy device costs a graph for each answer and another
one for layers without a mask. While something traces it, `transformers` makes the mask without asking. A lazy device
traces too, but `transformers` does not know it, and is told so here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import CRITICAL, getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import masking_utils

__all__ = [
    "PASSED_THROUGH_THE_MODEL",
    "HandedOn",
    "LayerCall",
    "alike",
    "as_leaf",
    "depends_on",
    "has_values",
    "leaves",
    "replaced_tensors",
    "same_structure",
    "structure",
    "tensors_in",
    "values_unread",
    "with_bytes",
    "without_dropout",
    "without_values",
]


# What a model's own forward may raise.
PASSED_THROUGH_THE_MODEL = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)


@dataclass
class HandedOn:
    """What a layer hands to the next beside the hidden state: for one, which tokens to attend to.

    When calls are recorded no layer has run, so the model passes placeholders along; whichever argument of the next
    call *is* a placeholder is filled in when that layer runs. Gradients do not flow this way: only integers and flags
    do.
    """

    placeholders: tuple[Any, ...]
    values: tuple[Any, ...] = ()

    @classmethod
    def like(cls, rest: tuple[Any, ...], mark_absent: bool) -> HandedOn:
        """Make placeholders for what layer 0 returned after its hidden state.

        With `mark_absent` a None gets one too: it may be a tensor in other layers.
        """
        return cls(tuple(_placeholder(item, mark_absent) for item in rest))

    def is_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether one of the arguments is a placeholder."""
        return any(self._slot(value) is not None for value in (*args, *kwargs.values()))

    def filled(self, value: Any) -> Any:
        """Return what `value` stands for."""
        slot = self._slot(value)
        return value if slot is None else self.values[slot] if self.values else None

    def _slot(self, value: Any) -> int | None:
        slots = enumerate(self.placeholders)
        return next((slot for slot, one in slots if one is value and _carries_no_gradient(one)), None)


@dataclass
class LayerCall:
    """The arguments one layer was called with, but for the hidden state.

    Attributes:
        received: of the layer below, where an argument stands for it.
        left: for the layer above, where it takes any.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_is_keyword: bool
    received: HandedOn | None = field(default=None)
    left: HandedOn | None = field(default=None)

    @classmethod
    def record(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[LayerCall, Tensor]:
        """Take a call apart into its hidden state, `[batch, sequence, hidden]`, and the rest."""
        if args:
            return cls(args[1:], kwargs, False), args[0]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return cls((), rest, True), kwargs["hidden_states"]

    def others(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments but for the hidden state, with what the layer below handed on in its place."""
        if self.received is None:
            return self.args, self.kwargs
        filled = self.received.filled
        return tuple(map(filled, self.args)), {name: filled(value) for name, value in self.kwargs.items()}

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with `hidden` in its place."""
        args, kwargs = self.others()
        if self.hidden_is_keyword:
            return (), {"hidden_states": hidden, **kwargs}
        return (hidden, *args), kwargs


def _placeholder(item: Any, mark_absent: bool) -> Any:
    if item is None and mark_absent:
        return torch.empty(0, dtype=torch.long)
    return item.view_as(item) if isinstance(item, Tensor) and _carries_no_gradient(item) else item


def _carries_no_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and not (item.is_floating_point() or item.is_complex())


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


def has_values(tensor: Tensor) -> bool:
    """Whether there is more to a tensor than its shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@contextmanager
def replaced_tensors(model: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a model's parameters and buffers be what `other` returns for them in a `with` block; tied ones stay one."""
    owned: list[tuple[Any, dict[str, Tensor | None]]]
    owned = [(kept, {**kept}) for module in model.modules() for kept in (module._parameters, module._buffers)]
    made: dict[int, Tensor] = {}
    try:
        for kept, tensors in owned:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = other(tensor)
                    kept[name] = made[id(tensor)]
        yield
    finally:
        for kept, tensors in owned:
            kept.update(tensors)


@contextmanager
def without_values(model: nn.Module, given: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model's parameters and buffers have no values in a `with` block, and no tensor that is made there.

    Args:
        model: it.
        given: the part of it whose parameters on `meta` are given to each call: they stay there.
        device: where all others seem to be.
    """
    inside = {id(parameter) for parameter in given.parameters() if parameter.is_meta}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) in inside:
            return tensor
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    tracer = getLogger("torch._subclasses.fake_tensor")
    level, tracer.level = tracer.level, CRITICAL  # what fails is raised, and need not be logged as well
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), replaced_tensors(model, like):
            yield
    finally:
        tracer.level = level


def with_bytes(value: object, device: torch.device) -> object:
    """Return a tensor without values as zeros on `device`, which it need not compute; any other value as it is."""
    if not isinstance(value, Tensor) or has_values(value):
        return value
    return torch.zeros(value.shape, dtype=value.dtype).to(device)


@contextmanager
def values_unread() -> Iterator[None]:
    """Have masks made whatever their values, in a `with` block."""
    module: Any = masking_utils
    before, module.is_tracing = module.is_tracing, _traced
    try:
        yield
    finally:
        module.is_tracing = before


def _traced(tensor: Any = None) -> bool:  # noqa: ARG001 - as the function it stands for
    return True


def leaves(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the `id` of every tensor to which a backward from `tensors` would add a gradient."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    found = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        waiting.extend(following for following, _ in node.next_functions)
    return frozenset(found)
