"""How fast bytes come to where they are used: read from a disk, and copied to a device; measured in
seconds.

The plan of a run and `lema doctor` measure with the reader, buffers and slots that training has.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from torch import Tensor

from lema.backend import Backend
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.workers import Ticket

__all__ = ["ENOUGH", "REPEATS", "Clock", "median_seconds", "read_speed", "upload_speed"]

Clock = Callable[[], float]
ENOUGH = 0.3  # seconds that one measurement takes, about: a run waits for it before its first step
REPEATS = 5


def median_seconds(
    work: Callable[[], object], backend: Backend, clock: Clock = time.perf_counter
) -> float:
    """Return the median seconds of some runs of `work` on the device; the first is left out,
    since it warms up.
    """
    measured: list[float] = []
    began = time.perf_counter()
    while len(measured) < 2 or (len(measured) <= REPEATS and time.perf_counter() - began < ENOUGH):
        start = clock()
        work()
        backend.synchronize()
        measured.append(clock() - start)
    return max(statistics.median(measured[1:]), 1e-9)


def read_speed(
    layers: Iterable[LayerBytes], buffers: Sequence[Tensor], clock: Clock = time.perf_counter
) -> float:
    """Return the bytes per second at which layers are read, as many at a time as there are host
    buffers.
    """
    free = deque(buffers)
    pending = deque[Ticket]()
    with closing(LayerReader()) as reader:
        began = clock()
        for layer in layers:
            if len(pending) == len(free):
                pending.popleft().wait()
            pending.append(reader.submit(layer, free[0]))
            free.rotate(-1)
        for ticket in pending:
            ticket.wait()
        return reader.bytes_read / max(clock() - began, 1e-9)


def upload_speed(backend: Backend, nbytes: int, clock: Clock = time.perf_counter) -> float:
    """Return the bytes per second at which a host buffer of `nbytes` is copied to a slot on the
    device.
    """
    buffer = backend.host_buffer(nbytes)
    slots = backend.device_slots(nbytes, 1)
    buffer.fill_(1)  # its pages are there before the clock runs

    def upload() -> None:
        copy = slots.upload(buffer)
        copy.wait()
        copy.release()

    return nbytes / median_seconds(upload, backend, clock)
