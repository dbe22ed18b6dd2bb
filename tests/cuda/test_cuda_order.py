"""Copies are in order on any device with queues: no slot is read before it is filled, or refilled
while in use.

The order is that of the backends' own code, on queues that take any course which events allow. Take
away one of its waits, and some course goes wrong.
"""

from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cudascenario import Scenario, Sender
from hypothesis import given, settings
from hypothesis import strategies as st
from queuefakes import FakeDevice, FakeEvent, FakeQueue
from torch import Tensor

import lema.backend.queues
import lema.backend.replicas
from lema.backend.queues import Copies, CopyDown, MappedSlots, Slots
from lema.backend.replicas import QueuedReplicas

MODULES = {
    "queues": lema.backend.queues,
    "replicas": lema.backend.replicas,
}
NAMES = ("Copies", "Slots", "MappedSlots", "CopyDown", "QueuedReplicas")
COURSES = 1500


def code_under_test(changed: str = "", old: str = "", new: str = "") -> SimpleNamespace:
    """Return the classes, one module's text changed."""
    found = {}
    for name, module in MODULES.items():
        source = Path(str(module.__file__)).read_text()
        if name == changed:
            assert source.count(old) == 1, f"{old!r} is not in {name}.py once"
            source = source.replace(old, new)
        made = ModuleType(module.__name__)
        exec(compile(source, str(module.__file__), "exec"), made.__dict__)
        found.update(
            {key: value for key, value in vars(made).items() if key in NAMES and key not in found}
        )
    return SimpleNamespace(**found)


CODE = code_under_test()


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 40))
def test_every_byte_is_read_when_it_is_there_and_overwritten_when_it_is_not_needed(
    seed: int,
) -> None:
    Scenario(CODE, seed).run()


def mapped_course(code: SimpleNamespace, seed: int) -> None:
    """Compute in host memory that a download brought; overwrite it when that is allowed, and
    compute there again.
    """
    device = FakeDevice(Random(seed))
    copies = code.Copies(device)
    slots = code.MappedSlots(copies, lambda source: source, lambda: None)
    host = bytes_of(0)
    outcome = [bytes_of(0) for _ in range(3)]
    download = code.CopyDown(copies, bytes_of(5), host)
    upload = slots.upload(host)
    device.compute.copy(outcome[0], upload.wait())
    upload.release()
    device.compute.copy(outcome[1], upload.wait())  # leased again
    upload.release()
    upload.drained()
    host.fill_(7)
    again = slots.upload(host)
    device.compute.copy(outcome[2], again.wait())
    device.run_all()
    assert [int(one[0]) for one in outcome] == [5, 5, 7]
    assert all(bool((one == one[0]).all()) for one in outcome)
    del download


@pytest.mark.parametrize("seed", range(20))
def test_a_device_computes_in_host_memory_when_the_bytes_are_there_and_until_they_are_overwritten(
    seed: int,
) -> None:
    mapped_course(CODE, seed)


def test_what_the_device_does_not_reach_is_copied() -> None:
    device = idle_device()
    copies = Copies(device)
    slots = MappedSlots(copies, lambda source: None, lambda: Slots(copies, [bytes_of(0)]))
    source = bytes_of(3)
    memory = slots.upload(source).wait()
    device.run_all()
    assert memory.data_ptr() != source.data_ptr() and bool((memory == 3).all())


MUTANTS = {
    "mapped memory is computed with before it landed": (
        "queues",
        "self._queues.compute.wait(self._landing)",
        "pass",
    ),
    "mapped memory is free while it is computed with": ("queues", "self._released.wait()", "pass"),
    "a release of mapped memory on the wrong queue": (
        "queues",
        "self._released = self._queues.compute.record()",
        "self._released = self._queues.uploads.record()",
    ),
    "a slot is refilled while it is in use": (
        "queues",
        "else [self.free, self.filled]",
        "else [self.filled]",
    ),
    "new memory is filled while its last owner uses it": (
        "queues",
        "before = [self.free] if",
        "before = [] if",
    ),
    "two queues fill one slot at once": (
        "queues",
        "else [self.free, self.filled]",
        "else [self.free]",
    ),
    "compute does not wait for the bytes": (
        "queues",
        "self._slots.queues.compute.wait(self._filled)",
        "pass",
    ),
    "a release says nothing": (
        "queues",
        "        self._slot.leave(self._slots.queues.compute.record())\n",
        "",
    ),
    "a release on the wrong queue": (
        "queues",
        "self._slot.leave(self._slots.queues.compute.record())",
        "self._slot.leave(self._slots.queues.uploads.record())",
    ),
    "allocated on the wrong queue": (
        "queues",
        "free = compute.record()",
        "free = copies.queues.uploads.record()",
    ),
    "memory goes back while it is gathered from": (
        "queues",
        "        compute.wait(slot.free)  # it",
        "        pass  # it",
    ),
    "memory goes back while it is filled": ("queues", "compute.wait(slot.filled)", "pass"),
    "nobody sees memory go back": (
        "queues",
        "weakref.finalize(self, _let_go, compute, slots).atexit = False",
        "pass",
    ),
    "drained at once": ("queues", "self._filled.wait()", "pass"),
    "a lease that was taken again is free": (
        "queues",
        "self._slots.free.remove(self._slot)",
        "pass",
    ),
    "a second release forgets the first": (
        "queues",
        "self._slots.queues.compute.wait(self._slot.free)",
        "pass",
    ),
    "copies wait for nothing": ("queues", "self._queue.wait(event)", "pass"),
    "what was downloaded is uploaded before it landed": ("queues", "(*after, landing)", "after"),
    "no landing is known": ("queues", "self._landings[_address(target)] = done", "pass"),
    "downloads do not wait for compute": ("queues", "[self.queues.compute.record()]", "[]"),
    "done before it is copied": (
        "queues",
        "        self._queue.copy(target, source)\n        done = self._queue.record()\n",
        "        done = self._queue.record()\n        self._queue.copy(target, source)\n",
    ),
    "host memory goes while it is copied": (
        "queues",
        "self._in_flight.append((done, host))",
        "pass",
    ),
    "host memory is forgotten early": ("queues", "and self._in_flight[0][0].happened()", ""),
    "a release of a download does nothing": (
        "queues",
        "self._queues.compute.wait(self._landed)",
        "pass",
    ),
    "a dropped download frees its source": ("queues", "    compute.wait(landed)", "    pass"),
    "a download does not hold its source": (
        "queues",
        "self._landed, source\n",
        "self._landed, target\n",
    ),
    "landed at once": ("queues", "self._landed.wait()", "pass"),
    "a gathering overwrites what is in use": ("replicas", "gathers.wait(compute.record())", "pass"),
    "compute does not wait for a gathering": (
        "replicas",
        "self._queues.compute.wait(self._done)",
        "pass",
    ),
    "a dropped gathering frees its memory": ("replicas", "    compute.wait(done)", "    pass"),
    "a gathering that is not held": (
        "replicas",
        "compute, done, target)\n        self",
        "compute, done, None)\n        self",
    ),
    "gathered before it is": (
        "replicas",
        "return _Gathering(self._queues, gathers.record(), compute, target)",
        "return _Gathering(self._queues, compute.record(), compute, target)",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_any_one_of_its_waits_some_course_goes_wrong(mutant: str) -> None:
    code = code_under_test(*MUTANTS[mutant])
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(COURSES):
            mapped_course(code, seed)
            Scenario(code, seed).run()


def idle_device() -> FakeDevice:
    """Return a device that does nothing before somebody waits for it."""
    device = FakeDevice(Random(0))
    device._eager = 0.0
    return device


def bytes_of(value: int) -> Tensor:
    return torch.full((64,), value, dtype=torch.uint8)


def waits(queue: FakeQueue) -> list[FakeEvent]:
    return [work for work in queue.work if isinstance(work, FakeEvent)]


def test_compute_goes_on_while_a_layer_is_gathered() -> None:
    device = idle_device()
    copies = Copies(device)
    slots = Slots(copies, [bytes_of(0)])
    whole = bytes_of(0)
    gathering = QueuedReplicas(Sender(device), device).gather(slots.upload(bytes_of(3)), whole)
    assert not waits(device.queues[0]), "compute waits for what it does not need yet"
    assert waits(device.gathers), "this test sees nobody wait at all"
    gathering.wait()
    assert len(waits(device.queues[0])) == 1
    device.run_all()
    assert bool((whole == 3).all())


def test_weights_do_not_stand_behind_boundaries() -> None:
    """A boundary on its way back waits for the compute that made it; weights are on their way
    long before that.
    """
    device = idle_device()
    copies = Copies(device)
    rings = [Slots(copies, [bytes_of(0)]) for _ in range(2)]
    host = bytes_of(0)
    device.compute.do(lambda: None)
    download = CopyDown(copies, bytes_of(5), host)
    device.uploads.work.clear()
    back = rings[0].upload(host)
    weights = rings[1].upload(bytes_of(7))
    (free,) = waits(device.uploads)
    assert waits(device.returns) and waits(device.downloads)
    device.run_until(free)
    while device.uploads.ready():
        device.uploads.advance()
    assert weights._filled.done and not back._filled.done
    device.run_all()
    assert bool((back.wait() == 5).all()) and bool((weights.wait() == 7).all())
    del download


def test_no_wait_is_left_out_of_the_list() -> None:
    """Every line that waits or records is one of those taken away above."""
    listed = [(name, old) for name, old, _ in MUTANTS.values()]
    for name, module in MODULES.items():
        for line in Path(str(module.__file__)).read_text().splitlines():
            if any(word in line for word in (".wait(", ".record()")) and "def " not in line:
                known = [
                    old
                    for changed, old in listed
                    if changed == name and (old.strip() in line or line in old)
                ]
                assert known or any(line.strip() in text for text in ALSO), (
                    f"{name}.py: {line.strip()}"
                )


ALSO = (
    # What a gathering does in its own queue: the test below.
    "self._replicas.gather(upload, target).wait()",
)
