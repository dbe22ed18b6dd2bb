"""Counters of what streaming has cost so far: bytes, layers, seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["RunningCounters", "StreamCounters"]


@dataclass(frozen=True)
class StreamCounters:
    """What streaming has cost so far.

    Attributes:
        layers_read: layers read from disk on the way to a lease.
        layers_kept: leases of layers on disk that cost no read, for the layer was still there.
        bytes_read: bytes read from disk, those of residents, of host memory and of rows of embeddings among them.
        bytes_uploaded: bytes handed to device slots.
        bytes_gathered: bytes of layers that came from other processes, device to device.
        bytes_offloaded: bytes of activations that left the device, to wait for the backward in host memory or on disk.
        leases: leases begun.
        seconds_blocked_disk: how long leases waited for reads.
        seconds_blocked_upload: how long leases waited for the device to take their bytes.
        seconds_blocked_compute: how long the next read waited for a buffer whose layer was still to be computed with.
        seconds_blocked_gather: how long leases waited for bytes of other processes.
        seconds_expanding: how long leases were busy expanding quantised weights; on a device that queues its work, how
            long they were busy queueing it.
    """

    layers_read: int = 0
    layers_kept: int = 0
    bytes_read: int = 0
    bytes_uploaded: int = 0
    bytes_gathered: int = 0
    bytes_offloaded: int = 0
    leases: int = 0
    seconds_blocked_disk: float = 0.0
    seconds_blocked_upload: float = 0.0
    seconds_blocked_compute: float = 0.0
    seconds_blocked_gather: float = 0.0
    seconds_expanding: float = 0.0


class RunningCounters:
    """Counters that are counted up."""

    def __init__(self) -> None:
        self.total = StreamCounters()  # so far

    def add(self, **more: float) -> None:
        """Count some of them up."""
        self.total = replace(self.total, **{name: getattr(self.total, name) + by for name, by in more.items()})
