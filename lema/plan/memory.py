"""The peak of memory in one optimizer step: a sum of what each holder of memory says that it takes.

The ring, the buffers of gathered layers, boundaries and saved graphs have a function beside their
own code that tells their bytes. What a layer, the head or the optimizer takes is in the demand.
"""

from __future__ import annotations

from lema.activations.boundaries import boundaries_in_host, boundaries_on_device
from lema.activations.stepstore import graphs_in_host, graphs_on_device
from lema.plan.cost import Allocation, Demand, rows_in_host, saved_elsewhere, waiting_bytes
from lema.stream.ring import ring_bytes

__all__ = ["device_parts", "host_parts"]

OF_LAYERS = ("slots", "residents")  # parts of device memory whose tensors are known
# What an allocation may still add to: it is counted in any case, so that adding to it begins no
# block that is unknown.
ADDED_TO = ("boundaries", "saved")


def device_parts(demand: Demand, allocation: Allocation) -> dict[str, int]:
    """Return the peak of device memory by part, in bytes."""
    rows = rows_in_host(demand, allocation) or demand
    tensors = {
        "slots": _ring(demand, allocation, skip_cached=demand.shared),
        "residents": sum(demand.layers[index].slot_bytes for index in allocation.residents),
        "outside": demand.outside_bytes + demand.buffer_bytes,
        "adapters": demand.adapter_bytes,
        "gradients": demand.gradient_bytes,
        "working": rows.working_bytes,
        "flight": rows.flight_bytes,
        "expanded": demand.expanded_bytes,
        "gathered": demand.gathered_bytes,
        "boundaries": _boundaries_on_device(demand, allocation),
        "saved": _saved_on_device(demand, allocation),
    }
    return {**tensors, "workspaces": _workspaces(demand, allocation, tensors)}


def host_parts(demand: Demand, allocation: Allocation) -> dict[str, int]:
    """Return the peak of host memory by part, in bytes, of all processes; on a shared device the
    ring is its slots.
    """
    tier = allocation.boundaries
    waiting = waiting_bytes(demand, allocation)
    in_host = rows_in_host(demand, allocation)
    rows_bytes = 0 if in_host is None else in_host.host_bytes
    saved = sum(saved_elsewhere(demand, allocation).values())
    training = demand.training
    count = demand.processes
    cached = sum(demand.layers[index].slot_bytes for index in allocation.host_cached)
    return {
        "ring": count * _ring(demand, allocation, skip_cached=True),
        "cached": demand.host_copies * cached,
        "boundaries": count
        * (rows_bytes + boundaries_in_host(tier, waiting, _largest_boundary(demand, allocation))),
        "keys": count * demand.paged_bytes,
        "saved": count * graphs_in_host(allocation.saved_on, saved),
        "masters": count * training.masters,
        "moments": count * training.moments,
        "waiting": count * training.gradients,
        "stepping": count * training.stepping,
    }


def _ring(demand: Demand, allocation: Allocation, *, skip_cached: bool) -> int:
    """Return the bytes of a ring; layers in host memory do not pass through it where they are
    used, as `skip_cached` says.
    """
    in_memory = allocation.residents | (allocation.host_cached if skip_cached else frozenset())
    through = [nbytes for index, nbytes in demand.leased if index not in in_memory]
    return ring_bytes(allocation.slots, through)


def _boundaries_on_device(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of inputs of layers on the device; those of layers whose activations are
    kept there are there with them.
    """
    waiting = waiting_bytes(demand, allocation)
    kept = allocation.saved.intersection(demand.keeping)
    with_graphs = len(kept) - len(saved_elsewhere(demand, allocation))
    own_bytes = 0
    # else a chunk is computed with in the memory in which it waits
    if rows_in_host(demand, allocation) is None or not demand.shared:
        largest = _largest_boundary(demand, allocation)
        own_bytes = boundaries_on_device(allocation.boundaries, waiting, largest)
    return own_bytes + with_graphs * demand.boundary_bytes


def _largest_boundary(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of the largest input of a layer that goes away and comes back at once."""
    in_host = rows_in_host(demand, allocation)
    return demand.micro_boundary_bytes if in_host is None else in_host.chunk_bytes


def _saved_on_device(demand: Demand, allocation: Allocation) -> int:
    """Return the bytes of activations and of products that are kept on the device, and of those
    that pass through it on their way to elsewhere and back.
    """
    layers = demand.layers
    gone = saved_elsewhere(demand, allocation)
    staying = [layers[index].saved_bytes for index in allocation.saved - gone.keys()]
    staying += [layers[index].product_bytes for index in allocation.products]
    passing = [layers[index].micro_saved_bytes + demand.micro_boundary_bytes for index in gone]
    return graphs_on_device(staying, passing)


def _workspaces(demand: Demand, allocation: Allocation, tensors: dict[str, int]) -> int:
    """Return what memory is lost beside tensors of so many bytes by part."""
    slot = max(
        (size for index, size in demand.leased if index not in allocation.residents), default=0
    )
    layer_sizes = [slot] * (tensors["slots"] // slot if slot else 0)
    layer_sizes += [demand.layers[index].slot_bytes for index in allocation.residents]
    num_parts = sum(
        1 for part in tensors if part in ADDED_TO or (tensors[part] and part not in OF_LAYERS)
    )
    return demand.overhead.workspaces + demand.overhead.rounding(layer_sizes, num_parts)
