"""Decoder layers compiled with `torch.compile`, one compilation for all layers that are alike.

The first layer of each kind is the template. It is called with every tensor of the current layer in
place of its own: leased weights, adapters, buffers. So one graph serves all layers, and gradients
reach the right adapters.

A compiled layer is tried before it is trusted: every shape that is new to a kind is run once next
to the training, forward and backward. A layer that cannot be compiled, or that draws random
numbers, runs uncompiled, with a warning.

What is compiled is kept below the user's cache directory, so that a later start only reads it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from lema.backend import Backend
from lema.errors import DiskError, LemaError
from lema.model.capture import replaced, tensors_in
from lema.model.layers.kinds import Attribute, compare_layers
from lema.model.state.snapshot import rehearsed
from lema.model.weight_names import adapted_by_parameter, restored_parameters
from lema.storage.diskspace import make_private, user_cache

__all__ = ["CompiledLayers"]

COMPILER = "inductor"  # torch's own name of it
# the variable for the directory of its code; default: a temporary one
CACHE = "TORCHINDUCTOR_CACHE_DIR"
LONGEST_REASON = 300  # characters

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
LayerOutput = Tensor | tuple[Any, ...]


class _NotCompiled(Exception):
    """The reason why a layer runs uncompiled."""


@dataclass(frozen=True)
class _Template:
    """The first layer of a kind, through whose compiled forward all layers of the kind go."""

    module: nn.Module
    index: int  # of that layer
    adapted: Sequence[nn.Module]  # those in it of which a parameter is adapted by itself
    forward: Callable[..., Any]  # its own, compiled
    tried: set[Any] = field(default_factory=set)  # what calls were tried with


class _Member:
    """One layer, as it is put into the template of its kind.

    Args:
        layer: the layer.
        template: the first layer of its kind.
        labels: attributes in which layers of one kind differ.

    Attributes:
        modules: those in the layer, itself among them.
        labels: the attributes that say which layer it is.
    """

    def __init__(
        self, layer: nn.Module, template: nn.Module, labels: Collection[Attribute]
    ) -> None:
        self.modules = list(layer.modules())
        self._hooks = [
            getattr(part, hook_attribute) for part in self.modules for hook_attribute in HOOKS
        ]
        # Where the layer keeps its own tensors: their names, and the object and key under which
        # they are stored.
        self._tensors = [
            (f"{path}.{key}" if path else key, registry, key)
            for path, part in layer.named_modules()
            for registry in (part._parameters, part._buffers)
            for key, tensor in registry.items()
            if tensor is not None and not tensor.is_meta
        ]
        self.labels = list(_labels(layer, template, labels))

    @property
    def hooked(self) -> bool:
        """Whether a module has a hook."""
        return any(self._hooks)

    @property
    def modes(self) -> list[bool]:
        """Which of its modules train."""
        return [module.training for module in self.modules]

    def tensors(self) -> dict[str, Tensor]:
        """Return its own tensors, by name."""
        return {
            name: tensor
            for name, registry, key in self._tensors
            if (tensor := registry[key]) is not None
        }


class CompiledLayers:
    """The layers of one model, each called through the compiled template of its kind. `layers`: the
    model's decoder layers, adapters attached. Make another after changing one. `compilations`: how
    many graphs there are."""

    def __init__(self, layers: Sequence[nn.Module], name: str, backend: Backend) -> None:
        _keep_what_is_made()
        self._layers = layers
        self._name = name
        self._backend = backend
        self.kinds, labels = compare_layers(layers, name)
        self.compilations = 0
        self._runs = 0  # of compiled graphs
        firsts = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        self._templates = [
            _Template(
                layers[first],
                first,
                adapted_by_parameter(layers[first]),
                _separate(layers[first], self._compile),
            )
            for first in firsts
        ]
        self._members = [
            _Member(layer, layers[firsts[kind]], labels)
            for layer, kind in zip(layers, self.kinds, strict=True)
        ]
        self._refused: dict[tuple[int, bool], str] = {}  # by kind, and whether it trains
        self._warned: set[Any] = set()

    def compiles(self, index: int) -> bool:
        """Whether a layer is called compiled, as far as is known; where it is not, that is said
        in a warning, once.
        """
        why = self._unfit(index)
        if why is not None:
            self._warn(index, why)
        return why is None

    def call(self, index: int, tensors: Mapping[str, Tensor], args: Args, kwargs: Kwargs) -> Any:
        """Call a layer compiled, with leased weights by their names in the layer and a hidden state
        that is differentiated where there is a graph. Returns what the layer does, or, after a
        warning, `NotImplemented`."""
        if not self.compiles(index):
            return NotImplemented
        kind = self.kinds[index]
        training = self._layers[index].training
        all_tensors = self._members[index].tensors() | dict(tensors)
        seen = (_signature((args, kwargs)), torch.is_grad_enabled(), training)
        tried = self._templates[kind].tried
        if seen not in tried:
            try:
                self._try(index, all_tensors, args, kwargs)
            except _NotCompiled as error:
                self._refused[kind, training] = str(error)
                self.compiles(index)  # asked because that warns of the refusal
                return NotImplemented
            tried.add(seen)
        runs = self._runs
        out = self._run(index, all_tensors, args, kwargs)
        if self._runs == runs:
            self._warn(
                index, "torch.compile failed on it, perhaps because it uses the number of the layer"
            )
        return out

    def _unfit(self, index: int) -> str | None:
        """Return why a layer is not called compiled."""
        layer = self._members[index]
        first = self._members[self._templates[self.kinds[index]].index]
        if layer.hooked:
            return "a module in it has a hook"
        if any("forward" in vars(part) for part in layer.modules[1:]):
            return "the rows of an embedding in it are read one by one"
        if first.hooked:
            return "a module of the compiled layer has a hook"
        if layer.modes != first.modes:
            return (
                "some of its modules are in training mode and some are not, unlike the "
                "compiled layer"
            )
        return self._refused.get((self.kinds[index], self._layers[index].training))

    def _warn(self, index: int, why: str) -> None:
        """Say once of every kind and reason that a layer is not compiled."""
        if (warning := (self.kinds[index], why)) in self._warned:
            return
        self._warned.add(warning)
        num_same_kind = self.kinds.count(self.kinds[index]) - 1
        alike = (
            f", like the {num_same_kind} of its kind"
            if num_same_kind and why in self._refused.values()
            else ""
        )
        warnings.warn(f"{self._name}.{index} is not compiled{alike}: {why}", stacklevel=2)

    def _try(self, index: int, tensors: Mapping[str, Tensor], args: Args, kwargs: Kwargs) -> None:
        """Run a layer once, outside the training and without effects; later calls use the code
        compiled here. `_NotCompiled`: it cannot be compiled, or draws random numbers."""
        state = self._backend.rng_state()
        compilations = self.compilations
        runs = self._runs
        args, kwargs = tree_map_only(
            Tensor,
            lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
            (args, kwargs),
        )
        changed_names: set[str] = set()
        hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        try:
            with hooks, rehearsed(self._templates[self.kinds[index]].module.modules()) as before:
                out = self._run(index, tensors, args, kwargs)
                changed_names = {name for names in before.changed().values() for name in names}
                outputs = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
                inputs = [
                    tensor
                    for tensor in (*tensors_in((args, kwargs)), *tensors.values())
                    if tensor.requires_grad
                ]
                if (
                    torch.is_grad_enabled()
                    and self.compilations > compilations
                    and outputs
                    and inputs
                ):
                    torch.autograd.grad(
                        outputs,
                        inputs,
                        [torch.zeros_like(output) for output in outputs],
                        allow_unused=True,
                    )
        # Any error at all, because a compiler fails in as many ways as it has parts.
        except Exception as error:
            if isinstance(error, (LemaError, MemoryError)) or "out of memory" in str(error).lower():
                raise
            raise _NotCompiled(
                textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST_REASON)
            ) from error
        finally:
            drawn = not torch.equal(state, self._backend.rng_state())
            self._backend.set_rng_state(state)
        if drawn:
            raise _NotCompiled("it draws random numbers, and a compiled layer might draw others")
        if changed_names:
            raise _NotCompiled(
                f"it keeps {', '.join(sorted(changed_names))} from call to call, which "
                "would be another layer's"
            )
        if self._runs == runs:
            raise _NotCompiled("torch.compile did not compile any of it")

    def _run(
        self, index: int, tensors: Mapping[str, Tensor], args: Args, kwargs: Kwargs
    ) -> LayerOutput:
        template = self._templates[self.kinds[index]]
        # The tensors are put into the template before what is compiled begins. There, it would be
        # looked at whether they are its own, and a graph made for each answer.
        forward = replaced({template.module: template.forward})
        parameters = restored_parameters(template.adapted)
        with forward, parameters, _labelled(self._members[index].labels):
            output: LayerOutput = torch.func.functional_call(
                template.module, dict(tensors), args, kwargs, tie_weights=False
            )
            return output

    def _compile(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile one graph, as `torch.compile` asks of a backend; count it, and its runs."""
        from torch._dynamo import lookup_backend  # seconds to import

        compiled = lookup_backend(COMPILER)(graph, list(inputs))
        self.compilations += 1

        def run(*inputs: Tensor) -> object:
            self._runs += 1
            return compiled(*inputs)

        return run


def _keep_what_is_made() -> None:
    """Make the compiler keep its code where the next start finds it, unless the environment
    names a directory.
    """
    # as importing torch has set it
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(CACHE, default_cache_dir()) != default_cache_dir():
        return
    folder = user_cache("compiled")
    try:
        make_private(folder)  # because it holds code
    except DiskError as error:
        warnings.warn(f"compiled code is not kept for later starts: {error}", stacklevel=2)
        os.environ[CACHE] = tempfile.mkdtemp(prefix="lema-compiled-")
        atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
    else:
        os.environ[CACHE] = str(folder)


def _separate(template: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a template's own forward, compiled, with a cache of its own: torch keeps one for
    each code object.
    """

    def forward(*args: object, **kwargs: object) -> object:
        return type(template).forward(template, *args, **kwargs)

    function = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__
    )
    return torch.compile(function, backend=backend)


def _labels(
    layer: nn.Module, template: nn.Module, labels: Collection[Attribute]
) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Yield the attributes that say which layer a layer is: the module in its template, its own,
    and the name.
    """
    if layer is template:
        return
    parts = dict(layer.named_modules())
    template_modules = dict(template.named_modules())
    for module, name in labels:
        if module in parts and name in vars(parts[module]):
            yield template_modules[module], parts[module], name


@contextmanager
def _labelled(labels: Sequence[tuple[nn.Module, nn.Module, str]]) -> Iterator[None]:
    """Let a template have a layer's number in the `with` block; where it is computed with, a
    graph is made for it.
    """
    saved = [vars(part)[name] for part, _, name in labels]
    try:
        for part, source, name in labels:
            vars(part)[name] = vars(source)[name]
        yield
    finally:
        for (part, _, name), value in zip(labels, saved, strict=True):
            vars(part)[name] = value


def _signature(value: object) -> object:
    """Return what of a call's arguments a compiled graph may be made for."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(nested)) for key, nested in value.items())
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value)
