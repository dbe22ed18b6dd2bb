"""The inputs of decoder layers: marked while their layers run, and found where
`torch.utils.checkpoint` saves them.

A checkpoint saves its positional tensors, and holds tensors passed by keyword on the device. So an
input that comes by keyword is handed to it by position.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from lema.activations.hooks import Hooked, Hooks, current, in_forward
from lema.activations.protocols import StayReason

__all__ = ["LayerInputs", "only_layer_inputs", "only_layer_values"]

INPUT = "hidden_states"
WRAPPED = "_checkpoint_wrapped_module"  # what a module that checkpoints another calls it


class LayerInputs:
    """The decoder layers of a model, for a context that is opened again and again. It does not
    keep the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._hooked = Hooked()
        self._layers = WeakSet[nn.Module]()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Mark the inputs of layers in a `with` block. Checkpointing may have been turned on or
        off since the last.
        """
        checkpoints = _Checkpoints()
        try:
            if (model := self._model()) is not None:
                # Hooks stay on: a compiled model is compiled again wherever it finds other hooks
                # than the last time.
                for layer in decoder_layers(model):
                    if layer not in self._layers:
                        self._layers.add(layer)
                        self._hooked.add(layer, LAYER)
                checkpoints.wrap(model)
                del model
            yield
        finally:
            checkpoints.unwrap()

    def close(self) -> None:
        """Remove the hooks that no other owner uses. May be called twice; it may be opened
        again.
        """
        self._hooked.close()
        self._layers.clear()


def only_layer_inputs(tensor: Tensor) -> StayReason | None:
    """The choice of what shares its memory with the input of a decoder layer that is being run,
    and nothing else.
    """
    scope = current()
    marked = (
        scope is not None and ("storage", tensor.untyped_storage()._cdata) in scope.layer_inputs
    )
    return None if marked else StayReason.UNCHOSEN


def only_layer_values(tensor: Tensor) -> StayReason | None:
    """The same choice on a device whose tensors have no storage: by the tensors themselves."""
    if torch._C._current_graph_task_id() != -1:
        return StayReason.BACKWARD  # a recomputation, whose saved tensors are used at once
    scope = current()
    if scope is not None and scope.excluded:
        return StayReason.EXCLUDED
    return (
        None
        if scope is not None and ("value", id(tensor)) in scope.layer_inputs
        else StayReason.UNCHOSEN
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that can be checkpointed each by itself: layers, by their class or by a
    wrapper around them. Without such classes, the layers are the modules of the longest list that
    is in no other list."""
    # not imported: no module is of its classes
    modeling = sys.modules.get("transformers.modeling_layers")
    kind = getattr(modeling, "GradientCheckpointingLayer", ())

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, kind) or hasattr(module, WRAPPED)

    if layers := list(_outermost(model, is_layer)):
        return layers
    lists = list(_outermost(model, lambda module: isinstance(module, nn.ModuleList)))
    return (
        list(max(lists, key=lambda module_list: sum(1 for _ in module_list.children())).children())
        if lists
        else []
    )


def _outermost(model: nn.Module, predicate: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    if predicate(model):
        yield model
    else:
        for child in model.children():
            yield from _outermost(child, predicate)


# how many contexts are open on each
_wrapped: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_lock = threading.RLock()


class _Checkpoints:
    """The functions by which modules checkpoint, wrapped in one that marks what these are about
    to save.
    """

    def __init__(self) -> None:
        self._checkpoint_attributes: list[tuple[ref[nn.Module], str]] = []

    def wrap(self, model: nn.Module) -> None:
        with _lock:
            for module in model.modules():
                name = (
                    "checkpoint_fn" if hasattr(module, WRAPPED) else "_gradient_checkpointing_func"
                )
                if (checkpoint := vars(module).get(name)) is not None:
                    # it may have been replaced since another context wrapped it
                    if not _is_marking(checkpoint):
                        setattr(module, name, partial(_marking, checkpoint))
                    _wrapped[module] = _wrapped.get(module, 0) + 1
                    self._checkpoint_attributes.append((ref(module), name))

    def unwrap(self) -> None:
        with _lock:
            while self._checkpoint_attributes:
                where, name = self._checkpoint_attributes.pop()
                if (module := where()) is None:
                    continue
                left = _wrapped.pop(module) - 1
                if left > 0:
                    _wrapped[module] = left
                    continue
                checkpoint: object = vars(module).get(name)
                if _is_marking(checkpoint):  # it may have been replaced meanwhile
                    setattr(module, name, checkpoint.args[0])


def _is_marking(checkpoint: object) -> TypeGuard[partial[Any]]:
    return isinstance(checkpoint, partial) and checkpoint.func is _marking


def _marking(
    checkpoint: Callable[..., Any], run: Callable[..., Any], *args: object, **kwargs: object
) -> object:
    """Call `checkpoint(run, *args, **kwargs)`, the layer's input among `args` and marked."""
    if torch.compiler.is_compiling():
        return checkpoint(run, *args, **kwargs)
    if isinstance(kwargs.get(INPUT), Tensor):
        run = partial(_with_input, run)
        args = (kwargs.pop(INPUT), *args)
    elif isinstance(run, partial) and isinstance(run.keywords.get(INPUT), Tensor):
        keywords = {name: value for name, value in run.keywords.items() if name != INPUT}
        args = (run.keywords[INPUT], *args)
        run = partial(_with_input, partial(run.func, *run.args, **keywords))
    scope = current()
    state = _input_of(args, {})
    if scope is None:
        return checkpoint(run, *args, **kwargs)
    scope.mark(state)
    try:
        return checkpoint(run, *args, **kwargs)
    finally:
        scope.unmark(state)


def _with_input(run: Callable[..., Any], state: Tensor, *args: object, **kwargs: object) -> object:
    return run(*args, **{INPUT: state}, **kwargs)


def _input_of(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return a layer's input among its arguments; None: there is none."""
    return next((value for value in args if isinstance(value, Tensor)), kwargs.get(INPUT))


def _enter_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if (scope := in_forward()) is not None:
        scope.mark(_input_of(args, kwargs))


def _leave_layer(
    module: nn.Module,  # noqa: ARG001 - a hook
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: object,  # noqa: ARG001 - a hook
) -> None:
    if (scope := in_forward()) is not None:
        scope.unmark(_input_of(args, kwargs))


LAYER = Hooks(_enter_layer, _leave_layer)
