"""The layers of towers, which may be leased one after the other as those of the language model are.

They are the lists of what `transformers` marks as a layer that can be recomputed: each is called as
a whole, and nothing outside reads its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lema.backend import Backend
from lema.config import LemaConfig
from lema.model.outer_weights import StoredTensors, layer_bytes
from lema.model.skeleton import find_towers, is_in
from lema.stream.placement import LayerBytes, slot_layout

__all__ = ["NUM_SLOTS", "slot_bytes", "stack_bytes", "streams_towers", "tower_stacks"]
__all__ += ["uncounted", "unloaded_towers"]

NUM_SLOTS = 2  # one layer computes while the next is on its way


def streams_towers(config: LemaConfig) -> bool:
    """Whether settings ask for towers whose layers stream."""
    return config.modalities == "all" and config.towers == "stream"


def uncounted(config: LemaConfig) -> list[str]:
    """Return what a plan with these settings does not count, for who reads it."""
    if config.modalities == "text":
        return []
    what = "what towers compute is not counted, and grows with the images of a micro-batch"
    return [f"{what}: leave room for it in device_memory, or lower micro_batch_size"]


def tower_stacks(model: PreTrainedModel, towers: Collection[str]) -> dict[str, nn.ModuleList]:
    """Return the stacks of layers in the modules `towers`, by name."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > NUM_SLOTS - 1
            and is_in(name, towers)
            and not is_in(name, stacks)
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
        ):
            stacks[name] = module
    return stacks


def stack_bytes(stacks: dict[str, nn.ModuleList], stored: StoredTensors) -> list[LayerBytes]:
    """Return the layers of all stacks as bytes, one stack after the other."""
    return [
        layer
        for name, layers in stacks.items()
        for layer in layer_bytes(stored.records, stored.dtypes, name, len(layers))
    ]


def slot_bytes(layers: Iterable[LayerBytes], backend: Backend) -> int:
    """Return the bytes of device memory that layers take turns in."""
    shared = backend.memory().shared
    largest = max(
        (
            (layer.nbytes if shared else slot_layout(layer).nbytes) + layer.expanded_bytes
            for layer in layers
        ),
        default=0,
    )
    return NUM_SLOTS * largest


def unloaded_towers(
    model: PreTrainedModel, stored: StoredTensors, config: LemaConfig
) -> tuple[list[str], int]:
    """Return what of a model's towers is not on the device, and the bytes of the slots in which it
    comes there."""
    towers = find_towers(model)
    if config.modalities == "text":
        return towers, 0
    if not streams_towers(config):
        return [], 0
    stacks = tower_stacks(model, towers)
    return [*stacks], slot_bytes(stack_bytes(stacks, stored), stored.backend)
