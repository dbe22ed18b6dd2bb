"""Activations between the forward and the backward: where they wait, and how they get there and back.

For a model of `transformers` or PEFT that is trained as a whole there are contexts that move what autograd saves
(`get_lora_act_offloading_ctx_manager`, `OffloadActivations`, and for trainers `ActivationOffloadingMixin`). A streamed
model keeps layers' inputs (`lema.activations.arena`), and moves the rest with the same parts.
"""

from lema.activations.arena import BoundaryArena, StepBoundaries, graph_input
from lema.activations.manager import (
    NoOpManager,
    OffloadActivations,
    get_lora_act_offloading_ctx_manager,
)
from lema.activations.mixin import ActivationOffloadingMixin

__all__ = [
    "ActivationOffloadingMixin",
    "BoundaryArena",
    "NoOpManager",
    "OffloadActivations",
    "StepBoundaries",
    "get_lora_act_offloading_ctx_manager",
    "graph_input",
]
