"""The cost of one optimizer step: what it demands, its seconds, and the bytes that move in it.

It is arithmetic alone; `lema.plan.memory` has the bytes that are there at its peak.

A step has two phases, up through the layers and down again. In each, layers are computed while
others are read and uploaded, so a phase lasts as long as the slowest of the three. The top layer,
the head and the loss are one visit, at the end of the way up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from lema.stream.schedule import fetched, forward_order, in_parts, training_order, with_parts

__all__ = [
    "NO_OVERHEAD",
    "Allocation",
    "Demand",
    "HostTraining",
    "LayerCost",
    "Overhead",
    "RowsInHost",
    "Speeds",
    "Tier",
    "Traffic",
    "crossover",
    "down_seconds",
    "group_numbers",
    "phases",
    "rows_in_host",
    "saved_elsewhere",
    "seconds",
    "traffic",
    "waiting_bytes",
]


Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Allocation:
    """What memory is spent on."""

    slots: int  # of the ring on the device
    residents: frozenset[int] = frozenset()  # layers that stay on the device
    # layers that stay in host memory, between disk and device
    host_cached: frozenset[int] = frozenset()
    boundaries: Tier = "device"  # where boundary activations wait for the backward
    saved: frozenset[int] = frozenset()  # layers whose activations are kept, so not recomputed
    # where those activations wait for the backward, with these layers' inputs
    saved_on: Tier = "device"
    # of the head's weight, which are leased after the layers and numbered so; 0: it is on the
    # device
    pieces: int = 0
    # whether the backward computes again what is not `saved`; else all of it is
    recompute: bool = True
    # that are leased together, of layers that are leased in parts; 0: all layers are whole
    experts: int = 0
    # whether what such a layer has before its experts is run twice in the backward
    runs_again: bool = False
    # layers not `saved` that keep their products by frozen weights
    products: frozenset[int] = frozenset()

    def summary(self) -> str:
        """Say it in a few words."""
        counts = {"resident": len(self.residents), "cached in host memory": len(self.host_cached)}
        counts |= {
            "not recomputed": len(self.saved),
            "recomputed but for products": len(self.products),
        }
        counts |= {"pieces of the head streamed": self.pieces, "experts in a slot": self.experts}
        parts = [f"{count} {what}" for what, count in counts.items() if count or what == "resident"]
        parts += ["what comes before experts run again for each backward"] * self.runs_again
        where = {"device": "", "host": "in host memory", "disk": "on disk"}
        waiting = {
            "boundaries": where[self.boundaries],
            "activations": where[self.saved_on] if self.saved else "",
        }
        return ", ".join(
            parts + [f"{what} {location}" for what, location in waiting.items() if location]
        )


@dataclass(frozen=True)
class LayerCost:
    """One layer in one step, all micro-batches together."""

    slot_bytes: int  # on the device
    read_bytes: int  # from disk, at each read
    upload_bytes: int  # over the link, at each upload
    saved_bytes: int = 0  # its activations, where they are kept for the backward
    # seconds of expanding its weights, at each lease; 0: they are stored as they are used
    expand: float = 0.0
    forward: float = 0.0  # seconds
    recompute: float = 0.0  # seconds of running it again in the backward
    backward: float = 0.0  # seconds, without that
    micro_saved_bytes: int = 0  # of its activations those of the largest micro-batch
    # of those of its weights that train themselves, as they leave the device
    gradient_bytes: int = 0
    # bytes of its experts that are leased in groups, which are among the others here
    groups: tuple[int, ...] = ()
    product_bytes: int = 0  # of its products by frozen weights that the recomputation uses
    without_products: float = 0.0  # seconds of running it again if these are kept

    @property
    def product_seconds(self) -> float:
        """The seconds that kept products save."""
        return max(0.0, self.recompute - self.without_products)


@dataclass(frozen=True)
class HostTraining:
    """What weights of the layers that train themselves take of host memory, beside the copy that
    streams.
    """

    masters: int = 0  # in fp32; 0: the copy that streams is in fp32, and is them
    moments: int = 0  # AdamW's two of each parameter
    gradients: int = 0  # that wait for their step
    stepping: int = 0  # what the optimizer makes, one tensor at a time
    # of masters, moments and gradients those that are in files, which the others do not count
    mapped: int = 0


@dataclass(frozen=True)
class Overhead:
    """What device memory goes to beside tensors: libraries of kernels, and the rounding of
    torch's allocator.
    """

    workspaces: int = 0  # bytes that libraries take for themselves when they first compute
    block: int = 1  # bytes of which memory for larger tensors is a multiple

    def rounding(self, tensors: Iterable[int], parts: int) -> int:
        """Return the bytes by which memory is larger than what is in it: `tensors` of so many bytes
        that have memory of their own, and some parts of which nothing is known but that each ends
        within a block."""
        if self.block == 1:
            return 0
        return self.block * parts + sum(-size % self.block for size in tensors if size > self.block)


NO_OVERHEAD = Overhead()


@dataclass(frozen=True)
class RowsInHost:
    """What changes where hidden states of rows wait in host memory but for a few chunks, as they do
    where the inputs of layers leave the device, chunk by chunk.
    """

    working_bytes: int  # on the device, in the place of those of the demand
    flight_bytes: int  # likewise
    host_bytes: int  # in host memory
    chunk_bytes: int  # of the largest chunk of a layer's input


@dataclass(frozen=True)
class Demand:
    """One step, whatever memory there is for it."""

    layers: tuple[LayerCost, ...]  # from the lowest up; the last may be pieces of the head
    lowest: int = 0  # the lowest layer that gradients reach
    outside_bytes: int = 0  # embeddings, final norm, head
    # of tensors that no checkpoint has, as rotary tables; on a shared device none are copied
    buffer_bytes: int = 0
    adapter_bytes: int = 0  # what trains, with gradients and optimizer state
    working_bytes: int = 0  # one micro-batch in one layer, or in the head, where that is more
    flight_bytes: int = 0  # hidden states between two layers, and the layers' other arguments
    # the weights of one layer as they are used, where they are stored smaller
    expanded_bytes: int = 0
    boundary_bytes: int = 0  # the inputs of one layer, of all micro-batches
    micro_boundary_bytes: int = 0  # the inputs of one layer, of the largest micro-batch
    head_seconds: float = 0.0  # seconds of the head and the loss, forward and backward
    outside_seconds: float = 0.0  # seconds of what is done between steps, and before the layers
    # layers put together from the parts of all processes; 0: each process has them whole
    gathered_bytes: int = 0
    processes: int = 1  # of this machine, which have its host memory together
    shared: bool = False  # the device computes in host memory: host buffers are its slots
    training: HostTraining = HostTraining()  # in each process, for weights that train themselves
    pieces: int = 0  # how many of the layers are pieces of the head
    # of embeddings that are looked up row by row, the rows of all tokens of the step
    row_bytes: int = 0
    overhead: Overhead = NO_OVERHEAD  # of the device
    # where inputs of layers leave the device; None: hidden states are whole on the device
    in_host: RowsInHost | None = None
    # of host memory, for keys and values of the layer at work and their gradients
    paged_bytes: int = 0

    @property
    def top(self) -> int:
        """The layer at which the step turns."""
        return len(self.layers) - 1

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """How many groups of experts each layer is leased in."""
        return tuple(len(layer.groups) for layer in self.layers)

    @cached_property
    def leased(self) -> tuple[tuple[int, int], ...]:
        """What is leased at once, as a layer and bytes of its slot: layers but for their groups,
        then all groups.
        """
        layer_leases = [
            (index, layer.slot_bytes - sum(layer.groups)) for index, layer in enumerate(self.layers)
        ]
        return (
            *layer_leases,
            *((index, size) for index, layer in enumerate(self.layers) for size in layer.groups),
        )

    def total(self, what: str, numbers: Iterable[int]) -> int:
        """Return the sum over leases of what layers have of some bytes; of a layer in parts, a
        lease has its share.
        """
        total_bytes = 0
        for index, nbytes in map(self.leased.__getitem__, numbers):
            layer = self.layers[index]
            total_bytes += (
                getattr(layer, what) * nbytes // layer.slot_bytes
                if layer.groups
                else getattr(layer, what)
            )
        return total_bytes

    @property
    def visited_twice(self) -> range:
        """The layers, and pieces of the head, that are leased again on the way down."""
        return range(self.lowest, self.top)

    @property
    def keeping(self) -> range:
        """The layers that keep their inputs on the way up: all that gradients reach but for one
        that is the turn.
        """
        return range(self.lowest, len(self.layers) - self.pieces if self.pieces else self.top)

    @property
    def fixed_bytes(self) -> int:
        """Device memory that no allocation changes."""
        transient_bytes = (
            self.working_bytes + self.flight_bytes + self.expanded_bytes + self.gathered_bytes
        )
        persistent_bytes = (
            self.outside_bytes + self.buffer_bytes + self.adapter_bytes + self.gradient_bytes
        )
        return persistent_bytes + transient_bytes + self.overhead.workspaces

    @property
    def gradient_bytes(self) -> int:
        """Those of layers whose weights train: one layer's are formed while the one before still
        has its own there.
        """
        return 2 * max((layer.gradient_bytes for layer in self.layers), default=0)

    @property
    def host_copies(self) -> int:
        """How often host memory has the bytes of a host-cached layer: processes share all but
        parts of layers.
        """
        return self.processes if self.gathered_bytes else 1


@dataclass(frozen=True)
class Speeds:
    """How fast bytes come: from disk to host memory, and from there to the device, in bytes per
    second.
    """

    disk: float  # of a model's file, read in order
    # from host memory to the device; infinite where they are the same memory
    link: float = math.inf


@dataclass(frozen=True)
class Phase:
    """Seconds that computing, the link and the disk are each busy for in one phase."""

    compute: float
    link: float
    disk: float

    @property
    def seconds(self) -> float:
        """How long the phase lasts when all three go on at once."""
        return max(self.compute, self.link, self.disk)


def saved_elsewhere(demand: Demand, allocation: Allocation) -> dict[int, int]:
    """Return the layers whose activations are kept and leave the device, and their bytes, those
    of inputs included.
    """
    if allocation.saved_on == "device":
        return {}
    gone = sorted(allocation.saved.intersection(demand.keeping))
    return {index: demand.layers[index].saved_bytes + demand.boundary_bytes for index in gone}


def rows_in_host(demand: Demand, allocation: Allocation) -> RowsInHost | None:
    """Return what hidden states take that wait in host memory; None: they are on the device."""
    return None if allocation.boundaries == "device" else demand.in_host


def _away(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of inputs of layers that leave the device."""
    if allocation.boundaries == "device":
        return 0
    return waiting_bytes(demand, allocation)


def _read_again(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of inputs of layers that come back a second time in a backward, as they do
    chunk by chunk."""
    return 0 if rows_in_host(demand, allocation) is None else _away(demand, allocation)


def waiting_bytes(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of inputs of layers that wait for the backward; that of a layer whose
    activations are kept waits with them, and is not among these.
    """
    count = len(demand.keeping) - len(allocation.saved.intersection(demand.keeping))
    return count * demand.boundary_bytes


def phases(demand: Demand, allocation: Allocation, speeds: Speeds) -> tuple[Phase, Phase]:
    """Return the way up, the turn with it, and the way down."""
    layers = demand.layers
    twice = demand.visited_twice
    top = layers[demand.top]
    up = sum(layer.expand + layer.forward for layer in layers) + top.backward + demand.head_seconds
    down = sum(down_seconds(demand, allocation, index) for index in twice)
    inputs = _away(demand, allocation)
    saved = sum(saved_elsewhere(demand, allocation).values())
    moved = inputs + saved
    spilled = inputs * (allocation.boundaries == "disk") + saved * (allocation.saved_on == "disk")
    # On the way up activations go against the stream of weights, which the link carries both ways
    # at once.
    residents = allocation.residents
    in_memory = allocation.residents | allocation.host_cached
    _, loads_up, loads_down = fetches(demand.groups, allocation.slots, residents, demand.lowest)
    _, reads_up, reads_down = fetches(demand.groups, allocation.slots, in_memory, demand.lowest)
    link_up = max(demand.total("upload_bytes", loads_up), moved) / speeds.link
    link_down = (demand.total("upload_bytes", loads_down) + moved) / speeds.link
    # the other way
    link_down = max(link_down, sum(layer.gradient_bytes for layer in layers) / speeds.link)
    disk_up = (demand.row_bytes + demand.total("read_bytes", reads_up) + spilled) / speeds.disk
    # Chunks are read once to make keys and values again, and once to be recomputed.
    again = _read_again(demand, allocation)
    link_down += again / speeds.link
    spilled += again * (allocation.boundaries == "disk")
    disk_down = (demand.total("read_bytes", reads_down) + spilled) / speeds.disk
    return Phase(up, link_up, disk_up), Phase(down, link_down, disk_down)


def crossover(demand: Demand, allocation: Allocation, speeds: Speeds, tokens: int) -> float | None:
    """Return the tokens per step from which on weights are read and uploaded no longer than layers
    compute, given what a step of so many `tokens` needs; None: there is nothing to hide."""
    step_phases = phases(
        replace(demand, boundary_bytes=0), replace(allocation, saved_on="device"), speeds
    )
    needed = [
        max(phase.link, phase.disk) / phase.compute for phase in step_phases if phase.compute > 0
    ]
    return tokens * max(needed, default=0.0) or None


def down_seconds(demand: Demand, allocation: Allocation, index: int) -> float:
    """Return the seconds that a layer computes on the way down."""
    layer = demand.layers[index]
    again = layer.recompute - (layer.product_seconds if index in allocation.products else 0.0)
    return layer.expand + layer.backward + (0.0 if index in allocation.saved else again)


def group_numbers(groups: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the numbers of each layer's groups of experts, which come after all layers, by how
    many there are.
    """
    offsets = [*accumulate(groups, initial=len(groups))]
    return {
        index: tuple(range(offsets[index], offsets[index + 1]))
        for index, count in enumerate(groups)
        if count
    }


@lru_cache(maxsize=4096)
def fetches(
    groups: tuple[int, ...], slots: int, in_memory: frozenset[int], lowest: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return what the first step fetches, and a step after many others on the way up, and down:
    never a layer that is in memory, of which `in_memory` has the numbers. `groups` are those of
    each layer's experts; what is returned are the numbers of layers and groups."""
    parts = group_numbers(groups)
    layers = len(groups)
    excluded = with_parts(in_memory, parts)
    up = in_parts(forward_order(layers), parts, pinned=True)
    step_order = in_parts(training_order(layers, lowest), parts, top_layer=layers - 1, pinned=True)
    first = fetched(step_order, slots, excluded)
    then_up = fetched(step_order + up, slots, excluded)
    return first, then_up[len(first) :], fetched(step_order * 2, slots, excluded)[len(then_up) :]


def seconds(demand: Demand, allocation: Allocation, speeds: Speeds) -> float:
    """Return how long a step takes when everything overlaps that can."""
    up, down = phases(demand, allocation, speeds)
    return up.seconds + down.seconds + demand.outside_seconds


@dataclass(frozen=True)
class Traffic:
    """Bytes that move between disk, host memory and device."""

    read: int  # of weights, from disk; rows of embeddings as if no token came twice
    uploaded: int  # to the device, of weights and of activations that come back
    downloaded: int  # from the device, of gradients and of activations that wait elsewhere


def traffic(demand: Demand, allocation: Allocation, steps: int, *, rewritten: bool) -> Traffic:
    """Return the bytes that so many steps (at least one) move, with what is read and uploaded once
    before the first. If layers are `rewritten` in each step, the next finds nothing of them on the
    device."""
    in_memory = allocation.residents | allocation.host_cached

    def weights(stored_layers: frozenset[int], what: str) -> int:
        first_step, up, down = fetches(
            demand.groups, allocation.slots, stored_layers, demand.lowest
        )
        first, later = (
            demand.total(what, numbers)
            for numbers in (first_step, first_step if rewritten else up + down)
        )
        before: int = sum(getattr(demand.layers[index], what) for index in stored_layers)
        return before + first + (steps - 1) * later

    read = demand.outside_bytes + weights(in_memory, "read_bytes") + steps * demand.row_bytes
    if demand.shared:
        return Traffic(read, 0, 0)
    uploaded = demand.outside_bytes + weights(allocation.residents, "upload_bytes")
    waiting = _away(demand, allocation) + sum(saved_elsewhere(demand, allocation).values())
    gradients = sum(layer.gradient_bytes for layer in demand.layers)
    back = waiting + _read_again(demand, allocation)
    return Traffic(read, uploaded + steps * back, steps * (gradients + waiting))
