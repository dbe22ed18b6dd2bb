"""What all modules of a model keep from call to call: around its decoder layers, and inside of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lema.model.state.hooks import ModelHooks
from lema.model.state.layers import Journal, LayerStates
from lema.model.state.outer import OuterState
from lema.model.state.saved import from_json, to_json
from lema.model.state.snapshot import Snapshot

__all__ = ["Mark", "ModelState"]


class Mark:
    """A moment that a model's modules can go back to, as long as this exists."""

    def __init__(self, outer: Snapshot, journal: Journal) -> None:
        self.outer = outer
        self.journal = journal


class ModelState:
    """What the modules of a model keep.

    Args:
        model: the model.
        layers: its decoder layers.
        name: what these are called in it.

    Attributes:
        outer: what the modules around the layers keep.
        layers: what the modules inside of the layers keep.
        hooks: the hooks of the layers, and of the modules inside of them.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, name: str) -> None:
        self._model = model
        outer = OuterState(model, layers)
        self.outer = outer
        # without a circle, which would keep the weights
        self.layers = LayerStates(layers, name, lambda: outer.modules)
        self.hooks = ModelHooks(layers, name)

    def forget(self) -> None:
        """Look the modules up again, because adapters were attached or taken off."""
        self.outer.forget()
        self.layers.forget()
        self.hooks.forget()

    def mark(self) -> Mark:
        """Mark this moment. Where no module keeps anything that costs some comparisons of
        references.
        """
        return Mark(self.outer.now(), self.layers.journal())

    def put_back(self, mark: Mark) -> None:
        """Let the modules hold what they held at a moment."""
        self.layers.put_back(mark.journal)
        mark.outer.restore()

    def around(self) -> dict[str, Any]:
        """Return, as JSON types, what the modules around the layers hold that calls have changed.
        `ConfigError`: it cannot be told."""
        return self._as_json(self.outer.changed_names())

    def saved(self) -> dict[str, Any]:
        """Return, as JSON types, what the modules hold that calls have changed. `ConfigError`:
        it cannot be saved.
        """
        return self._as_json({**self.outer.changed_names(), **self.layers.changed_names()})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Let the modules hold what was saved. `KeyError`: there is none of a name."""
        self.outer.begin()
        around = set(self.outer.modules)
        for module, names in from_json(dict(self._model.named_modules()), saved).items():
            (self.outer if module in around else self.layers).restored(module, names)

    def _as_json(self, changed: Mapping[nn.Module, set[str]]) -> dict[str, Any]:
        return to_json(dict(self._model.named_modules()), changed) if changed else {}
