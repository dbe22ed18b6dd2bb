"""A store of activations in host memory, with a bound, and another store for what the bound does
not hold.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
from torch import Tensor

from lema.activations.protocols import Store, WaitingPiece
from lema.backend.hostmemory import memory_available
from lema.storage.spillfile import whole_blocks

__all__ = ["HostPiece", "HostPool", "HostStore"]

FLOOR_PART = 20
# of the machine's memory, what is left alone: a twentieth, at least so much
FLOOR_BYTES = 256 << 20


def floor_bytes() -> int:
    """Return how much of the machine's memory must remain when a buffer has been taken."""
    return max(int(psutil.virtual_memory().total) // FLOOR_PART, FLOOR_BYTES)


@dataclass
class PoolCounters:
    """The buffers of a pool, counted."""

    bytes_now: int = 0  # of all buffers, free and in use
    peak_bytes: int = 0  # the most that this ever was
    bytes_in_use: int = 0
    most_in_use: int = 0
    allocated: int = 0  # how many buffers were made
    reused: int = 0  # how often one was handed out again

    def count_new(self, nbytes: int) -> None:
        """Count a buffer that was made."""
        self.bytes_now += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        self.allocated += 1

    def count_reuse(self) -> None:
        """Count a free buffer that is handed out again."""
        self.reused += 1

    def count_freed(self, nbytes: int) -> None:
        """Count a buffer that is given back to the system."""
        self.bytes_now -= nbytes

    def count_taken(self, nbytes: int) -> None:
        """Count bytes that are handed out."""
        self.bytes_in_use += nbytes
        self.most_in_use = max(self.most_in_use, self.bytes_in_use)

    def count_given(self, nbytes: int) -> None:
        """Count bytes that come back."""
        self.bytes_in_use -= nbytes


class _FreeBuffers:
    """Buffers that nobody uses, by size; that which came back last is handed out first."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[Tensor]] = {}  # sizes in the order of what came back

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def add(self, buffer: Tensor) -> None:
        """Take a buffer that came back."""
        size = len(buffer)
        same = self._by_size.pop(size, deque())
        same.append(buffer)
        self._by_size[size] = same  # of all sizes, freed last

    def take(self, size: int) -> Tensor | None:
        """Return a buffer of a size; None: there is none."""
        if size not in self._by_size:
            return None
        same = self._by_size[size]
        buffer = same.pop()
        if not same:
            del self._by_size[size]
        return buffer

    def next_larger(self, size: int) -> int:
        """Return the next larger size that a buffer has, up to twice the size; if none has,
        `size`.
        """
        sizes = (free_size for free_size in self._by_size if size < free_size <= 2 * size)
        return min(sizes, default=size)

    def drop_one(self) -> int:
        """Drop a buffer, of the size that was not given back for the longest time; return its
        size.
        """
        size = next(iter(self._by_size))
        same = self._by_size[size]
        same.popleft()
        if not same:
            del self._by_size[size]
        return size


class HostPool:
    """Host buffers, handed out, given back and used again. Any thread may call it.

    A buffer is used again for the size it was made for; if a new one would make the pool larger
    than the most that was in use at once, also for half of that and more. So batches of all lengths
    do not add up.

    `allocate`: returns uint8 `[nbytes]`, at a page boundary, in a storage of its own. `limit`:
    bytes of all buffers, free and in use; None: as many as the machine has. `available`: returns
    the bytes of memory that can still be had; None: the machine and the control groups say it.
    `num_buffers`: let there be so many, each as large as the largest ever asked for; this sets the
    limit."""

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        limit: int | None = None,
        available: Callable[[], int] | None = None,
        *,
        num_buffers: int | None = None,
    ) -> None:
        self._allocate = allocate
        self._num_buffers = num_buffers
        self._smallest = 0
        self.limit = limit if num_buffers is None else 0
        self._available = available or memory_available
        self._floor = floor_bytes()
        self._lock = threading.Lock()
        # A garbage collector may return buffers at any point of the code, so the methods that it
        # calls take no lock.
        self._returned: deque[tuple[int, bool]] = deque()
        # by address, with the number of bytes requested
        self._out: dict[int, tuple[Tensor, int]] = {}
        self._free = _FreeBuffers()
        self.counters = PoolCounters()

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all buffers, free and in use."""
        with self._lock:
            self._sort()
            return self.counters.bytes_now

    def take(self, nbytes: int, *, must: bool = False) -> Tensor | None:
        """Return uint8 `[nbytes]`, of whole blocks in a storage of its own; None: there is no room.
        If it `must`, room is taken all the same where there is none; it is given back to the
        system, not to the pool."""
        assert nbytes > 0, "a buffer of no bytes was requested"
        size = whole_blocks(nbytes)
        with self._lock:
            self._sort()
            if self._num_buffers is not None:
                # Because otherwise pieces of changing sizes would allocate and free buffers in
                # every step.
                size = self._smallest = max(size, self._smallest)
                self.limit = self._num_buffers * size
            buffer = self._again(size)
            if buffer is None:
                buffer = self._new(size)
            if buffer is None:
                buffer = self._again(self._free.next_larger(size))
            while buffer is None and self._free:
                self._let_go()
                buffer = self._new(size)
            if buffer is None and must:
                buffer = self._allocate_buffer(size)
            if buffer is None:
                return None
            self._out[buffer.data_ptr()] = buffer, size
            self.counters.count_taken(size)
            return buffer[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Give back what `take` returned. A garbage collector may call it."""
        self._returned.append((buffer.data_ptr(), True))

    def forget(self, buffer: Tensor) -> None:
        """Return a buffer of `take` that may still be written or read: it is not used again."""
        self._returned.append((buffer.data_ptr(), False))

    def clear(self) -> None:
        """Let go of the buffers that are free."""
        with self._lock:
            self._sort()
            while self._free:
                self._let_go()

    def _sort(self) -> None:
        """Move returned buffers to the free list."""
        while self._returned:
            address, again = self._returned.popleft()
            assert address in self._out, "a buffer was given back twice, or is not of this pool"
            buffer, requested = self._out.pop(address)
            self.counters.count_given(requested)
            if again and (self.limit is None or self.counters.bytes_now <= self.limit):
                self._free.add(buffer)
            else:
                self.counters.count_freed(len(buffer))

    def _again(self, size: int) -> Tensor | None:
        buffer = self._free.take(size)
        if buffer is not None:
            self.counters.count_reuse()
        return buffer

    def _new(self, size: int) -> Tensor | None:
        counters = self.counters
        nbytes = counters.bytes_now + size
        if self._free and nbytes > max(counters.most_in_use, counters.bytes_in_use + size):
            return None
        if self.limit is not None and nbytes > self.limit:
            return None
        if self._available() - size < self._floor:
            return None
        return self._allocate_buffer(size)

    def _allocate_buffer(self, size: int) -> Tensor:
        buffer = self._allocate(size)
        self.counters.count_new(size)
        return buffer

    def _let_go(self) -> None:
        """Let go of a free buffer."""
        self.counters.count_freed(self._free.drop_one())


class HostStore:
    """Room in host memory for pieces; what has none there goes to the store `beyond` it, if there
    is one. A buffer is used again for the next piece while the copy from there may still be under
    way: whoever drops a place must have made compute wait for that copy, which the next copy to the
    buffer comes after."""

    def __init__(self, pool: HostPool, beyond: Store | None = None) -> None:
        self.pool = pool
        self.beyond = beyond

    def allocate(self, nbytes: int) -> WaitingPiece | None:
        """Return room for `nbytes`; None: there is none. What `beyond` raises, this does."""
        if (buffer := self.pool.take(nbytes)) is not None:
            return HostPiece(buffer, self.pool.give)
        return None if self.beyond is None else self.beyond.allocate(nbytes)

    def close(self) -> None:
        """Give back all that nothing waits in."""
        self.pool.clear()
        if self.beyond is not None:
            self.beyond.close()


class HostPiece:
    """One piece in host memory, uint8 `[nbytes]`. `give` takes the buffer back; a garbage collector
    may call it."""

    def __init__(self, buffer: Tensor, give: Callable[[Tensor], None]) -> None:
        self._buffer = [buffer]
        self._give = give

    def fill(self) -> Tensor:
        return self.memory()

    def filled(self, landed: Callable[[], None]) -> None:
        """The copy back comes after the copy here, in whatever queue."""

    def expect(self) -> None:
        """The bytes are in host memory."""

    def ready(self) -> bool:
        return True

    def memory(self) -> Tensor:
        assert self._buffer, "a piece was used that had been dropped"
        return self._buffer[0]

    def used(self, drained: Callable[[], None]) -> None:
        """The bytes stay here."""

    def drop(self) -> None:
        with suppress(IndexError):  # because it was dropped before, perhaps by another thread
            self._give(self._buffer.pop())
