"""The state between two layers as one tensor, and checks that a model computes the same layer by
layer as whole.

Such questions are answered by tensors that have shapes and no values, because a lazy device would
compile whatever is run on it, and by autograd, which knows what a tensor was made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from inspect import Signature
from logging import CRITICAL, getLogger
from math import prod
from typing import Any, TypeGuard, TypeVar

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import masking_utils

from lema.compat import collecting
from lema.model.state.attention import attention_without_values
from lema.model.state.rotary import tables_as_they_are
from lema.model.state.snapshot import rehearsed

# What a model's own forward may raise.
PASSED_THROUGH_THE_MODEL = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    KeyError,
    AssertionError,
)
# elements between the beginnings of packed tensors: at least what torch's own memory has, in bytes
ALIGNMENT = 64
Shared = MutableMapping[Any, Any]
T = TypeVar("T")
Tree = TypeVar("Tree")  # a value: nested tuples, lists and dictionaries
FEW_TOKENS = 8
# in names of attributes that are a probability to drop something, or a strength of noise
DRAWN = ("drop", "jitter", "noise")


@dataclass(frozen=True)
class _TensorLayout:
    """What a packed tensor looked like: its shape, and its dimensions as they followed each
    other in memory.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLayout:
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        return cls(tuple(tensor.shape), tuple(order), tensor.dtype)

    def taken(self, flat: Tensor) -> Tensor:
        """Return the tensor whose values are `flat`, with the strides that it had, because
        products depend on them.
        """
        shaped = flat.to(self.dtype).view([self.shape[dim] for dim in self.order])
        return shaped.permute([self.order.index(dim) for dim in range(len(self.shape))])


def named_arguments(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, those that are named by no parameter as well."""
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def lists_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], bool]:
    """Return what tells whether the lists among a layer's arguments still hold what they do now,
    because what the layer leaves there would be lost to later ones. Mappings are copies of one run,
    and what is new in them is handed on."""
    arguments = [*args, *kwargs.values()]
    inside = [
        item
        for argument in arguments
        for item in (argument.values() if isinstance(argument, Mapping) else [argument])
    ]
    containers = [item for item in inside if isinstance(item, list | tuple | dict)]
    items, structure = tree_flatten(containers)

    def same() -> bool:
        now, structure_now = tree_flatten(containers)
        return structure == structure_now and all(
            before is after for before, after in zip(items, now, strict=True)
        )

    return same


class Between:
    """What one layer hands to the next, or the top layer to the head, for one micro-batch. `live`:
    the numbers of what is wanted later. `shared`: mappings that later layers are given too; what
    was written into them goes along. `more`: whether the layer that ran last handed on more than
    one value."""

    def __init__(self, live: Sequence[int], shared: Sequence[Shared]) -> None:
        self.live = tuple(live)
        self.shared = tuple(shared)
        self.more = False
        self._leaves: list[Any] = []  # without the bytes of what is packed
        self._structure: Any = None
        # strides of the gradients of extracted tensors
        self._strides: dict[int, tuple[int, ...]] = {}

    @property
    def is_hidden(self) -> bool:
        """Whether it is one value, which is the hidden state then."""
        return len(self.live) == 1 and not self.shared

    def packed(self, values: Mapping[int, Any], written: Mapping[int, Mapping[Any, Any]]) -> Tensor:
        """Return what is wanted as one tensor. What carries no gradient, such as indices, waits
        here instead.
        """
        tree = (
            {number: values[number] for number in self.live},
            {id(mapping): written[id(mapping)] for mapping in self.shared},
        )
        leaves, self._structure = tree_flatten(tree)
        self.more = len(leaves) > 1
        self._leaves = [_TensorLayout.of(leaf) if _is_carried(leaf) else leaf for leaf in leaves]
        carried: list[Tensor] = list(filter(_is_carried, leaves))
        if len(carried) == 1:
            return carried[0]
        # the wider one holds all values exactly
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in carried))
        pieces: list[Tensor] = []
        for index, tensor in enumerate(carried):
            flat = (
                self._differentiated(index, tensor)
                .permute(_TensorLayout.of(tensor).order)
                .reshape(-1)
                .to(dtype)
            )
            pieces += [flat, flat.new_zeros(-len(flat) % ALIGNMENT)]
        return torch.cat(pieces)

    def unpacked(self, packed: Tensor) -> tuple[dict[int, Any], dict[int, dict[Any, Any]]]:
        """Return the values by number, and the new entries of each shared mapping, by its `id`."""
        layouts = [leaf for leaf in self._leaves if isinstance(leaf, _TensorLayout)]
        pieces = [packed]
        if len(layouts) > 1:
            counts = [prod(layout.shape) for layout in layouts]
            # and what follows each
            sizes = [size for count in counts for size in (count, -count % ALIGNMENT)]
            pieces = [
                layout.taken(flat)
                for layout, flat in zip(layouts, packed.split(sizes)[::2], strict=True)
            ]
            for index, piece in enumerate(pieces):
                if piece.requires_grad:
                    piece.register_hook(partial(self._note, index))
        piece_iterator = iter(pieces)
        leaves = [
            next(piece_iterator) if isinstance(leaf, _TensorLayout) else leaf
            for leaf in self._leaves
        ]
        state: tuple[dict[int, Any], dict[int, dict[Any, Any]]] = tree_unflatten(
            leaves, self._structure
        )
        return state

    def mapped(self, change: Callable[[Any], Any]) -> Between:
        """Return the same with every value that waits here changed."""
        clone = copy.copy(self)
        clone._change(change)
        return clone

    def _change(self, change: Callable[[Any], Any]) -> None:
        self._leaves = [change(leaf) for leaf in self._leaves]

    def _note(self, index: int, gradient: Tensor) -> None:
        self._strides[index] = gradient.stride()

    def _differentiated(self, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor whose gradient gets the strides it had above, because sums over others
        round otherwise.
        """
        if not tensor.requires_grad:
            return tensor
        same = tensor.view_as(tensor)

        def laid_out(gradient: Tensor) -> Tensor:
            strides = self._strides.get(index, gradient.stride())
            if gradient.stride() == strides:
                return gradient
            # along 0 values are equal
            once = gradient[tuple(slice(0, None if stride else 1) for stride in strides)]
            strided = torch.empty_strided(
                once.shape, strides, dtype=gradient.dtype, device=gradient.device
            )
            return strided.copy_(once).expand_as(gradient)

        same.register_hook(laid_out)
        return same


def _is_carried(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@contextmanager
def interface_replaced(
    interfaces: MutableMapping[str, Any], name: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Have one of `transformers`' tables of functions by name hold another in a `with` block."""
    before = interfaces[name]
    interfaces[name] = function
    try:
        yield
    finally:
        interfaces[name] = before


def changed(value: Tree, change: Callable[[Any], Any]) -> Tree:
    """Return a value with what `change` makes of it or else, in nested tuples, lists and
    dictionaries, of their items. What nothing is changed in is returned itself, because the model
    may know it again."""
    replacement: Tree = change(value)
    if replacement is not value or not isinstance(value, dict | list | tuple):
        return replacement
    items = list(value.values() if isinstance(value, dict) else value)
    new_items = [changed(item, change) for item in items]
    if all(new_item is item for new_item, item in zip(new_items, items, strict=True)):
        return value
    kind: Any = type(value)
    if isinstance(value, dict):
        changed_value: Any = dict(zip(value, new_items, strict=True))
    else:
        changed_value = kind(new_items) if kind in (list, tuple) else kind(*new_items)
    of_same_kind: Tree = changed_value
    return of_same_kind


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is cut off from its past, and asks for a gradient if it can
    have one.
    """
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def depends_on(outputs: Iterable[Tensor], sources: Iterable[Tensor]) -> bool:
    """Whether one of the tensors `outputs` is one of `sources`, or was computed from one with a
    graph.
    """
    sources = list(sources)
    leaves = [source for source in sources if source.requires_grad]
    for tensor in outputs:
        if any(tensor is source for source in sources):
            return True
        if tensor.requires_grad and leaves:
            with torch.enable_grad():
                gradients = torch.autograd.grad(
                    tensor.sum(), leaves, allow_unused=True, retain_graph=True
                )
            if any(gradient is not None for gradient in gradients):
                return True
    return False


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace the `forward` of modules, each of its own alone, in a `with` block; None: by that
    of its class.
    """

    def put(chosen: Mapping[nn.Module, Callable[..., Any] | None]) -> None:
        for module, forward in chosen.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward

    before = {module: vars(module).get("forward") for module in forwards}
    try:
        put(forwards)
        yield
    finally:
        put(before)


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


def draws(model: nn.Module) -> bool:
    """Whether a model may draw random numbers as it runs: whether a module that trains has a
    probability to drop something, or a strength of noise."""
    return any(
        (isinstance(module, _DropoutNd) and module.p > 0)
        or any(
            isinstance(value, int | float) and value > 0 and any(word in name for word in DRAWN)
            for name, value in vars(module).items()
        )
        for module in model.modules()
        if module.training
    )


def without_casts(layer: nn.Module) -> None:
    """Make the adapters of a layer that computes under autocast, or in fp32, use their input
    uncast. PEFT casts the input of an adapter to the adapter's fp32. Under autocast, where halves
    compute, that is cast back for the product, which keeps a copy of its own, so an input is kept
    as many times as it has adapters. Leaving both casts out changes no bit. They stay where a
    dropout, or another kind of adapter, computes in fp32 between them."""
    for part in layer.modules():
        if not isinstance(part, Linear) or part.lora_variant:
            continue
        if all(isinstance(dropout, nn.Identity) for dropout in part.lora_dropout.values()):
            part.cast_input_dtype_enabled = False


def alike(actual: Tensor, expected: Tensor) -> bool:
    """Whether logits are those expected but for the rounding of their dtype; without bytes,
    whether of their shape.
    """
    if actual.shape != expected.shape:
        return False
    if actual.is_meta or isinstance(actual, FakeTensor):
        return True
    # A matmul over fewer rows may add in another order, which half precision shows as a whole last
    # place.
    tolerance = 4 * torch.finfo(expected.dtype).eps
    usual = 2 * tolerance * float(expected.abs().median())
    return torch.allclose(actual, expected, rtol=max(1e-3, tolerance), atol=max(1e-3, usual))


def has_values(tensor: Tensor) -> bool:
    """Whether there is more to a tensor than its shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def stand_in(value: object, device: torch.device) -> object:
    """Return zeros, which a `device` need not compute, for a tensor without values; any other
    value as it is.
    """
    if not isinstance(value, Tensor) or has_values(value):
        return value
    return torch.zeros(value.shape, dtype=value.dtype).to(device)


@contextmanager
def replaced_tensors(model: nn.Module, substitute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a model's parameters and buffers be what `substitute` returns for them in a `with`
    block; tied ones stay one.
    """
    owned: list[tuple[Any, dict[str, Tensor | None]]]
    owned = [
        (registry, {**registry})
        for module in model.modules()
        for registry in (module._parameters, module._buffers)
    ]
    substitutes: dict[int, Tensor] = {}
    try:
        for registry, tensors in owned:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in substitutes:
                        substitutes[id(tensor)] = substitute(tensor)
                    registry[name] = substitutes[id(tensor)]
        yield
    finally:
        for registry, tensors in owned:
            # because what PEFT parametrizes comes back as a buffer, where it was a parameter
            registry.clear()
            registry.update(tensors)


@contextmanager
def without_values(model: nn.Module, submodule: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model's parameters and buffers have no values in a `with` block, and no tensor that is
    made there; what the model's own code leaves on its modules in the block is taken off again. The
    parameters on `meta` of its part `submodule` are given to each call, and stay; the others seem
    to be on `device`."""
    inside = {id(parameter) for parameter in submodule.parameters() if parameter.is_meta}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) in inside:
            return tensor
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )

    tracer = getLogger("torch._subclasses.fake_tensor")
    level = tracer.level
    tracer.setLevel(CRITICAL)  # what fails is raised, and need not be logged as well
    try:
        fake_contexts = (
            rehearsed(model.modules(), values=False),
            FakeTensorMode(allow_non_fake_inputs=True),
        )
        by = attention_without_values(model), tables_as_they_are(model)
        with by[0], by[1], fake_contexts[0], fake_contexts[1], replaced_tensors(model, like):
            yield
    finally:
        tracer.setLevel(level)


def past_layers(
    model: nn.Module, layers: nn.ModuleList, observe: Callable[[Callable[..., Any]], T | None]
) -> T | None:
    """Return what `observe` finds, given a function that runs the model's own forward without
    values and past its layers, which hand on what they are given: on a few token ids, or on the
    inputs it is called with. None: the forward does not run like that, or `observe` found nothing.
    """

    def run(**inputs: object) -> object:
        # Made here, where tensors have no values, because models look at the values of those that
        # have.
        few = torch.ones(1, FEW_TOKENS, dtype=torch.long)
        return model(**{"input_ids": few, "use_cache": False, **inputs})

    for extra_outputs in ((), (None,)):  # the other values of layers that return a tuple

        def passed(
            *args: object, extra_outputs: tuple[None, ...] = extra_outputs, **kwargs: object
        ) -> object:
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, *extra_outputs) if extra_outputs else hidden

        contexts = (
            without_values(model, layers, torch.device("cpu")),
            torch.random.fork_rng(devices=()),
            torch.no_grad(),
        )
        by = suppress(*PASSED_THROUGH_THE_MODEL), replaced(dict.fromkeys(layers, passed))
        with contexts[0], contexts[1], contexts[2], by[0], by[1]:
            if (observation := observe(run)) is not None:
                return observation
    return None


@contextmanager
def routed(router_logits: list[Tensor] | None) -> Iterator[None]:
    """Collect outputs of routers that run in a `with` block in `router_logits`, like
    `transformers`; None: not requested.
    """
    if router_logits is None:
        yield
        return
    recorded: dict[str, list[Tensor]] = {"router_logits": []}
    with collecting(recorded):
        yield
    # not added, because what failed may be attempted again
    router_logits[:] = recorded["router_logits"]


@contextmanager
def values_unread() -> Iterator[None]:
    """Have masks made whatever their values, in a `with` block. `transformers` leaves a mask out
    where it finds that nothing is masked, and asks the device for that in every forward, which on a
    lazy device costs a graph for each answer. It does not ask while something traces it; a lazy
    device traces too, but `transformers` does not know it."""
    module: Any = masking_utils
    before = module.is_tracing
    module.is_tracing = lambda _=None: True
    try:
        yield
    finally:
        module.is_tracing = before
