"""The hooks that others have registered on a model's modules: they see a call of the model once, as
on a whole model.

LEMA runs the model's own code more often than the whole model would: to learn from it, with
recorders in the layers' places, and again for the head. None of these runs is the model's call, so
hooks are put aside in them. Hooks of a decoder layer itself are called around its visit, in the
graph that the caller differentiates; the layer's own runs, and its recomputation, do not know them.
Modules inside a layer run again where it is recomputed, with the hooks that they had in the
forward.

Hooks that are a part of how the model computes, such as those that divide its work among processes,
are no others': every run of their module calls them (`part_of_model`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from lema.errors import ConfigError

__all__ = [
    "HookSnapshot",
    "LayerHooks",
    "ModelHooks",
    "aside",
    "hooks_of",
    "is_hooked",
    "part_of_model",
]

KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OPTIONS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# whose hooks stay for good, and do nothing but where they are asked
CAPTURING = "transformers.utils.output_capturing"
NAMES_OF_ROWS = "adapter_names"  # by which hooks of PEFT tell a module the adapter of each row


Hook = TypeVar("Hook", bound=Callable[..., Any])


def part_of_model(hook: Hook) -> Hook:
    """Mark a hook as a part of how its module computes, which each run of the module calls."""
    hook.part_of_model = True  # type: ignore[attr-defined] # functions take attributes
    return hook


def is_part(hook: object) -> bool:
    """Whether a hook is marked so."""
    return getattr(hook, "part_of_model", False)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that see it called."""
    # Written out, because this is asked before every run of a layer.
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks that somebody registered, and not only those of `transformers`
    and of the model.
    """
    if not has_hooks(module):
        return False
    hooks = (hook for kind in KINDS for hook in vars(module)[kind].values())
    return any(
        getattr(hook, "__module__", None) != CAPTURING and not is_part(hook) for hook in hooks
    )


def foreign_hooks(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return the hooks that are no part of the model, each with its key."""
    return [(key, hook) for key, hook in hooks.items() if not is_part(hook)]


class HookedCall(Protocol):
    """The call of a layer for one micro-batch, as its hooks see it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_is_keyword: bool

    @property
    def bare(self) -> bool:
        """Whether the layer is handed the hidden state alone, and hands on that alone."""

    def with_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Return the same call with other arguments."""


Call = TypeVar("Call", bound=HookedCall)


@contextmanager
def aside(modules: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
    """Have modules call no hooks but those of the model in a `with` block, or until the function
    that it yields is called."""
    saved = [
        (vars(module), kind, vars(module)[kind])
        for module in modules
        if has_hooks(module)
        for kind in KINDS
    ]

    def put_back() -> None:
        while saved:
            attributes, kind, hooks = saved.pop()
            attributes[kind] = hooks

    for attributes, kind, hooks in saved:
        attributes[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if is_part(hook))
    try:
        yield put_back
    finally:
        put_back()


@dataclass(frozen=True)
class HookSnapshot:
    """The hooks of some modules, as they were when this was made."""

    _saved: Sequence[tuple[dict[str, Any], str, OrderedDict[int, Any]]]

    def of_rows(self, rows: Sequence[int]) -> HookSnapshot:
        """Return the same for some rows of the batch: PEFT's, which name an adapter for each
        row, name theirs.
        """

        def cut(hook: object) -> object:
            if not isinstance(hook, partial):
                return hook
            names = hook.keywords.get(NAMES_OF_ROWS)
            if names is None:
                return hook
            return partial(
                hook.func,
                *hook.args,
                **{**hook.keywords, NAMES_OF_ROWS: [names[row] for row in rows]},
            )

        saved = [
            (owner, kind, OrderedDict((key, cut(hook)) for key, hook in hooks.items()))
            for owner, kind, hooks in self._saved
        ]
        return HookSnapshot(saved)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Let the modules have these hooks in a `with` block."""
        before = [(owner, kind, owner[kind]) for owner, kind, _ in self._saved]
        try:
            for owner, kind, hooks in self._saved:
                owner[kind] = hooks
            yield
        finally:
            for owner, kind, hooks in before:
                owner[kind] = hooks


def hooks_of(modules: Iterable[nn.Module]) -> HookSnapshot | None:
    """Return the hooks of some modules as they are now; None: there are none."""
    hooked = [vars(module) for module in modules if is_hooked(module)]
    return (
        HookSnapshot(
            [(owner, kind, owner[kind].copy()) for owner in hooked for kind in (*KINDS, *OPTIONS)]
        )
        if hooked
        else None
    )


@dataclass(eq=False)
class LayerHooks:
    """The hooks of one decoder layer around one visit, called as `nn.Module.__call__` calls them
    for every micro-batch.

    Args:
        layer: the layer.
        name: what it is called in the model.
        extra_outputs: what it returns after the hidden state; None: the hidden state is bare.
        frozen: whether nothing trains up to this layer, so that no gradient comes back to it.
    """

    layer: nn.Module
    name: str
    extra_outputs: tuple[Any, ...] | None
    frozen: bool
    # of each micro-batch
    _inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    _backward: list[BackwardHook] = field(default_factory=list)

    def before(
        self, calls: Sequence[Call], hidden: Sequence[Tensor]
    ) -> tuple[list[Call], tuple[Tensor, ...]]:
        """Call the hooks before the forward; return the calls and hidden states `[batch, sequence,
        hidden]` with which the layer is visited. `ConfigError`: it hands on more than that, or a
        hook is of a kind that torch gave up."""
        if any(isinstance(output, Tensor) for output in self.extra_outputs or ()) or not all(
            call.bare for call in calls
        ):
            raise self.refusal(
                "the layers of this model hand more than the hidden state to each other"
            )
        if self.layer._backward_hooks and not self.layer._is_full_backward_hook:
            raise self.refusal(
                "register_backward_hook sees only the last operation",
                "use register_full_backward_hook",
            )
        entered = [self._entered(call, state) for call, state in zip(calls, hidden, strict=True)]
        return [call for call, _ in entered], self._checked(state for _, state in entered)

    def after(self, hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the hooks after the forward, which made these hidden states; return what they
        make of them.
        """
        return self._checked(self._left(index, state) for index, state in enumerate(hidden))

    def refusal(
        self, why: str, how: str = "remove the hook, or register it on a module inside the layer"
    ) -> ConfigError:
        """Return the error of a hook that cannot be called as on a whole model."""
        return ConfigError(f"its hooks cannot be kept: {why}", where=self.name, how=how)

    def _checked(self, hidden: Iterable[Tensor]) -> tuple[Tensor, ...]:
        states = tuple(hidden)
        if self.frozen and any(state.requires_grad for state in states):
            how = "attach an adapter to this layer or to one below it"
            raise self.refusal(
                "one of them trains something below the lowest layer that has an adapter", how
            )
        return states

    def _entered(self, call: Call, state: Tensor) -> tuple[Call, Tensor]:
        layer = self.layer
        args = call.args
        kwargs = call.kwargs
        if call.hidden_is_keyword:
            kwargs = {"hidden_states": state, **kwargs}
        else:
            args = (state, *args)
        for key, hook in foreign_hooks(layer._forward_pre_hooks):
            if key in layer._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(layer, args, kwargs) or (args, kwargs)
            elif (new_args := hook(layer, args)) is not None:
                args = new_args if isinstance(new_args, tuple) else (new_args,)
        if layer._backward_hooks or layer._backward_pre_hooks:
            backward_hooks = (
                list(layer._backward_hooks.values()),
                list(layer._backward_pre_hooks.values()),
            )
            self._backward.append(BackwardHook(layer, *backward_hooks))
            args = self._backward[-1].setup_input_hook(args)
        self._inputs.append((args, kwargs))
        kwargs = dict(kwargs)
        first = kwargs.pop("hidden_states") if call.hidden_is_keyword else args[0]
        return call.with_arguments(args if call.hidden_is_keyword else args[1:], kwargs), first

    def _left(self, index: int, state: Tensor) -> Tensor:
        layer = self.layer
        output = state if self.extra_outputs is None else (state, *self.extra_outputs)
        args, kwargs = self._inputs[index]
        for key, hook in foreign_hooks(layer._forward_hooks):
            with_kwargs = key in layer._forward_hooks_with_kwargs
            new_output = (
                hook(layer, args, kwargs, output) if with_kwargs else hook(layer, args, output)
            )
            output = output if new_output is None else new_output
        if self._backward:
            output = self._backward[index].setup_output_hook(output)
        left: Tensor = output if isinstance(output, Tensor) else output[0]
        return left


class ModelHooks:
    """The hooks of a model's decoder layers, and of the modules inside of them.

    Args:
        layers: the model's decoder layers.
        name: what they are called in the model.
    """

    def __init__(self, layers: nn.ModuleList, name: str) -> None:
        self._layers = layers
        self._name = name
        self._inside: dict[int, list[nn.Module]] = {}

    def forget(self) -> None:
        """Look the modules up again, because adapters were attached or taken off."""
        self._inside.clear()

    def of(
        self, index: int, extra_outputs: tuple[Any, ...] | None = None, *, frozen: bool = False
    ) -> LayerHooks | None:
        """Return the hooks of a layer itself for one visit; None: it has none. The others are as
        in `LayerHooks`.
        """
        layer = self._layers[index]
        return (
            LayerHooks(layer, f"{self._name}.{index}", extra_outputs, frozen)
            if is_hooked(layer)
            else None
        )

    def inside(self, index: int) -> HookSnapshot | None:
        """Return the hooks of the modules inside a layer as they are now; None: there are none."""
        if index not in self._inside:
            self._inside[index] = [*self._layers[index].modules()][1:]
        return hooks_of(self._inside[index])

    def check_none(self) -> None:
        """Refuse hooks of layers where no caller has a graph that they could be in.
        `ConfigError`: there is one.
        """
        for index in range(len(self._layers)):
            if (hooks := self.of(index)) is not None:
                how = (
                    "remove the hook, or call the model of lema.streamed, whose layers call theirs"
                )
                raise hooks.refusal(
                    "LEMA's own training takes several micro-batches through a layer at once", how
                )
