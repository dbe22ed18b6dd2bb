"""Worker threads that share work in parts: a free thread takes the next part of the oldest ticket.

A ticket may have a gate, a wait that may block before its parts may be done. A thread of its own
waits at the gates, one after the other, while the others do the parts of other tickets.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Ticket", "Workers"]

Part = Callable[[], None]


class Ticket:
    """Work under way in parts: over when the last of them has ended, failed with the first that
    failed. The parts are done in any order and by several threads, once `gate`, if there is one,
    has returned. A part that fails ends all."""

    def __init__(self, parts: Iterable[Part] = (), gate: Part | None = None) -> None:
        self._parts = deque(parts)
        self._gate = gate
        self.size = len(self._parts)
        self.gated = gate is not None
        self._running = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._end_if_over()

    def done(self) -> bool:
        """Whether every part has ended, well or badly."""
        return self._over.is_set()

    def failed(self) -> BaseException | None:
        """Return what the first part that failed raised; None: none has so far."""
        return self._error

    def wait(self) -> None:
        """Block until every part has ended; raise what the first that failed raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Block until no part is running, with or without errors; parts that have not begun
        never will.
        """
        self.give_up()
        self._over.wait()

    def begun(self) -> bool:
        """Whether nothing is left to begin."""
        return not self._parts and self._gate is None

    def step(self) -> None:
        """Wait at the gate, if no thread has yet, or do the next part, if there is one left."""
        with self._lock:
            part = self._gate
            self._gate = None
            if part is None and self._parts:
                part = self._parts.popleft()
            self._running += part is not None
        if part is None:
            return
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = self._error or error
            self.give_up()
        del part  # its objects may be freed with it, so not under the lock
        with self._lock:
            self._running -= 1
            self._end_if_over()

    def give_up(self) -> None:
        """Keep all parts from beginning that have not begun."""
        with self._lock:
            dropped = (self._parts, self._gate)
            self._parts = deque()
            self._gate = None
            self._end_if_over()
        del dropped  # as in `step`

    def _end_if_over(self) -> None:
        if not self._running and self.begun():
            self._over.set()


class Workers:
    """At most `count` threads that do the parts of tickets, and one that waits at their gates,
    started when they are needed. Where nobody closes them they end with this object, or the
    process, and what was submitted."""

    def __init__(self, count: int, name: str) -> None:
        self._parts = ThreadPoolExecutor(count, name)
        self._gates = ThreadPoolExecutor(1, f"{name}-gate")
        self._closed = False

    def submit(self, ticket: Ticket) -> None:
        """Have a ticket's parts done, after those of tickets submitted before."""
        if ticket.gated:
            self._gates.submit(self._open, ticket)
        else:
            self._let_in(ticket)

    def close(self) -> None:
        """Begin no more parts, and wait for those that have begun."""
        self._closed = True
        self._gates.shutdown()  # first, because an open gate lets parts in
        self._parts.shutdown()

    def _open(self, ticket: Ticket) -> None:
        self._step(ticket)
        self._let_in(ticket)

    def _let_in(self, ticket: Ticket) -> None:
        for _ in range(ticket.size):
            self._parts.submit(self._step, ticket)

    def _step(self, ticket: Ticket) -> None:
        if self._closed:
            ticket.give_up()
        ticket.step()
