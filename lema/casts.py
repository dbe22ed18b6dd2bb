"""Casts of adapters' inputs that change no bit: left out, with the copy of the input that each of them keeps.

PEFT casts what an adapter is given to the adapter's fp32. Under autocast, where halves compute, it is cast back for the
product, and the product keeps a copy of its own: as many copies of one input as it has adapters. Between the two casts
a dropout, or another kind of adapter than the plain one, computes in fp32; there they stay.
"""

from __future__ import annotations

from peft.tuners.lora.layer import Linear
from torch import nn

__all__ = ["without_casts"]


def without_casts(layer: nn.Module) -> None:
    """Have the adapters of a layer that computes under autocast, or in fp32, take their input as it is."""
    for part in layer.modules():
        if isinstance(part, Linear) and _hands_on(part):
            part.cast_input_dtype_enabled = False


def _hands_on(part: Linear) -> bool:
    """Whether all that an adapter does with its input is to multiply it by its A."""
    return not part.lora_variant and all(isinstance(one, nn.Identity) for one in part.lora_dropout.values())
