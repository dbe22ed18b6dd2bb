"""Counters of what streaming has cost so far: bytes, layers, seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StreamCounters"]


@dataclass
class StreamCounters:
    """What streaming has cost so far."""

    layers_read: int = 0  # layers read from disk on the way to a lease
    layers_kept: int = 0  # leases of layers on disk that cost no read, for the layer was still there
    bytes_read: int = 0  # from disk, those of residents, of host memory and of rows of embeddings among them
    bytes_uploaded: int = 0  # handed to device slots
    bytes_gathered: int = 0  # of layers, that came from other processes, device to device
    bytes_offloaded: int = 0  # of activations that left the device, to wait for the backward in host memory or on disk
    leases: int = 0  # leases begun
    seconds_blocked_disk: float = 0.0  # how long leases waited for reads
    seconds_blocked_upload: float = 0.0  # how long leases waited for the device to take their bytes
    # How long the next read waited for a buffer whose layer was still to be computed with.
    seconds_blocked_compute: float = 0.0
    seconds_blocked_gather: float = 0.0  # how long leases waited for bytes of other processes
    # How long leases were busy expanding quantised weights; on a device that queues its work, how long queueing it.
    seconds_expanding: float = 0.0
