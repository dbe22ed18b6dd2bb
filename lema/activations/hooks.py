"""Where in a model's forward the calling thread is, as far as offloading cares.

Hooks on the model's modules say it to whatever context is open, and do nothing where none is. They
are the same for every context built on the model, are put on once however many ask for them, and
taken off when the last one is closed.
"""

import difflib
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lema.errors import ConfigError

__all__ = [
    "Hooked",
    "Hooks",
    "ModelHooks",
    "Scope",
    "current",
    "entered",
    "has_storage",
    "output_head",
    "wrapped",
]


@dataclass(frozen=True)
class Hooks:
    """What a module is to call: functions of a module of ours, so that a model with hooks can be
    copied and pickled.
    """

    # Called before `forward` with the module, its positional and its keyword arguments.
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
    # Called with these and the output, also where `forward` raised; None: nothing is.
    after: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None] | None = None
    # Whether `before` comes before other hooks, so that `after` has its `before` also where one of
    # those raises. Otherwise it comes last, and gets the arguments that `forward` will get.
    first: bool = False


# By module and kind of hooks: how many ask for them, and what takes them off.
_asked: WeakKeyDictionary[nn.Module, dict[Hooks, tuple[int, list[RemovableHandle]]]] = (
    WeakKeyDictionary()
)
_lock = threading.RLock()  # a garbage collector may remove hooks while others are being added


class Hooked:
    """The hooks of one owner. They are removed when it is closed or garbage-collected; it keeps
    no module alive.
    """

    def __init__(self) -> None:
        self._hooked_modules: list[tuple[ref[nn.Module], Hooks]] = []
        self._forgotten = weakref.finalize(self, _take_off, self._hooked_modules)
        self._forgotten.atexit = False

    def add(self, module: nn.Module, hooks: Hooks) -> None:
        """Have `module` call `hooks`."""
        with _lock:
            asked = _asked.setdefault(module, {})
            count, handles = asked[hooks] if hooks in asked else (0, _put_on(module, hooks))
            asked[hooks] = count + 1, handles
            self._hooked_modules.append((ref(module), hooks))

    def close(self) -> None:
        """Ask for none any more. May be called twice."""
        _take_off(self._hooked_modules)


def _take_off(hooked_modules: list[tuple[ref[nn.Module], Hooks]]) -> None:
    with _lock:
        while hooked_modules:
            where, hooks = hooked_modules.pop()
            asked = None if (module := where()) is None else _asked.get(module)
            if asked is not None:
                count, handles = asked.pop(hooks)
                if count > 1:
                    asked[hooks] = count - 1, handles
                    continue
                for handle in handles:
                    handle.remove()


def _put_on(module: nn.Module, hooks: Hooks) -> list[RemovableHandle]:
    _take_off_copies(module, hooks)
    handles = [
        module.register_forward_pre_hook(hooks.before, prepend=hooks.first, with_kwargs=True)
    ]
    if hooks.after is not None:
        handles.append(
            module.register_forward_hook(hooks.after, with_kwargs=True, always_call=True)
        )
    return handles


def _take_off_copies(module: nn.Module, hooks: Hooks) -> None:
    """Remove hooks that came with a copy of a hooked module, because they have no owner."""
    for called, extra_dicts in (
        (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
        (
            module._forward_hooks,
            [module._forward_hooks_with_kwargs, module._forward_hooks_always_called],
        ),
    ):
        for number, hook in list(called.items()):
            if hook in (hooks.before, hooks.after):
                handle = RemovableHandle(called, extra_dict=extra_dicts)
                handle.id = number
                handle.remove()


@dataclass
class Scope:
    """What one open context knows of the forward that runs in it."""

    # excluded modules, and regions opted out of, that are being run, one in the other
    excluded: int = 0
    # The output head has been entered: what is saved from here to the model's next forward is the
    # loss's.
    past_head: bool = False
    # The inputs of decoder layers that are being run, and how often: by `id`, because on some
    # devices a tensor has no storage, and by the `_cdata` of the storage where there is one.
    layer_inputs: Counter[tuple[str, int]] = field(default_factory=Counter)
    # The modules with weights that are being run, the innermost last, and how many tensors each has
    # saved so far.
    modules: list[tuple[nn.Module, list[int]]] = field(default_factory=list)

    def reset(self) -> None:
        """Be at the beginning again, whatever ended the last forward."""
        self.excluded = 0
        self.past_head = False
        self.layer_inputs.clear()
        self.modules.clear()

    def begin_forward(self) -> None:
        """Begin the model's forward: what is saved from here on is not the loss's."""
        self.past_head = False

    def enter_head(self) -> None:
        """Begin the output head: what is saved from here on is the loss's."""
        self.past_head = True

    def exclude(self) -> None:
        """Enter an excluded module, or a region opted out of."""
        self.excluded += 1

    def include(self) -> None:
        """Leave the last one that was entered."""
        self.excluded = max(0, self.excluded - 1)  # a reset may have come in between

    def mark(self, state: object) -> None:
        """Let `state` be a layer's input until `unmark`."""
        if isinstance(state, Tensor):
            self.layer_inputs.update(_marks(state))

    def unmark(self, state: object) -> None:
        """Unmark `state`; do nothing if it was never marked, or if `reset` has forgotten it."""
        if isinstance(state, Tensor):
            self.layer_inputs -= Counter(_marks(state))


def _marks(state: Tensor) -> list[tuple[str, int]]:
    storage = [("storage", state.untyped_storage()._cdata)] if has_storage(state) else []
    return [("value", id(state)), *storage]


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be pointed at; on lazy devices it cannot."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False
    return address != 0 or tensor.numel() == 0 or tensor.is_meta


# its `scopes` are those of the contexts that are open in a thread, the innermost last
_open = threading.local()


def current() -> Scope | None:
    """Return the scope of the innermost context that is open in this thread; None: none is."""
    scopes = getattr(_open, "scopes", None)
    return scopes[-1] if scopes else None


def in_forward() -> Scope | None:
    """Return the scope that a hook speaks to; None: no context is open, or the module is being
    compiled, not run.
    """
    return None if torch.compiler.is_compiling() else current()


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Let `scope` be the current one in a `with` block."""
    scopes = _open.__dict__.setdefault("scopes", [])
    scopes.append(scope)
    try:
        yield
    finally:
        scopes.pop()


# Where models have their heads, in the order in which they are looked for. A head that is no module
# calls one of its own. Where there is nothing but the last norm, the head follows it.
HEADS = (
    "output",
    "output.linear",
    "lm_head",
    "decoder.output",
    "decoder.lm_head",
    "final_layer_norm",
    "ln_f",
    "head",
)

UNTOUCHED = "liger"  # modules with this in their names keep what they save, for their own kernels
# parts of names that users do not write
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


class ModelHooks:
    """The hooks of one context on a model as the user has it: wrapped or not, adapted or not.
    `exclude` names further modules whose saved tensors stay: ends of their dotted names, or regular
    expressions that match the whole of them. `ConfigError`: nothing matches one of these, or it is
    no regular expression."""

    def __init__(
        self, model: nn.Module, *, exclude: Sequence[str] = (), warn_if_no_head: bool = True
    ) -> None:
        levels = wrapped(model)
        excluded = [
            *_untouched(model),
            *_matching(levels, (exclude,) if isinstance(exclude, str) else exclude),
        ]
        head = output_head(model)
        self.head = head is not None  # whether there is one
        self._hooked = Hooked()
        for level in levels:
            self._hooked.add(level, BEGINNING)
        if head is not None:
            self._hooked.add(head, HEAD)
        elif warn_if_no_head:
            warnings.warn(
                f"no output head was found in {type(levels[-1]).__name__}, so what its "
                "head and its loss save, as wide "
                "as the vocabulary, is moved as well. Exclude the head by its name "
                "(exclude_modules), or compute the "
                "loss outside; warn_if_no_head=False says that this is meant",
                stacklevel=3,
            )
        # By identity, because two patterns may match one module, which would then be entered twice
        # and left once.
        for module in {id(module): module for module in excluded}.values():
            self._hooked.add(module, EXCLUDED)
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._hooked.add(module, WITH_WEIGHTS)

    def close(self) -> None:
        """Remove the hooks that no other owner uses. May be called twice."""
        self._hooked.close()


def wrapped(model: nn.Module) -> list[nn.Module]:
    """Return `model` and what is in its wrappers, one in the other, the bare model last."""
    levels = [model]
    while True:
        for inner in _inner(levels[-1]):
            if isinstance(inner, nn.Module) and inner not in levels:
                levels.append(inner)
                break
        else:
            return levels


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes logits from hidden states, by the name it has; None: there
    is none.
    """
    for level in reversed(wrapped(model)):
        get = getattr(level, "get_output_embeddings", None)
        for head in (None if get is None else get(), *(_at(level, path) for path in HEADS)):
            # A head that is its model's embedding is not called as a head.
            if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding):
                return head
    return None


def _inner(model: nn.Module) -> Iterator[Any]:
    """Yield what `model` may be a wrapper of: of replicas, of a compiled model, of adapters."""
    for name in ("module", "_orig_mod"):
        yield getattr(model, name, None)
    if callable(get := getattr(model, "get_base_model", None)):
        yield get()
    elif hasattr(model, "peft_config"):
        # bare models have a property of that name, which is something else
        yield model._modules.get("base_model")


def _at(model: nn.Module, path: str) -> object:
    value: object = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _untouched(model: nn.Module) -> list[nn.Module]:
    """Return the modules of kernels that keep what they save; a block that contains other
    modules is no kernel.
    """
    return [
        module
        for name, module in model.named_modules()
        if UNTOUCHED in name.rpartition(".")[2].lower()
        or (UNTOUCHED in type(module).__name__.lower() and next(module.children(), None) is None)
    ]


def _matching(levels: Sequence[nn.Module], patterns: Sequence[str]) -> Iterator[nn.Module]:
    # Users know the names of the model as it was before it was wrapped, or adapted.
    named = [
        (_plain(name), module) for level in levels for name, module in level.named_modules() if name
    ]
    for pattern in patterns:
        modules = [module for name, module in named if f".{name}".endswith(f".{pattern}")]
        if not modules:
            try:
                expression = re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{pattern!r} ends no module's name, and is no regular expression: {error}",
                    where="exclude_modules",
                ) from error
            modules = [module for name, module in named if expression.fullmatch(name)]
        if not modules:
            names = {
                candidate for name, _ in named for candidate in (name, name.rpartition(".")[2])
            }
            close = ", ".join(difflib.get_close_matches(pattern, sorted(names), n=3))
            how = (
                f"close names are: {close}"
                if close
                else "give the end of a module's name, or a pattern"
            )
            raise ConfigError(f"no module matches {pattern!r}", where="exclude_modules", how=how)
        yield from modules


def _plain(name: str) -> str:
    return reduce(lambda text, part: text.replace(part, ""), WRAPPERS, f"{name}.").removesuffix(".")


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if (scope := in_forward()) is not None:
        scope.begin_forward()


def _enter_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if (scope := in_forward()) is not None:
        scope.enter_head()


def _exclude(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if (scope := in_forward()) is not None:
        scope.exclude()


def _include(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:  # noqa: ARG001 - a hook
    if (scope := in_forward()) is not None:
        scope.include()


def _enter_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if (scope := in_forward()) is not None:
        scope.modules.append((module, [0]))


def _leave_weights(
    module: nn.Module,
    args: tuple[Any, ...],  # noqa: ARG001 - a hook
    kwargs: dict[str, Any],  # noqa: ARG001 - a hook
    out: object,  # noqa: ARG001 - a hook
) -> None:
    if (scope := in_forward()) is not None and scope.modules and scope.modules[-1][0] is module:
        scope.modules.pop()


BEGINNING = Hooks(_begin)
HEAD = Hooks(_enter_head)
EXCLUDED = Hooks(_exclude, _include, first=True)
WITH_WEIGHTS = Hooks(_enter_weights, _leave_weights, first=True)
