"""What streaming costs, counted and timed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lema.backend.trace import NO_TRACE, NoTrace

__all__ = ["StreamCounters", "StreamMeter"]


@dataclass
class StreamCounters:
    """What streaming has cost so far."""

    layers_read: int = 0  # layers read from disk on the way to a lease
    # leases of layers on disk that cost no read, for the layer was still there
    layers_kept: int = 0
    # from disk, those of residents, of host memory and of rows of embeddings among them
    bytes_read: int = 0
    bytes_uploaded: int = 0  # handed to device slots
    bytes_gathered: int = 0  # of layers, that came from other processes, device to device
    # of activations that left the device, to wait for the backward in host memory or on disk
    bytes_offloaded: int = 0
    leases: int = 0  # leases begun
    seconds_blocked_disk: float = 0.0  # how long leases waited for reads
    seconds_blocked_upload: float = 0.0  # how long leases waited for the device to take their bytes
    # How long the next read waited for a buffer whose layer was still to be computed with.
    seconds_blocked_compute: float = 0.0
    seconds_blocked_gather: float = 0.0  # how long leases waited for bytes of other processes
    # How long leases were busy expanding quantised weights; on a device that queues its work, how
    # long queueing it.
    seconds_expanding: float = 0.0

    def count_lease(self) -> None:
        """Count a lease that begins."""
        self.leases += 1

    def count_read(self) -> None:
        """Count a layer that is read from disk."""
        self.layers_read += 1

    def count_layer_without_read(self) -> None:
        """Count a lease of a layer that was still in its host buffer."""
        self.layers_kept += 1

    def count_upload(self, nbytes: int) -> None:
        """Count so many bytes that are handed to a device slot."""
        self.bytes_uploaded += nbytes

    def count_gathered(self, nbytes: int) -> None:
        """Count so many bytes that come from other processes."""
        self.bytes_gathered += nbytes

    def count_blocked_disk(self, seconds: float) -> None:
        """Count how long a lease waited for a read."""
        self.seconds_blocked_disk += seconds

    def count_blocked_upload(self, seconds: float) -> None:
        """Count how long a lease waited for the device to take its bytes."""
        self.seconds_blocked_upload += seconds

    def count_blocked_compute(self, seconds: float) -> None:
        """Count how long a read waited for a buffer."""
        self.seconds_blocked_compute += seconds

    def count_blocked_gather(self, seconds: float) -> None:
        """Count how long a lease waited for the bytes of other processes."""
        self.seconds_blocked_gather += seconds

    def count_expanding(self, seconds: float) -> None:
        """Count how long a lease was busy expanding quantised weights."""
        self.seconds_expanding += seconds


class StreamMeter:
    """What measures a stream: its counters, the spans of a trace, and how long leases wait.

    Args:
        trace: has every read, upload and wait with its time.
        clock: the seconds now.
    """

    def __init__(
        self, trace: NoTrace = NO_TRACE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counters = StreamCounters()
        self.trace = trace
        self._clock = clock
        # the time from which on a read has been waiting for a buffer
        self._full_since: float | None = None

    @contextmanager
    def waiting_for_disk(self, name: str) -> Iterator[None]:
        """Measure the wait for a read in a `with` block, unless that fails."""
        began = self._clock()
        with self.trace.span("stall: disk", name):
            yield
        self.counters.count_blocked_disk(self._clock() - began)

    @contextmanager
    def waiting_for_upload(self, name: str) -> Iterator[None]:
        """Measure the wait for the device to take a layer's bytes in a `with` block."""
        began = self._clock()
        with self.trace.span("stall: upload", name):
            yield
        self.counters.count_blocked_upload(self._clock() - began)

    @contextmanager
    def waiting_for_gather(self, name: str) -> Iterator[None]:
        """Measure the wait for other processes in a `with` block, unless that fails."""
        began = self._clock()
        with self.trace.span("stall: gather", name):
            yield
        self.counters.count_blocked_gather(self._clock() - began)

    @contextmanager
    def expanding(self, name: str, nbytes: int) -> Iterator[None]:
        """Measure how long quantised weights are expanded in a `with` block."""
        began = self._clock()
        with self.trace.span("expand", name, nbytes=nbytes):
            yield
        self.counters.count_expanding(self._clock() - began)

    def buffers_are_full(self) -> None:
        """Know that the next read waits for a buffer, until it has one."""
        if self._full_since is None:
            self._full_since = self._clock()

    def buffer_is_free(self) -> None:
        """Know that the next read has a buffer."""
        if self._full_since is not None:
            self.counters.count_blocked_compute(self._clock() - self._full_since)
        self._full_since = None

    def forget_reads(self) -> None:
        """Know that no read waits any more."""
        self._full_since = None
