"""Hooks on modules, put there once however many ask for them, and taken off when the last one does without."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooked", "Hooks"]


@dataclass(frozen=True)
class Hooks:
    """What a module is to call: functions of a module of ours, so that a model with hooks can be copied and pickled.

    Attributes:
        before: called before `forward` with the module, its positional and its keyword arguments.
        after: called with these and the output, also where `forward` raised; None: nothing is.
        first: whether `before` comes before other hooks, so that `after` has its `before` also where one of those
            raises. Otherwise it comes last, and is given what `forward` will be given.
    """

    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
    after: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None] | None = None
    first: bool = False


class _Asked:
    """One module's hooks of one kind: how many ask for them, and how they are taken off."""

    def __init__(self, module: nn.Module, hooks: Hooks) -> None:
        _take_off_copies(module, hooks)
        self.count = 0
        self._handles = [module.register_forward_pre_hook(hooks.before, prepend=hooks.first, with_kwargs=True)]
        if hooks.after is not None:
            self._handles.append(module.register_forward_hook(hooks.after, with_kwargs=True, always_call=True))

    def take_off(self) -> None:
        for handle in self._handles:
            handle.remove()


_asked: WeakKeyDictionary[nn.Module, dict[Hooks, _Asked]] = WeakKeyDictionary()
_lock = threading.RLock()  # a garbage collector may let go of hooks while others are being put on


class Hooked:
    """The hooks that one owner asked for. They go when it is closed, or garbage-collected; it keeps no module alive."""

    def __init__(self) -> None:
        self._places: list[tuple[ref[nn.Module], Hooks]] = []
        self._forgotten = weakref.finalize(self, _take_off, self._places)
        self._forgotten.atexit = False

    def add(self, module: nn.Module, hooks: Hooks) -> None:
        """Have `module` call `hooks`."""
        with _lock:
            asked = _asked.setdefault(module, {})
            if hooks not in asked:
                asked[hooks] = _Asked(module, hooks)
            asked[hooks].count += 1
            self._places.append((ref(module), hooks))

    def close(self) -> None:
        """Ask for none any more. May be called twice."""
        _take_off(self._places)


def _take_off(places: list[tuple[ref[nn.Module], Hooks]]) -> None:
    with _lock:
        while places:
            where, hooks = places.pop()
            asked = None if (module := where()) is None else _asked.get(module)
            if asked is not None:
                asked[hooks].count -= 1
                if asked[hooks].count == 0:
                    asked.pop(hooks).take_off()


def _take_off_copies(module: nn.Module, hooks: Hooks) -> None:
    """Take off hooks that came with a copy of a hooked module, which nobody asked for."""
    for called, beside in (
        (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
        (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
    ):
        for number, hook in list(called.items()):
            if hook in (hooks.before, hooks.after):
                handle = RemovableHandle(called, extra_dict=beside)
                handle.id = number
                handle.remove()
