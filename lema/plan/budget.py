"""The allocation of memory to slots, resident layers, boundary activations, and layers that are not
recomputed.

Any choice of R resident layers saves the same bytes per pass. Even spacing is the one that keeps
the link and the compute busy together: between two residents there is always a streamed layer whose
upload their compute can hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from lema.config.units import human_bytes
from lema.errors import MemoryLimitError
from lema.plan.cost import Allocation, Demand, Speeds, Tier, seconds
from lema.plan.memory import device_parts, host_parts

__all__ = ["scattered", "solve", "spread"]


MARGIN = 1.1  # speeds are measured once and vary: what is just hidden by them might show
_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Return `count` layer numbers out of `num_layers`, evenly spaced."""
    if not 0 <= count <= num_layers:
        raise ValueError(f"{count} residents out of {num_layers} layers")
    return tuple((2 * index + 1) * num_layers // (2 * count) for index in range(count))


def scattered(num_layers: int) -> tuple[int, ...]:
    """Return all layers in an order whose every beginning is spread about evenly. It is van der
    Corput's (1935): by the layers' numbers with their bits reversed."""
    bits = max(1, (num_layers - 1).bit_length())
    return tuple(sorted(range(num_layers), key=lambda layer: int(f"{layer:0{bits}b}"[::-1], 2)))


def solve(
    demand: Demand,
    speeds: Speeds,
    num_slots: int,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    host_cache: Literal["none", "fill", "all"] = "none",
    recompute: bool = True,
    boundaries: Tier | None = None,
    saved_on: Tier = "device",
    stay: bool = True,
    save: bool = True,
    products: bool = True,
) -> Allocation:
    """Return the allocation with the fastest step among those whose predicted peaks are within the
    limits.

    Of those equally fast it is the one with boundaries nearest to the computation, then the one
    that takes least. Every allocation that fits a limit fits a larger one, so more memory never
    makes the predicted step slower.

    Args:
        device_limit: bytes on the device; None: no more is used than streaming needs.
        host_limit: bytes of host memory for weights and activations; None: they are not counted.
        host_cache: keep in host memory, of the layers that do not stay on the device, none, as many
            as help, or all.
        recompute: drop each layer's graph and compute it again; else every layer's activations are
            kept.
        boundaries: where they wait; None: where it is best.
        saved_on: without `recompute`, where activations wait; with it, those that are kept stay on
            the device.
        stay: let layers stay on the device where it has room for them.
        save: with `recompute`, keep activations of layers where the device has room for them.
        products: keep products by frozen weights of layers that are recomputed, where it has room
            for these.

    Raises `MemoryLimitError` where nothing fits.
    """
    limited = device_limit is not None
    # where that is the same memory
    usable_tiers = tuple(tier for tier in _TIERS if tier != "host" or not demand.shared)
    tiers = (
        (boundaries,)
        if boundaries is not None
        else usable_tiers
        if limited and recompute
        else usable_tiers[:1]
    )
    cautious = Speeds(speeds.disk / MARGIN, speeds.link / MARGIN)
    fitting: list[tuple[tuple[float, int, int], Allocation]] = []
    refused: list[Allocation] = []
    for bare in _candidates(
        demand, num_slots, tiers, saved_on, stay=limited and stay, recompute=recompute
    ):
        if host_cache == "all":
            bare = replace(bare, host_cached=frozenset(range(len(demand.layers))) - bare.residents)
        free_bytes = _left(device_limit, device_parts(demand, bare))
        host_free_bytes = _left(host_limit, host_parts(demand, bare))
        if free_bytes < 0 or host_free_bytes < 0:
            refused.append(bare)
            continue
        if host_cache == "fill":
            bare = replace(bare, host_cached=frozenset(_cacheable(demand, bare, host_limit)))
        if recompute and save and device_limit is not None:
            saved, product_layers = _saved_layers(demand, bare, free_bytes, products=products)
            bare = replace(bare, saved=saved, products=product_layers)
        key = (seconds(demand, bare, cautious), _TIERS.index(bare.boundaries), len(bare.residents))
        fitting.append((key, bare))
    if not fitting:
        raise _nothing_fits(demand, refused, device_limit, host_limit)
    best = min(fitting, key=lambda entry: entry[0])[1]
    return _without_surplus(demand, cautious, best, host_limit, may_stream=host_cache == "fill")


def _candidates(
    demand: Demand,
    num_slots: int,
    tiers: Sequence[Tier],
    saved_on: Tier,
    *,
    stay: bool,
    recompute: bool,
) -> Iterator[Allocation]:
    """Yield every number of layers that `stay`, if they may, with every place for boundaries."""
    saved, saved_tier = (
        (frozenset[int](), _TIERS[0]) if recompute else (frozenset(demand.keeping), saved_on)
    )
    num_layers = len(demand.layers)
    for count in range(num_layers + 1 if stay else 1):
        residents = frozenset(spread(count, num_layers))
        for tier in tiers:
            yield Allocation(
                num_slots,
                residents,
                boundaries=tier,
                saved=saved,
                saved_on=saved_tier,
                pieces=demand.pieces,
                recompute=recompute,
            )


def _left(limit: int | None, parts: dict[str, int]) -> float:
    return math.inf if limit is None else limit - sum(parts.values())


def _saved_layers(
    demand: Demand, bare: Allocation, free_bytes: float, *, products: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the layers whose activations are kept, and others whose products are, in an order that
    does not depend on the room: products of all layers come first if they save more seconds for
    their bytes."""
    # they stay with the activations
    inputs = 0 if bare.boundaries == "device" else demand.boundary_bytes
    layers = {
        index: demand.layers[index]
        for index in scattered(len(demand.layers))
        if index in demand.keeping
    }
    # which are recomputed
    layers = {index: layer for index, layer in layers.items() if not layer.groups}
    activation_bytes = {index: layer.saved_bytes + inputs for index, layer in layers.items()}
    part = {
        index: layer.product_bytes
        for index, layer in layers.items()
        if products and layer.product_bytes
    }
    saves = sum(layers[index].product_seconds for index in part)
    if saves * sum(activation_bytes.values()) <= sum(
        layer.recompute for layer in layers.values()
    ) * sum(part.values()):
        return _fitting(activation_bytes, free_bytes)[0], frozenset()
    product_layers, free_bytes = _fitting(part, free_bytes)
    if len(product_layers) < len(part):
        return frozenset(), product_layers
    saved, _ = _fitting(
        {index: nbytes - part.get(index, 0) for index, nbytes in activation_bytes.items()},
        free_bytes,
    )
    return saved, product_layers - saved


def _fitting(sizes: dict[int, int], free_bytes: float) -> tuple[frozenset[int], float]:
    """Return the first layers that fit, and the room that is left."""
    chosen = list[int]()
    for index, nbytes in sizes.items():
        if nbytes > free_bytes:
            break
        chosen.append(index)
        free_bytes -= nbytes
    return frozenset(chosen), free_bytes


def _cacheable(demand: Demand, bare: Allocation, limit: int | None) -> Iterable[int]:
    """Return the streamed layers that fit in host memory: all, if then the ring is not needed,
    or a beginning.
    """
    streamed = [index for index in scattered(len(demand.layers)) if index not in bare.residents]
    if _left(limit, host_parts(demand, replace(bare, host_cached=frozenset(streamed)))) >= 0:
        return streamed
    free_bytes = _left(limit, host_parts(demand, bare))
    chosen = []
    for index in streamed:
        free_bytes -= demand.host_copies * demand.layers[index].slot_bytes
        if free_bytes < 0:
            break
        chosen.append(index)
    return chosen


def _without_surplus(
    demand: Demand, speeds: Speeds, best: Allocation, host_limit: int | None, *, may_stream: bool
) -> Allocation:
    """Give back the memory that makes the step no faster, of host memory if cached layers
    `may_stream` instead.
    """
    for part in ("host_cached",) * may_stream + ("saved", "products") * best.recompute:
        least = seconds(demand, best, speeds)
        layers = getattr(best, part)
        fewer = (
            replace(best, **dict[str, Any]({part: subset}))
            for subset in _beginnings(demand, layers)
        )
        fewer = (
            allocation
            for allocation in fewer
            if _left(host_limit, host_parts(demand, allocation)) >= 0
        )
        best = next(
            allocation for allocation in fewer if seconds(demand, allocation, speeds) <= least
        )
    return best


def _beginnings(demand: Demand, chosen: frozenset[int]) -> Iterator[frozenset[int]]:
    """Yield none, one, two and so on of the layers chosen, spread about evenly."""
    ordered = [index for index in scattered(len(demand.layers)) if index in chosen]
    return (frozenset(ordered[:count]) for count in range(len(ordered) + 1))


def _nothing_fits(
    demand: Demand, refused: list[Allocation], device_limit: int | None, host_limit: int | None
) -> MemoryLimitError:
    """Say which limit is too small, and what would be enough."""
    on_device = min(
        (sum(device_parts(demand, allocation).values()), allocation.slots) for allocation in refused
    )[0]
    if device_limit is not None and on_device > device_limit:
        largest = max(nbytes for _, nbytes in demand.leased)
        adapter_bytes = human_bytes(demand.adapter_bytes)
        adapter_hint = f", or lower lora_rank or exclude modules: what trains takes {adapter_bytes}"
        return MemoryLimitError(
            f"{human_bytes(device_limit)} of device memory cannot hold the layer slots "
            f"({refused[0].slots} of {human_bytes(largest)}) "
            f"beside {human_bytes(demand.fixed_bytes)} of embeddings, head, adapters, "
            "optimizer state and one "
            "micro-batch in one layer",
            where="device_memory",
            how=f"allow at least {on_device:,} bytes ({human_bytes(on_device)}), or lower "
            "micro_batch_size or prefetch_depth"
            f"{adapter_hint * (2 * demand.adapter_bytes > device_limit)}",
        )
    usable = [
        allocation
        for allocation in refused
        if _left(device_limit, device_parts(demand, allocation)) >= 0
    ]
    needed = min(sum(host_parts(demand, allocation).values()) for allocation in usable)
    to_disk = (
        ", set activation_offloading: disk"
        if any(allocation.saved_on == "host" for allocation in usable)
        else ""
    )
    return MemoryLimitError(
        (
            f"{needed:,} bytes of host memory are needed for weights and activations, "
            f"{host_limit or 0:,} are allowed"
        ),
        where="host_memory",
        how=f"allow that much{to_disk}, use strategy: streaming, or lower prefetch_depth",
    )
