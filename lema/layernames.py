"""The names of a layer's weights: what each is called on disk, and in the layer now that adapters wrap its modules."""

from __future__ import annotations

import re
from collections.abc import Mapping

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

__all__ = ["LayerNames", "stored_name"]

WRAPPED = re.compile(r"\.(base_layer|original_module)\b")  # where an adapter keeps the module it wraps


def stored_name(name: str) -> str:
    """Return what a parameter of a layer is called where it is stored, given its name with adapters attached."""
    return WRAPPED.sub("", name)


class LayerNames:
    """The names in one layer, as its modules are now.

    Args:
        layer: adapters attached or not. A parameter that trains is its own; what is leased in its place is left out.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameters = {name: name if one.is_meta else None for name, one in layer.named_parameters()}
        owned = parameters | {name: name for name, _ in layer.named_buffers()}
        self._now = {stored_name(name): now for name, now in owned.items()}
        wrappers = [(name, part) for name, part in layer.named_modules() if isinstance(part, ParamWrapper)]
        self._set_in_place = {stored_name(f"{name}.{part.parameter_name}") for name, part in wrappers}

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name weights as the layer does now: an adapter moves those of the modules it wraps."""
        return {
            # An adapted parameter is set to itself when PEFT parametrizes it. `data` counts its changes by itself: else
            # this would be taken for a change of every weight in the slot.
            now: tensor.data if name in self._set_in_place else tensor
            for name, tensor in weights.items()
            if (now := self._now[name]) is not None
        }
