"""Where in a model's forward the calling thread is, as far as offloading cares.

Hooks on a model's modules say it, and know nothing of who offloads: they are the same for every context built on the
model, and do nothing where none is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Scope", "current", "entered"]


@dataclass
class Scope:
    """What one open context knows of the forward that runs in it.

    Attributes:
        excluded: excluded modules, and regions opted out of, that are being run, one in the other.
        past_head: the output head has been entered: what is saved from here to the model's next forward is the loss's.
        layer_inputs: storages of the inputs of decoder layers that are being run, `_cdata` to how often.
        modules: the modules with weights that are being run, the innermost last, each with how many tensors have been
            saved in it so far.
    """

    excluded: int = 0
    past_head: bool = False
    layer_inputs: dict[int, int] = field(default_factory=dict)
    modules: list[tuple[nn.Module, list[int]]] = field(default_factory=list)

    def reset(self) -> None:
        """Be at the beginning again, whatever ended the last forward."""
        self.excluded, self.past_head = 0, False
        self.layer_inputs.clear()
        self.modules.clear()

    def mark(self, state: Any) -> None:
        """Let `state` be a layer's input until `unmark`."""
        if isinstance(state, Tensor):
            key = state.untyped_storage()._cdata
            self.layer_inputs[key] = self.layer_inputs.get(key, 0) + 1

    def unmark(self, state: Any) -> None:
        """Let `state` be nothing special again; one that was never marked, or forgotten by `reset`, is none already."""
        if isinstance(state, Tensor):
            key = state.untyped_storage()._cdata
            left = self.layer_inputs.pop(key, 1) - 1
            if left > 0:
                self.layer_inputs[key] = left


class _Open(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


_open = _Open()


def current() -> Scope | None:
    """Return the scope of the innermost context that is open in this thread; None: none is."""
    return _open.scopes[-1] if _open.scopes else None


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Let `scope` be the current one in a `with` block."""
    _open.scopes.append(scope)
    try:
        yield
    finally:
        _open.scopes.pop()
