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

__all__ = ["Scope", "current", "entered", "has_storage"]


@dataclass
class Scope:
    """What one open context knows of the forward that runs in it.

    Attributes:
        excluded: excluded modules, and regions opted out of, that are being run, one in the other.
        past_head: the output head has been entered: what is saved from here to the model's next forward is the loss's.
        layer_inputs: storages of the inputs of decoder layers that are being run, `_cdata` to how often.
        layer_values: likewise these inputs themselves, by `id`: on some devices a tensor has no storage.
        modules: the modules with weights that are being run, the innermost last, each with how many tensors have been
            saved in it so far.
    """

    excluded: int = 0
    past_head: bool = False
    layer_inputs: dict[int, int] = field(default_factory=dict)
    layer_values: dict[int, int] = field(default_factory=dict)
    modules: list[tuple[nn.Module, list[int]]] = field(default_factory=list)

    def reset(self) -> None:
        """Be at the beginning again, whatever ended the last forward."""
        self.excluded, self.past_head = 0, False
        self.layer_inputs.clear()
        self.layer_values.clear()
        self.modules.clear()

    def mark(self, state: Any) -> None:
        """Let `state` be a layer's input until `unmark`."""
        if isinstance(state, Tensor):
            for marked, key in self._places(state):
                marked[key] = marked.get(key, 0) + 1

    def unmark(self, state: Any) -> None:
        """Let `state` be nothing special again; one that was never marked, or forgotten by `reset`, is none already."""
        if isinstance(state, Tensor):
            for marked, key in self._places(state):
                left = marked.pop(key, 1) - 1
                if left > 0:
                    marked[key] = left

    def _places(self, state: Tensor) -> Iterator[tuple[dict[int, int], int]]:
        yield self.layer_values, id(state)
        if has_storage(state):
            yield self.layer_inputs, state.untyped_storage()._cdata


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be pointed at; on lazy devices it cannot."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False
    return address != 0 or tensor.numel() == 0 or tensor.is_meta


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
