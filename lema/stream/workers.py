"""Worker threads that share work in parts: a free thread takes the next part of the oldest ticket.

A ticket has a gate, a wait that may block before its parts may be done. One thread waits at a gate while the others do
the parts of other tickets.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Ticket", "Workers"]

Part = Callable[[], None]


class Ticket:
    """Work under way in parts: over when the last of them has ended, failed with the first that failed. The parts are
    done in any order and by several threads, once `gate`, if there is one, has returned. A part that fails ends the
    whole: what has not begun then never will."""

    def __init__(self, parts: Iterable[Part] = (), gate: Part | None = None) -> None:
        self._parts, self._gate = deque(parts), gate
        self.size = max(1, len(self._parts))  # how many threads have something to do
        self._shut = gate is not None  # until the gate has ended
        self._running = 0
        self._error: BaseException | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._end_if_over()

    @property
    def gated(self) -> bool:
        """Whether its parts must wait for a gate."""
        return self._shut

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

    def settle(self) -> None:
        """Block until no part is running, however those end that are; what has not begun never will."""
        with self._lock:
            dropped = self._drop()
        del dropped  # not under the lock: what a part holds may end with it
        self._over.wait()

    def take_gate(self) -> Part | None:
        """Return the gate, if no thread has taken it; the one that waits there calls `end`."""
        with self._lock:
            gate, self._gate = self._gate, None
            self._running += gate is not None
            return gate

    def take(self) -> Part | None:
        """Return a part that may be done now; who does it calls `end`."""
        with self._lock:
            if self._shut or not self._parts:
                return None
            self._running += 1
            return self._parts.popleft()

    def end(self, error: BaseException | None) -> None:
        """Say that what was taken has ended: with an error, or well."""
        dropped: object = None
        with self._lock:
            self._running -= 1
            self._shut = False  # parts run behind an open gate: what has ended was the gate, or the gate was open
            if error is not None:
                self._error = self._error or error
                dropped = self._drop()
            self._end_if_over()
        del dropped

    def begun(self) -> bool:
        """Whether nothing is left to take."""
        return not self._parts and self._gate is None

    def _drop(self) -> object:
        """Forget what has not begun; the lock is held. Return what was forgotten."""
        dropped, self._parts, self._gate = (self._parts, self._gate), deque(), None
        self._end_if_over()
        return dropped

    def _end_if_over(self) -> None:
        if not self._running and self.begun():
            self._over.set()


class Workers:
    """At most `count` threads that do the parts of tickets, started when they are needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._changed = threading.Condition()
        self._tickets: list[Ticket] = []  # of which something is left to take, the oldest first
        self._threads: list[threading.Thread] = []
        self._at_gate = self._stopped = False

    def submit(self, ticket: Ticket) -> None:
        """Have a ticket's parts done, after those of tickets submitted before."""
        with self._changed:
            if self._stopped:
                raise RuntimeError("work was submitted after shutdown")
            self._tickets.append(ticket)
            if not self._threads:
                atexit.register(self.close)  # a thread that is cut off in the middle of a part ends the process badly
            for number in range(len(self._threads), min(self._count, len(self._threads) + ticket.size)):
                self._threads.append(threading.Thread(target=self._work, name=f"{self._name}_{number}", daemon=True))
                self._threads[-1].start()
            self._changed.notify(1 if ticket.gated else self._count)

    def stop(self) -> None:
        """Begin nothing more. It blocks nobody: the collector of garbage may call it, in any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        atexit.unregister(self.close)

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        self.stop()
        for ticket in self._tickets:
            ticket.settle()
        for thread in self._threads:
            thread.join()
        self._tickets.clear()

    def _work(self) -> None:
        at_gate = False
        while (taken := self._take(at_gate)) is not None:
            ticket, part, at_gate = taken
            failure: BaseException | None = None
            try:
                part()
            except BaseException as error:  # noqa: BLE001 - the ticket hands it to whoever waits
                failure = error
            ticket.end(failure)
            del taken, ticket, part, failure  # what a part holds is not kept until there is another

    def _take(self, gate_ended: bool) -> tuple[Ticket, Part, bool] | None:
        """Wait for something to do: (of which ticket, what, whether it is the gate). None: there will be nothing."""
        with self._changed:
            if gate_ended:
                self._at_gate = False
                self._changed.notify_all()
            while not self._stopped:
                self._tickets = [ticket for ticket in self._tickets if not ticket.begun()]
                for ticket in self._tickets:
                    if not self._at_gate and (gate := ticket.take_gate()) is not None:
                        self._at_gate = True
                        return ticket, gate, True
                    if (part := ticket.take()) is not None:
                        return ticket, part, False
                self._changed.wait()
            return None
