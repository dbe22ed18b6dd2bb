"""What training a model's own weights takes in host memory, in files and on the device: arithmetic
alone.

A parameter takes 12 bytes of host memory in fp32: the weight that streams, which is its own master,
and AdamW's two moments. In half precision it takes 14: a master in fp32, the moments, and the 2
bytes that stream. Gradients leave the device layer by layer; where they are clipped all of them
wait in host memory for the norm, in the type of the weights. `lema.train.full.masters` takes what
is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lema.config import LemaConfig
from lema.errors import ConfigError, MemoryLimitError
from lema.model.skeleton import find_layers
from lema.plan.cost import Allocation, Demand, HostTraining
from lema.plan.memory import device_parts
from lema.storage.quantized.records import NARROW
from lema.stream.placement import LayerBytes

__all__ = [
    "MASTER_BYTES",
    "MOMENT_BYTES",
    "TrainableBytes",
    "TrainedBytes",
    "host_training",
    "lowest_trained",
    "masters_in_files",
    "outside_bytes",
    "trainable_bytes",
    "trained_bytes",
    "training_of",
    "unmovable_bytes",
]


MASTER_BYTES = 4  # fp32
MOMENT_BYTES = 8  # two of AdamW, each in fp32
TRAINABLE = {torch.float32, torch.bfloat16}


@dataclass(frozen=True)
class TrainableBytes:
    """Bytes of weights that train: of one layer, or of all that lie outside the layers."""

    count: int = 0  # their parameters
    # the bytes of the weights in their own type, which is that of their gradients, too
    nbytes: int = 0
    not_single: int = 0  # bytes of parameters that are not in fp32 and so have masters
    largest: int = 0  # the bytes of the largest tensor in its own type

    @property
    def masters(self) -> int:
        """Bytes of masters in fp32, in addition to the streamed weights."""
        return MASTER_BYTES * self.not_single

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's moments."""
        return MOMENT_BYTES * self.count

    @property
    def passing(self) -> int:
        """Bytes of gradients on their way: those that arrive, those of the layer being stepped,
        and these in fp32.
        """
        return 2 * self.nbytes + MASTER_BYTES * self.count

    def movable(self, *, clipped: bool) -> int:
        """Return the bytes that may lie in a file: masters, moments, and gradients that wait to
        be clipped.
        """
        return self.masters + self.moments + self.nbytes * clipped


def trainable_bytes(weights: Iterable[tuple[str, int, torch.dtype]]) -> TrainableBytes:
    """Add up weights given as name, number of parameters and type; a ConfigError: one of that
    type does not train.
    """
    weights = list(weights)
    for name, _, dtype in weights:
        if dtype not in TRAINABLE:
            raise ConfigError(
                f"{name} is of type {str(dtype).removeprefix('torch.')}, which does not train",
                where="dtype",
                how="set it to bfloat16 or float32: gradients in float16 underflow",
            )
    return TrainableBytes(
        count=sum(count for _, count, _ in weights),
        nbytes=sum(count * dtype.itemsize for _, count, dtype in weights),
        not_single=sum(count for _, count, dtype in weights if dtype != torch.float32),
        largest=max((count * dtype.itemsize for _, count, dtype in weights), default=0),
    )


def outside_bytes(outside: TrainableBytes, *, shared: bool) -> int:
    """Return the bytes of masters and moments of weights outside the layers; unless `shared`,
    all have a master.
    """
    return outside.moments + (outside.masters if shared else MASTER_BYTES * outside.count)


def unmovable_bytes(
    layers: Iterable[TrainableBytes], outside: TrainableBytes, *, shared: bool
) -> int:
    """Return the bytes of host memory that training takes besides the weights, and that no file can
    hold: gradients on their way, and masters, moments and gradients in fp32 of what lies outside
    the layers."""
    passing = max((layer.passing for layer in layers), default=0)
    return passing + outside_bytes(outside, shared=shared) + MASTER_BYTES * outside.count


def masters_in_files(
    layer_bytes: Mapping[int, int], outside_bytes: int, host_memory: int
) -> frozenset[int]:
    """Return the layers whose masters, moments and waiting gradients have to lie in files: as few
    as will do.

    The backward goes down, and steps layers as it goes: when a step has ended, what is used next is
    that of the top. So the lowest layers go to files first. `layer_bytes` are those of each layer
    that may go to a file. Raises `MemoryLimitError` where the limit does not hold `outside_bytes`,
    which are in host memory in any case.
    """
    left = host_memory - outside_bytes
    if left < 0:
        raise MemoryLimitError(
            f"training weights needs {outside_bytes:,} bytes of host memory besides those "
            "that can be in files, and "
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


# tensors that AdamW makes for each that it steps: a denominator, and its root
OPTIMIZER_TENSORS = 2


@dataclass(frozen=True)
class TrainedBytes:
    """Which weights of a model train themselves."""

    names: tuple[frozenset[str], ...]  # of each layer, by their names in it
    layers: tuple[TrainableBytes, ...]  # of each layer
    outside: TrainableBytes  # the others, which are on the device

    @property
    def parameters(self) -> int:
        """How many train."""
        return sum(layer.count for layer in self.layers) + self.outside.count

    @property
    def on_device(self) -> int:
        """Bytes of gradients of weights outside the layers; one is formed before it is added to
        what is there.
        """
        return self.outside.nbytes + self.outside.largest

    @property
    def lowest(self) -> int:
        """The lowest layer with something that trains; the top one where none has."""
        return next(
            (index for index, layer in enumerate(self.layers) if layer.count), len(self.layers) - 1
        )


def trained_bytes(
    model: PreTrainedModel, layers: Sequence[LayerBytes], chosen: Callable[[str], bool]
) -> TrainedBytes:
    """Look at a model without adapters for what trains: those of its parameters whose names are
    chosen. Those outside the layers are left to require gradients; of those inside each call is
    given the values. Raises a ConfigError where a layer that trains is stored quantised, or
    anything that does is of a type that cannot."""
    prefix = f"{find_layers(model)[0]}."
    names: list[set[str]] = [set() for _ in layers]
    outside = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name) and not name.startswith(prefix))
        if chosen(name) and name.startswith(prefix):
            number, _, weight_name = name.removeprefix(prefix).partition(".")
            names[int(number)].add(weight_name)
        elif chosen(name):
            outside.append((name, parameter.numel(), parameter.dtype))
    inside = []
    for index, (layer, own_names) in enumerate(zip(layers, names, strict=True)):
        if own_names and any(expansion.library == NARROW for expansion in layer.expansions):
            raise ConfigError(
                "weights of the model that train compute in the type that they have",
                where="compute_dtype",
                how="set dtype instead, or leave compute_dtype out",
            )
        if own_names and layer.expansions:
            raise ConfigError(
                f"layer {index} is stored quantised, and quantised weights cannot train",
                where="model_name_or_path",
                how="train adapters, or use the model before quantisation",
            )
        trained = (
            (tensor.name, tensor.shape.numel(), tensor.dtype)
            for tensor in layer.tensors
            if tensor.name in own_names
        )
        inside.append(trainable_bytes(trained))
    return TrainedBytes(tuple(map(frozenset, names)), tuple(inside), trainable_bytes(outside))


def lowest_trained(stack: nn.ModuleList) -> int:
    """Return the lowest layer with a parameter that requires grad; the top one where none has."""
    trained = (
        index
        for index, layer in enumerate(stack)
        if any(parameter.requires_grad for parameter in layer.parameters())
    )
    return next(trained, len(stack) - 1)


def host_training(
    trained: TrainedBytes,
    there: int,
    limit: int,
    *,
    clipped: bool,
    shared: bool,
    processes: int = 1,
) -> HostTraining:
    """Return the host memory of each process without the copy that streams, and its part that goes
    to files.

    The bytes `there` are in host memory besides; `processes` divide them and the `limit`. Where
    gradients are `clipped` all of them wait for the norm, in the type that streams; else those of
    one layer pass through. `shared`: the device computes in host memory, so what trains outside the
    layers is there, too. Raises `MemoryLimitError` where there is no room for what cannot be in
    files.
    """
    outside = trained.outside
    layers = trained.layers
    movable = {
        index: layer.movable(clipped=clipped) for index, layer in enumerate(layers) if layer.count
    }
    always = there // processes + unmovable_bytes(layers, outside, shared=shared)
    in_files = masters_in_files(movable, always, limit // processes)
    here = [layers[index] for index in movable.keys() - in_files]
    landing = 0 if shared or clipped else max(layer.nbytes for layer in layers)
    largest = max(layer.largest for layer in layers)
    gradients = MASTER_BYTES * outside.count
    single = max((MASTER_BYTES * layer.count for layer in layers if layer.not_single), default=0)
    optimizer_bytes = single + OPTIMIZER_TENSORS * (2 if single else 1) * largest
    return HostTraining(
        masters=outside_bytes(outside, shared=shared)
        - outside.moments
        + sum(layer.masters for layer in here),
        moments=outside.moments + sum(layer.moments for layer in here),
        gradients=landing + sum(layer.nbytes * clipped for layer in here),
        stepping=max(optimizer_bytes, 0 if shared and not outside.not_single else gradients),
        mapped=sum(movable[index] for index in in_files),
    )


def training_of(
    config: LemaConfig,
    trained: TrainedBytes,
    demand: Demand,
    allocation: Allocation,
    *,
    limits: tuple[int, int],
    rows: int,
) -> HostTraining:
    """Return the bytes that masters and moments take of host memory, as many of them in files as
    has to be.

    Args:
        config: the settings of the phase.
        trained: which weights train.
        demand: what a step needs.
        allocation: what memory is spent on.
        limits: bytes of device and of host memory that may be used.
        rows: of a micro-batch.

    Returns:
        The bytes of each process.

    Raises:
        MemoryLimitError: host memory does not hold what cannot be in files, or the device what
            these weights take of it.
    """
    device_limit, host_limit = limits
    cached = sum(demand.layers[index].slot_bytes for index in allocation.host_cached)
    there = cached + demand.outside_bytes * demand.shared
    settings = {"clipped": config.max_grad_norm is not None, "shared": demand.shared}
    try:
        training = host_training(trained, there, host_limit, **settings, processes=demand.processes)
    except MemoryLimitError as error:
        where = "memory available on this machine" if config.host_memory is None else "host_memory"
        how = f"{error.how}: of these {there:,} are the weights as they stream"
        raise MemoryLimitError(error.what, where=where, how=how) from error
    parts = device_parts(demand, allocation)
    if (needed := sum(parts.values())) <= device_limit:
        return training
    options = []
    if allocation.saved:
        options.append(f"gradient_checkpointing: true ({parts['saved']:,} bytes less)")
    if rows > 1:
        options.append(f"micro_batch_size: 1 (about {parts['working'] * (rows - 1) // rows:,})")
    if parts["adapters"]:
        options.append(f"a selection without embeddings and head ({parts['adapters']:,})")
    if allocation.slots > 1:
        options.append(
            f"prefetch_depth: {allocation.slots - 2} ({parts['slots'] // allocation.slots:,})"
        )
    raise MemoryLimitError(
        f"training these weights takes {needed:,} bytes of device memory, and there are "
        f"{device_limit:,}",
        where="device_memory",
        how=f"{', or '.join(options) or 'lower max_length'}; of it {parts['slots']:,} bytes "
        "are layers passing "
        f"through, {parts['gradients']:,} their gradients, {parts['working']:,} one "
        "micro-batch in one layer",
    )
