"""Tickets and the threads that do their parts: each once, behind its gate, and nothing is lost
when one fails.
"""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from random import Random

import pytest

from lema.stream.workers import Ticket, Workers

MANY = 40


@pytest.fixture(params=[1, 2, 8], ids=lambda count: f"{count} threads")
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(request.param, "test-worker")
    yield workers
    workers.close()


def fail() -> None:
    raise OSError("the disk is gone")


def run(
    workers: Workers, *parts: Callable[[], None], gate: Callable[[], None] | None = None
) -> Ticket:
    ticket = Ticket(parts, gate)
    workers.submit(ticket)
    return ticket


def test_what_has_no_parts_is_over() -> None:
    ticket = Ticket()
    ticket.wait()
    assert ticket.done() and ticket.failed() is None


def test_every_part_is_done_once_and_behind_its_gate(workers: Workers) -> None:
    chance = Random(3)
    events = list[tuple[str, int, int]]()
    tickets = []
    sizes = [chance.randrange(6) for _ in range(MANY)]
    for number, size in enumerate(sizes):
        parts = [lambda n=number, p=part: events.append(("part", n, p)) for part in range(size)]
        gate = (lambda n=number: events.append(("gate", n, -1))) if number % 2 else None
        tickets.append(run(workers, *parts, gate=gate))
    for ticket in tickets:
        ticket.wait()
        assert ticket.done() and ticket.failed() is None
    for number, size in enumerate(sizes):
        own = [(kind, part) for kind, ticket, part in events if ticket == number]
        if number % 2:
            assert own.pop(0) == ("gate", -1)
        assert sorted(own) == [("part", part) for part in range(size)]


@pytest.mark.parametrize("gate", [None, lambda: None], ids=["ungated", "gated"])
def test_the_parts_of_one_ticket_are_done_side_by_side(gate: Callable[[], None] | None) -> None:
    workers = Workers(3, "test-worker")
    all_at_once = threading.Barrier(3, timeout=60)
    run(workers, *[all_at_once.wait] * 3, gate=gate).wait()
    assert not all_at_once.broken
    workers.close()


def test_the_oldest_ticket_is_done_first() -> None:
    workers = Workers(1, "test-worker")
    free = threading.Event()
    order = list[int]()
    run(workers, free.wait)
    tickets = [
        run(workers, lambda n=number: order.append(n), lambda n=number: order.append(n))
        for number in range(9)
    ]
    free.set()
    for ticket in tickets:
        ticket.wait()
    workers.close()
    assert order == [number for number in range(9) for _ in range(2)]


def test_gates_that_stay_shut_leave_threads_for_what_needs_none() -> None:
    workers = Workers(2, "test-worker")
    free = threading.Event()
    # more gates than threads
    waiting = [run(workers, lambda: None, gate=free.wait) for _ in range(5)]
    run(workers, lambda: None).wait()
    assert not any(ticket.done() for ticket in waiting)
    free.set()
    for ticket in waiting:
        ticket.wait()
    workers.close()


def test_the_first_failure_ends_a_ticket(workers: Workers) -> None:
    """What had not begun never does, and the other tickets are done all the same."""
    free = threading.Event()
    done = list[int]()
    blocked = [run(workers, free.wait) for _ in range(8)]  # every thread has something else to do
    failing = run(workers, *[fail] * 20, *[lambda: done.append(0)] * 20)
    other = run(workers, lambda: done.append(1))
    free.set()
    other.wait()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        failing.wait()
    assert failing.done() and failing.failed() is caught.value
    assert done == [1]
    for ticket in blocked:
        ticket.wait()


def test_a_ticket_that_failed_is_not_over_while_a_part_is_running() -> None:
    workers = Workers(2, "test-worker")
    running = threading.Event()
    free = threading.Event()

    def keep_on() -> None:
        running.set()
        free.wait()

    def fail_meanwhile() -> None:
        running.wait()
        fail()

    ticket = run(workers, keep_on, fail_meanwhile)
    run(workers, lambda: None).wait()  # by the thread whose part has failed
    assert isinstance(ticket.failed(), OSError) and not ticket.done()
    free.set()
    with pytest.raises(OSError, match="the disk is gone"):
        ticket.wait()
    assert ticket.done()
    workers.close()


def test_a_gate_that_fails_lets_nothing_through(workers: Workers) -> None:
    done = list[int]()
    failing = run(workers, lambda: done.append(0), gate=fail)
    with pytest.raises(OSError, match="the disk is gone"):
        failing.wait()
    run(workers, lambda: done.append(1), gate=lambda: done.append(2)).wait()
    assert done == [2, 1]


def test_settling_at_the_gate_lets_nothing_through() -> None:
    workers = Workers(1, "test-worker")
    begun = threading.Event()
    free = threading.Event()
    done = list[int]()

    def gate() -> None:
        begun.set()
        free.wait()

    ticket = run(workers, lambda: done.append(0), gate=gate)
    begun.wait()
    settling = threading.Thread(target=ticket.cancel)
    settling.start()
    assert not ticket.done() and settling.is_alive()
    after = run(workers, lambda: done.append(1))
    later = run(workers, lambda: done.append(2), gate=lambda: None)
    later.cancel()  # it has not begun, so there is nothing to wait for
    assert later.done() and later.failed() is None
    while not ticket.begun():  # until the other thread has said that nothing is wanted any more
        settling.join(0.001)
    free.set()
    settling.join()
    after.wait()
    workers.close()
    assert done == [1]


def test_closing_waits_for_what_runs_and_begins_nothing_more(workers: Workers) -> None:
    begun = threading.Event()
    free = threading.Event()
    done = list[int]()

    def part() -> None:
        begun.set()
        free.wait()
        done.append(0)

    running = run(workers, part)
    begun.wait()
    blocking = [run(workers, free.wait) for _ in range(8)]
    closing = threading.Thread(target=workers.close)
    waiting = run(workers, *[lambda: None] * 3)
    threads = [*workers._parts._threads, *workers._gates._threads]
    closing.start()
    free.set()
    closing.join()
    waiting.cancel()
    assert running.done() and done == [0] and all(ticket.done() for ticket in (waiting, *blocking))
    assert not any(thread.is_alive() for thread in threads)
    workers.close()


@pytest.mark.slow
def test_what_a_part_held_goes_with_it(workers: Workers) -> None:
    """Threads that wait for more keep nothing of what they did."""

    class Memory:
        pass

    gone = threading.Event()
    memory = Memory()
    weakref.finalize(memory, gone.set)
    run(workers, lambda memory=memory: None).wait()
    del memory
    gc.collect()
    assert gone.wait(60)


def test_a_process_that_forgets_to_close_ends_when_its_parts_have_ended() -> None:
    script = """
import threading
from concurrent.futures import thread
from lema.stream.workers import Ticket, Workers
begun = threading.Event()
def part():
    begun.set()
    while not thread._shutdown:  # until the process is about to end
        pass
    print("whole")
workers = Workers(2, "test-worker")
workers.submit(Ticket([part]))
begun.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert ended.stdout == "whole\n" and ended.stderr == ""
