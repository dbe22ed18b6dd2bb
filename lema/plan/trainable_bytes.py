"""The memory that training a model's own weights takes in host memory, in files and on the device: arithmetic alone.

These are the bytes that `lema.train.full.masters` and `lema.train.full.training` allocate. With the weights in fp32 a
parameter takes 12 bytes: the weight as it streams, which is the master, and AdamW's two moments. In half precision it
takes 14: an fp32 master, the moments, and 2 bytes of the copy that streams. Gradients leave the device layer by layer.
Where they are clipped, all of them wait in host memory for the norm, in the type of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lema.errors import ConfigError, MemoryLimitError
from lema.model.skeleton import find_layers
from lema.plan.cost import HostTraining
from lema.stream.placement import LayerBytes

__all__ = [
    "MASTER_BYTES",
    "MOMENT_BYTES",
    "FullBytes",
    "TrainedBytes",
    "Weighed",
    "full_bytes",
    "host_training",
    "place_masters",
    "trained_bytes",
]


MASTER_BYTES = 4  # fp32
MOMENT_BYTES = 8  # two of AdamW, each in fp32
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class FullBytes:
    """Bytes in host memory of parameters that train.

    Args:
        streamed: the weights that cross to the device.
        masters: in fp32; 0 where the streamed ones are the masters.
        moments: of the optimizer.
        gradients: that wait until their norm is known; 0 without clipping.
    """

    streamed: int
    masters: int
    moments: int
    gradients: int

    @property
    def movable(self) -> int:
        """Those that may lie in a file: all but what streams."""
        return self.masters + self.moments + self.gradients


def full_bytes(param_counts: Mapping[int, int], dtype: str, *, clipped: bool = False) -> dict[int, FullBytes]:
    """Return what each layer takes in host memory.

    Args:
        param_counts: of each layer, how many of its parameters train.
        dtype: of the weights: "float32" or "bfloat16".
        clipped: whether gradients are clipped to a norm.
    """
    width = WEIGHT_BYTES[dtype]
    return {
        layer: FullBytes(
            streamed=width * count,
            masters=0 if width == MASTER_BYTES else MASTER_BYTES * count,
            moments=MOMENT_BYTES * count,
            gradients=width * count if clipped else 0,
        )
        for layer, count in param_counts.items()
    }


def place_masters(layer_bytes: Mapping[int, int], outside_bytes: int, host_memory: int) -> frozenset[int]:
    """Return the layers whose masters, moments and waiting gradients have to lie in files: as few as will do.

    The backward goes down, and steps layers as it goes: when a step has ended, what is used next is that of the top.
    So the lowest layers go to files first.

    Args:
        layer_bytes: of each layer that trains, what may go to a file.
        outside_bytes: what is in host memory in any case.
        host_memory: the limit.

    Raises:
        MemoryLimitError: the limit does not hold what is in host memory in any case.
    """
    left = host_memory - outside_bytes
    if left < 0:
        raise MemoryLimitError(
            f"training weights needs {outside_bytes:,} bytes of host memory beside what can lie in files, and "
            f"{host_memory:,} are allowed",
            where="host_memory",
            how="allow that much, or train fewer weights",
        )
    in_memory = set()
    for layer in sorted(layer_bytes, reverse=True):
        left -= layer_bytes[layer]
        if left < 0:
            break
        in_memory.add(layer)
    return frozenset(layer_bytes.keys() - in_memory)


MADE = 2  # tensors that AdamW makes for each that it steps: a denominator, and its root


@dataclass(frozen=True)
class Weighed:
    """Weights that train, of one layer or of what lies outside the layers.

    Attributes:
        count: of their parameters.
        nbytes: in their own type, that of their gradients, too.
        apart: parameters that are not in fp32, so have masters beside them.
        largest: bytes of the largest tensor, in its own type.
    """

    count: int = 0
    nbytes: int = 0
    apart: int = 0
    largest: int = 0


@dataclass(frozen=True)
class TrainedBytes:
    """Which weights of a model train themselves.

    Attributes:
        names: of each layer, by their names in it.
        layers: of each layer.
        outside: the others, which are on the device.
    """

    names: tuple[frozenset[str], ...]
    layers: tuple[Weighed, ...]
    outside: Weighed

    @property
    def parameters(self) -> int:
        """How many train."""
        return sum(layer.count for layer in self.layers) + self.outside.count

    @property
    def on_device(self) -> int:
        """Bytes beside the weights outside the layers: their gradients; one is formed before it is added to what is
        there."""
        return self.outside.nbytes + self.outside.largest

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint: every master with its moments."""
        return (MASTER_BYTES + MOMENT_BYTES) * self.parameters

    @property
    def lowest(self) -> int:
        """The lowest layer with something that trains; the top one where none has."""
        return next((index for index, layer in enumerate(self.layers) if layer.count), len(self.layers) - 1)


def trained_bytes(model: PreTrainedModel, layers: Sequence[LayerBytes], chosen: Callable[[str], bool]) -> TrainedBytes:
    """Look at a model without adapters for what trains.

    Args:
        model: its parameters may be on `meta`.
        layers: its decoder layers as bytes.
        chosen: says of a parameter's name in the model whether it trains.

    Raises:
        ConfigError: a layer that trains is stored quantised, or something that trains is of a type that does not.
    """
    prefix = f"{find_layers(model)[0]}."
    names: list[set[str]] = [set() for _ in layers]
    outside = []
    for name, parameter in model.named_parameters():
        if chosen(name) and name.startswith(prefix):
            number, _, own = name.removeprefix(prefix).partition(".")
            names[int(number)].add(own)
        elif chosen(name):
            outside.append((name, parameter.numel(), parameter.dtype))
    for index, layer in enumerate(layers):
        if names[index] and layer.expansions:
            raise ConfigError(
                f"layer {index} is stored quantised, and such weights do not train",
                where="model_name_or_path",
                how="train adapters, or open the model as it was before it was quantised",
            )
    inside = [
        [(one.name, one.shape.numel(), one.dtype) for one in layer.tensors if one.name in own]
        for layer, own in zip(layers, names, strict=True)
    ]
    return TrainedBytes(tuple(map(frozenset, names)), tuple(map(_weighed, inside)), _weighed(outside))


def host_training(
    trained: TrainedBytes, there: int, limit: int, *, clipped: bool, shared: bool, processes: int = 1
) -> HostTraining:
    """Return what each process takes of host memory beside the copy that streams, and what of it goes to files.

    Args:
        trained: what trains.
        there: bytes that are in host memory besides.
        limit: bytes of host memory.
        clipped: whether gradients are, so that all of them wait for the norm, in the type that streams; else those of
            one layer pass through.
        shared: whether the device computes in host memory: what trains outside the layers is there, too.
        processes: that divide `limit`.

    Raises:
        MemoryLimitError: there is no room for what cannot be in files.
    """
    outside = trained.outside
    masters = MASTER_BYTES * (outside.apart if shared else outside.count)
    moments, gradients = MOMENT_BYTES * outside.count, MASTER_BYTES * outside.count
    waiting = [layer.nbytes * clipped for layer in trained.layers]
    movable = {
        index: MASTER_BYTES * layer.apart + MOMENT_BYTES * layer.count + waiting[index]
        for index, layer in enumerate(trained.layers)
        if layer.count
    }
    # On their way: the gradients of a layer, of the one that is stepped meanwhile, and those in fp32.
    passing = max(2 * layer.nbytes + MASTER_BYTES * layer.count for layer in trained.layers)
    fixed = there // processes + passing + masters + moments + gradients
    in_files = place_masters(movable, fixed, limit // processes)
    here = movable.keys() - in_files
    landing = 0 if shared or clipped else max(layer.nbytes for layer in trained.layers)
    largest = max(layer.largest for layer in trained.layers)
    single = max((MASTER_BYTES * layer.count for layer in trained.layers if layer.apart), default=0)
    return HostTraining(
        masters=masters + sum(MASTER_BYTES * trained.layers[index].apart for index in here),
        moments=moments + sum(MOMENT_BYTES * trained.layers[index].count for index in here),
        gradients=landing + sum(waiting[index] for index in here),
        stepping=max(single + MADE * (2 if single else 1) * largest, 0 if shared and not outside.apart else gradients),
        mapped=sum(movable[index] for index in in_files),
    )


def _weighed(weights: Sequence[tuple[str, int, torch.dtype]]) -> Weighed:
    for name, _, dtype in weights:
        if str(dtype).removeprefix("torch.") not in WEIGHT_BYTES:
            raise ConfigError(
                f"{name} is of type {str(dtype).removeprefix('torch.')}, which does not train",
                where="dtype",
                how=f"set it to {' or '.join(WEIGHT_BYTES)}",
            )
    return Weighed(
        count=sum(count for _, count, _ in weights),
        nbytes=sum(count * dtype.itemsize for _, count, dtype in weights),
        apart=sum(count for _, count, dtype in weights if dtype != torch.float32),
        largest=max((count * dtype.itemsize for _, count, dtype in weights), default=0),
    )
