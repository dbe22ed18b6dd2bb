"""From settings to an allocation of memory: the limits in bytes, the solver's answer, and whether
there is anything to solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lema.backend import Replicas
from lema.config import LemaConfig, MemoryStrategy
from lema.config.units import human_bytes, parse_memory
from lema.errors import MemoryLimitError
from lema.plan.blueprint import Blueprint
from lema.plan.budget import MARGIN, solve
from lema.plan.cost import Allocation, Demand, Speeds, Tier, seconds
from lema.plan.work.step import StepShape
from lema.stream.gather import gathered_bytes
from lema.stream.placement import part_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "allocated",
    "layers_stay",
    "of_one_process",
    "surely_fits",
    "untimed",
    "whether_recomputed",
]


def of_one_process(demand: Demand, replicas: Replicas, *, sharded: bool) -> Demand:
    """Return what a step needs of one of several processes, given what it needs of one alone;
    `sharded`: each has only its part of every layer's weights."""
    demand = replace(demand, processes=replicas.local_size)
    size = replicas.size
    if not sharded or size == 1:
        return demand
    layers = []
    for layer in demand.layers:
        part = part_bytes(layer.slot_bytes, size)
        layers.append(
            replace(
                layer,
                slot_bytes=part,
                upload_bytes=part,
                read_bytes=math.ceil(layer.read_bytes / size),
            )
        )
    gathered = gathered_bytes([layer.slot_bytes for layer in layers], size)
    return replace(demand, layers=tuple(layers), gathered_bytes=gathered)


DEPTHS = (2, 1)  # of prefetching, the first that fits, where the settings leave it open
WIDE = 8  # copies of what one product of a layer takes and gives, more than any layer keeps
CACHED = 0.5  # of the free memory: files that take no more stay in the system's cache beside a run


def whether_recomputed(config: LemaConfig) -> bool | None:
    """Return whether the settings have layers recomputed; None: as few as memory asks for."""
    if config.context_parallel_size is not None:
        return True  # as below
    chunk = config.chunk_tokens
    if chunk is not None and (config.max_length is None or config.max_length > chunk):
        return True  # because a graph of all chunks is what they are to spare
    if config.gradient_checkpointing != "auto":
        return config.gradient_checkpointing
    if config.activation_offloading == "hidden_states" or config.boundary_activations in (
        "host",
        "disk",
    ):
        return True  # because it is inputs of layers that they speak of
    return None if config.offloading_tier is None else False


def layers_stay(config: LemaConfig, demand: Demand, free: int) -> bool:
    """Return whether layers may stay on the device: where nobody limits a device that computes in
    host memory, only if the system's cache, which gives its memory back to whoever needs it, would
    not hold the model's files as well."""
    unlimited = config.device_memory == "auto" and demand.shared
    return not unlimited or sum(layer.read_bytes for layer in demand.layers) > CACHED * free


def allocated(
    config: LemaConfig,
    demand: Demand,
    speeds: Speeds,
    device_total: int,
    host_total: int,
    host_available: int,
    *,
    resident_fraction: float = 0.0,
    device_free: int | None = None,
) -> Allocation:
    """Return the best allocation within the limits that the settings set, which may be fractions of
    the totals.

    `host_available` bytes of host memory are free, the limit where the settings have none; others
    leave `device_free` of device memory; None: all. Layers stay up to the part `resident_fraction`
    of it where the settings have no number; what else there is to choose stays as streaming has it,
    as do layers where none fits. `MemoryLimitError`: nothing fits.
    """
    host_limit = (
        None if config.host_memory is None else parse_memory(config.host_memory, host_total)
    )
    resident = config.strategy is MemoryStrategy.RESIDENT
    tier = config.offloading_tier
    device_memory = config.device_memory
    free = device_total if device_free is None else device_free
    free = (
        _of_host(demand, min(device_total, host_available), host_limit, resident)
        if demand.shared
        else free
    )
    if device_memory == "auto":
        device_limit = parse_memory(device_memory, free) if free and not resident_fraction else None
    else:
        device_limit = None if device_memory is None else parse_memory(device_memory, device_total)
        resident_fraction = resident_fraction * (device_memory is None)
    # Where nobody limits a device that computes in host memory, what it needs beside the layers
    # comes out of it all the same: layers that fill the rest would have the system end the process.
    alone = not (demand.shared and resident and device_limit is None)
    fixed_bytes = 0 if alone else demand.processes * (demand.fixed_bytes - demand.outside_bytes)
    recompute = whether_recomputed(config)
    stay = bool(resident_fraction) or layers_stay(config, demand, free)
    boundaries = None if config.boundary_activations == "auto" else config.boundary_activations
    boundaries = boundaries if recompute is False or tier is None else tier

    def solved(depth: int, again: bool, saved_on: Tier, *, asked: bool = True) -> Allocation:
        return solve(
            *(demand, speeds, depth + 1),
            device_limit=device_limit if asked else int(resident_fraction * free),
            host_limit=max(0, host_available - fixed_bytes) if host_limit is None else host_limit,
            host_cache="all" if resident else "none" if host_limit is None else "fill",
            recompute=again,
            boundaries=boundaries if asked else boundaries or "device",
            saved_on=saved_on,
            stay=stay,
            save=recompute is None
            or device_memory != "auto",  # whoever asks for recomputation, and no number, means all
            products=not config.torch_compile,  # because compiled layers run again as a whole
        )

    def spent(depth: int) -> Allocation:
        if recompute is not None or device_limit is None:
            again = recompute is not False
            saved_on = tier or "device"
            if device_limit is None and resident_fraction:
                with suppress(MemoryLimitError):  # then layers stream, as far as that fits
                    return solved(depth, again, saved_on, asked=False)
            return solved(depth, again, saved_on)
        return _least_recomputed(demand, speeds, partial(solved, depth), stay=stay)

    try:
        return _deepest(
            DEPTHS if config.prefetch_depth is None else (config.prefetch_depth,), spent
        )
    except MemoryLimitError as error:
        if error.where == "host_memory" and host_limit is None:
            taken = f", less {human_bytes(fixed_bytes)} for what trains and is computed"
            available = f"memory available on this machine, {human_bytes(host_available)}"
            error.locate(available + taken if fixed_bytes else available)
        elif error.where == "device_memory" and device_memory == "auto":
            error.locate(f"free device memory, {human_bytes(free)}")
        raise


def _of_host(demand: Demand, available: int, host_limit: int | None, resident: bool) -> int:
    """Return what is free for a device that computes in host memory, without what layers that
    wait there take.
    """
    weights = sum(layer.slot_bytes for layer in demand.layers)
    free = available // demand.processes
    cached_bytes = demand.host_copies * weights // demand.processes
    return max(
        1, free - (cached_bytes if resident else min(host_limit or 0, cached_bytes, free // 2))
    )


def _deepest(depths: Sequence[int], spent: Callable[[int], Allocation]) -> Allocation:
    """Return what memory is spent on at the first depth of prefetching that fits."""
    for depth in depths[:-1]:
        with suppress(MemoryLimitError):
            return spent(depth)
    return spent(depths[-1])


def _least_recomputed(
    demand: Demand, speeds: Speeds, solved: Callable[[bool, Tier], Allocation], *, stay: bool
) -> Allocation:
    """Return the fastest allocation, whatever of the layers is recomputed; where no seconds are
    known, as little is as fits: nothing, or else everything."""
    allocations = []
    timed = any(layer.recompute for layer in demand.layers)
    candidates: list[tuple[bool, Tier]] = [(False, "device"), (True, "device"), (False, "host")]
    for again, saved_on in candidates[: 3 if timed and not demand.shared else 2]:
        with suppress(MemoryLimitError):
            allocations.append(solved(again, saved_on))
            if not again and (
                not timed or not stay or len(allocations[0].residents) == len(demand.layers)
            ):
                break  # because nothing is left to be had
    if not allocations:
        return solved(True, "device")  # which says what is missing
    cautious = Speeds(speeds.disk / MARGIN, speeds.link / MARGIN)
    best = (
        min(allocations, key=lambda allocation: seconds(demand, allocation, cautious))
        if timed
        else allocations[0]
    )
    return (
        best
        if timed or not best.recompute
        else replace(best, saved=frozenset(), products=frozenset())
    )


def untimed(demand: Demand) -> Demand:
    """Return the demand without its seconds, which are not known."""
    layers = tuple(
        replace(layer, expand=0.0, forward=0.0, recompute=0.0, backward=0.0)
        for layer in demand.layers
    )
    return replace(demand, layers=layers, head_seconds=0.0, outside_seconds=0.0)


def surely_fits(blueprint: Blueprint, shape: StepShape, device_limit: int) -> bool:
    """Whether so much device memory holds a step by a guess that is far too high, so that nothing
    needs to be looked at.
    """
    batch = shape.micro_batch
    rows = shape.num_rows
    text = blueprint.model.config.get_text_config()
    heads = _most_heads(text)
    width = 0
    for layer in blueprint.layers:
        tensors = (*layer.tensors, *(expansion.target for expansion in layer.expansions))
        # what goes into a product, and what comes out
        width += WIDE * sum(sum(tensor.shape[-2:]) for tensor in tensors)
        width += WIDE * batch.length * heads  # scores of one token
    width += WIDE * (text.vocab_size + text.hidden_size)
    weights = (
        sum(layer.nbytes + layer.expanded_bytes for layer in blueprint.layers)
        + blueprint.outside_bytes
    )
    weights *= 1 + (blueprint.trained is not None)  # with their gradients
    activations = 4 * width * rows * batch.length * (1 + batch.forward_only)
    trains = blueprint.adapter_bytes + blueprint.reference_bytes
    return bool(weights + blueprint.head.nbytes + trains + activations < device_limit)


def _most_heads(text: PreTrainedConfig) -> int:
    """Return the heads of attention of the layer with the most; where a config names none, as many
    as states are wide. Of layers with settings of their own, the config of the whole gives no
    number."""
    layers = text.per_layer_config if text.is_heterogeneous else (text,)
    return max(
        int(getattr(layer, "num_attention_heads", None) or text.hidden_size) for layer in layers
    )
