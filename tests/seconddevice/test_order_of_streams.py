"""Copies wait for what they depend on, on torch's own streams: take away one wait, and some course
goes wrong.

The code under test is that of the backends. The mutants are those which the tests without a device
have, and one of each kind for each queue.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from seconddevice import SecondDevice
from seconddevice.scenario import Course, Faulty
from test_cuda_order import MUTANTS

import lema.backend.queues
import lema.backend.replicas
import lema.backend.torchstreams

COURSES = 400
NAMES = ("Copies", "Slots", "CopyDown", "QueuedReplicas")
OF_MODULES = {
    "queues": lema.backend.queues,
    "replicas": lema.backend.replicas,
    "torchstreams": lema.backend.torchstreams,
}
STREAMS = {
    "a stream waits for no event": ("torchstreams", "self._stream.wait_event(event.event)", "pass"),
    "a thread waits for no event": ("torchstreams", "self.event.synchronize()", "pass"),
    "every event has happened": ("torchstreams", "return bool(self.event.query())", "return True"),
    "events are recorded where nothing is": (
        "torchstreams",
        "event.record(stream)",
        "event.record(torch.accelerator.current_stream())",
    ),
    "the stream that computes is the first one": (
        "torchstreams",
        "return _Queue(self._current_stream(self._index), self._new_event)",
        "return self.uploads",
    ),
}
# Mapped memory is for devices that compute in host memory: tests/seconddevice/test_unified.py.
TEXTS = {name: text for name, text in (MUTANTS | STREAMS).items() if "mapped" not in name}
FAULTS = {
    f"{queue} {fault}": (queue, fault)
    for fault in ("waits for nothing", "happens early")
    for queue in ("compute", "uploads", "returns", "downloads", "gathers")
} | {
    f"{queue} in another stream": (queue, "another stream")
    for queue in ("uploads", "returns", "downloads")
}


def code_under_test(changed: str = "", old: str = "", new: str = "") -> SimpleNamespace:
    """Return the classes, one module's text changed."""
    classes: dict[str, Any] = {}
    for name, module in OF_MODULES.items():
        source = Path(str(module.__file__)).read_text()
        if name == changed:
            assert source.count(old) == 1, f"{old!r} is not in {name}.py once"
            source = source.replace(old, new)
        copy = ModuleType(module.__name__)
        sys.modules["_of_a_mutant"] = copy
        exec(compile(source, str(module.__file__), "exec"), copy.__dict__)
        classes |= {
            key: value for key, value in vars(copy).items() if key in NAMES and key not in classes
        }
        if name == "torchstreams":
            classes["queues"] = copy._Queues
    return SimpleNamespace(**classes)


def with_fault(queue: str, fault: str) -> SimpleNamespace:
    """Return the classes as they are, and queues one of which is faulty."""
    code = code_under_test()
    true_queues = code.queues

    def faulty(device: torch.device) -> Any:
        queues = true_queues(device)
        if queue == "compute":
            one = Faulty(queues.compute, fault, queues.uploads)
            kinds = {
                name: getattr(queues, name)
                for name in ("uploads", "returns", "downloads", "gathers")
            }
            return SimpleNamespace(compute=one, **kinds)
        other = queues.downloads if queue != "downloads" else queues.uploads
        setattr(queues, queue, Faulty(getattr(queues, queue), fault, other))
        return queues

    code.queues = faulty
    return code


@contextmanager
def clean(second: SecondDevice) -> Iterator[None]:
    """Leave no memory under way to the next test."""
    try:
        yield
    finally:
        with second.course(order_checked=False):
            for _ in range(2):
                gc.collect()
                try:
                    torch.accelerator.synchronize()
                except RuntimeError:
                    continue


def goes_wrong(
    second: SecondDevice,
    code: SimpleNamespace,
    *,
    order_checked: bool = True,
    courses: int = COURSES,
) -> bool:
    """Return whether one of the courses reads a wrong byte, or is refused by the device."""
    with clean(second):
        for seed in range(courses):
            course = None if seed % 2 else seed
            with second.course(course, order_checked=order_checked):
                try:
                    Course(code, seed).run()
                except (AssertionError, ValueError, RuntimeError):
                    return True
    return False


@pytest.mark.parametrize("late", [True, False])
def test_every_byte_is_read_when_it_is_there(second: SecondDevice, late: bool) -> None:
    code = code_under_test()
    for seed in range(100):
        with second.course(None if late else seed):
            Course(code, seed).run()


@pytest.mark.parametrize("mutant", TEXTS)
def test_without_any_one_of_its_waits_some_course_goes_wrong(
    second: SecondDevice, mutant: str
) -> None:
    assert goes_wrong(second, code_under_test(*TEXTS[mutant]))
    assert not goes_wrong(second, code_under_test(), courses=4), (
        "what went wrong was left by another course"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_without_any_promise_of_a_queue_some_course_goes_wrong(
    second: SecondDevice, fault: str
) -> None:
    assert goes_wrong(second, with_fault(*FAULTS[fault]))
    assert not goes_wrong(second, code_under_test(), courses=4), (
        "what went wrong was left by another course"
    )


# Where something is late, and not early, the wrong numbers show without any check of the order.
LATE = [
    "compute does not wait for the bytes",
    "drained at once",
    "copies wait for nothing",
    "what was downloaded is uploaded before it landed",
    "no landing is known",
    "done before it is copied",
    "host memory is forgotten early",
    "a release of a download does nothing",
    "landed at once",
    "compute does not wait for a gathering",
    "gathered before it is",
    *STREAMS,
]


@pytest.mark.parametrize("mutant", LATE)
def test_what_comes_late_shows_in_the_numbers_alone(second: SecondDevice, mutant: str) -> None:
    assert goes_wrong(second, code_under_test(*TEXTS[mutant]), order_checked=False)


def test_at_least_ten_mutants_are_of_queues_alone() -> None:
    assert len(FAULTS) + len(STREAMS) >= 10
