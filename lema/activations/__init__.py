"""Activations between the forward and the backward: where they wait off the device, and how they
come back in time.

A model of `transformers` or PEFT that is trained as a whole uses the public contexts, which move
whatever autograd saves: `get_lora_act_offloading_ctx_manager`, `OffloadActivations`, and for
trainers `ActivationOffloadingMixin`. A streamed model keeps the inputs of its layers
(`lema.activations.stepstore`) and moves the rest with the same parts.

docs/internals/activations.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.activations.context import (
        NoOpManager,
        OffloadActivations,
        get_lora_act_offloading_ctx_manager,
    )
    from lema.activations.mixin import ActivationOffloadingMixin

__all__ = [
    "ActivationOffloadingMixin",
    "NoOpManager",
    "OffloadActivations",
    "get_lora_act_offloading_ctx_manager",
]

__getattr__, __dir__ = lazy_exports(
    __name__, {**dict.fromkeys(__all__, "context"), "ActivationOffloadingMixin": "mixin"}
)
