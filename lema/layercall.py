"""How one layer was called: everything but the hidden state, and what layers hand on beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["HandedOn", "LayerCall"]


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
