"""What carries bytes keeps a backend's promises: at once, and in torch's streams, whatever
accelerator has them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cudascenario import Scenario
from fakestreams import DEVICE, FakeTorch
from latedevice import LateDevice
from queuefakes import FakeDevice, FakeEvent
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lema.backend import Backend, Carrier, DeviceSlots, Download
from lema.backend import torchstreams as streams
from lema.backend.queues import Copies, CopyDown, Slots
from lema.backend.torchstreams import TorchCarrier, carrier_for
from lema.testing.copies import CopyPromises
from lema_cpu import CpuBackend


class Carried(CpuBackend):
    """A backend whose bytes a carrier carries."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier

    @property
    def device(self) -> torch.device:
        return self.carrier.device

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        return self.carrier.host_buffer(nbytes) if memory is None else memory

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return self.carrier.device_slots(nbytes, count)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return self.carrier.download(source, target)


class TestAtOnce(CopyPromises):
    def backend(self) -> Backend:
        return Carried(TorchCarrier(torch.device("cpu"), at_once=True))


class TestStreamsAsLateAsCanBe(CopyPromises):
    seed: int | None = None

    @pytest.fixture(autouse=True)
    def fake_torch(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.torch = FakeTorch(monkeypatch)
        yield

    def backend(self) -> Backend:
        self.torch.device = LateDevice(self.seed).queues
        return Carried(TorchCarrier(torch.device("cpu"), at_once=False))


class TestStreamsAtAnyMoment(TestStreamsAsLateAsCanBe):
    seed = 5


class BusyDevice(CopyPromises):
    busy_matmuls = 20

    def keep_busy(self) -> None:
        # cycles, about 30 ms: products alone are done as fast as they are queued
        torch.cuda._sleep(50_000_000)


@pytest.mark.cuda
class TestStreamsOfADevice(BusyDevice):
    def backend(self) -> Backend:
        return Carried(carrier_for(torch.device("cuda")))

    def test_they_are_streams(self) -> None:
        assert not carrier_for(torch.device("cuda")).at_once
        assert carrier_for(torch.device("cuda")).host_buffer(100).is_pinned()


@pytest.mark.cuda
class TestAtOnceOnADevice(BusyDevice):
    def backend(self) -> Backend:
        return Carried(carrier_for(torch.device("cuda"), use_streams=False))


def scenario(fake: FakeTorch, seed: int) -> Scenario:
    """Return a random course on the queues that `TorchCarrier` makes."""

    def copies(device: FakeDevice) -> Copies:
        fake.device = device
        return Copies(streams._Queues(DEVICE))

    unused = SimpleNamespace(gather=lambda *_: SimpleNamespace(wait=lambda: None))
    code = SimpleNamespace(
        Copies=copies, Slots=Slots, CopyDown=CopyDown, QueuedReplicas=lambda *_: unused
    )
    course = Scenario(code, seed)
    course.gather = course.end_gather = lambda: None  # type: ignore[method-assign]
    return course


def test_torchs_streams_keep_the_order_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch(monkeypatch)
    for seed in range(300):
        scenario(fake, seed).run()


MUTANTS = {
    "a stream waits for nothing": (streams._Queue, "wait", lambda self, event: None),
    "a copy runs where compute does": (
        streams._Queue,
        "copy",
        lambda self, target, source: streams._Queues(DEVICE).compute._stream.queue.copy(
            target, source
        ),
    ),
    "nobody waits for an event": (streams._Event, "wait", lambda self: None),
    "every event has happened": (streams._Event, "happened", lambda self: True),
    "compute is another stream": (
        streams._Queues,
        "compute",
        property(lambda self: self.downloads),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_one_of_them_some_course_goes_wrong(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTorch(monkeypatch)
    owner, name, instead = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(1500):
            scenario(fake, seed).run()


def test_a14_compute_is_the_stream_that_is_current_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user may compute on a stream of theirs: its work is waited for, and it waits, not the
    one that was first.
    """
    fake = FakeTorch(monkeypatch)
    fake.device = device = FakeDevice(Random(0), holds_tensors=True)
    device._eager = 0.0
    carrier = TorchCarrier(DEVICE, at_once=False)
    first = device.compute
    theirs = device.queues[1]
    with theirs.current():
        download = carrier.download(
            torch.full((64,), 7, dtype=torch.uint8), carrier.host_buffer(64)
        )
        download.release()
        carrier.device_slots(64, 1).upload(carrier.host_buffer(64)).wait()
    assert not first.work
    assert any(isinstance(work, FakeEvent) for work in theirs.work)
    device.run_all()


class Recorded(TorchFunctionMode):
    """Remembers what memory was asked for, and gives memory as a machine without a device can."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            self.asked.append((args, dict(kwargs)))
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


@pytest.mark.parametrize("pinned", [True, False])
def test_host_buffers_are_page_locked_when_that_is_asked_for(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTorch(monkeypatch)
    fake.device = FakeDevice(Random(0))
    for carrier in (
        TorchCarrier(DEVICE, at_once=at_once, pin_memory=pinned) for at_once in (False, True)
    ):
        with Recorded() as recorded:
            assert len(carrier.host_buffer(5000)) == 5000
        assert any(named.get("pin_memory") for _, named in recorded.asked) is pinned


def test_page_locked_memory_begins_at_a_page_though_torch_may_not_give_it_so() -> None:
    class Unaligned(Recorded):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            memory = super().__torch_function__(function, types, args, kwargs)
            return (
                torch.zeros(len(memory) + 512, dtype=torch.uint8)[512:]
                if function is torch.empty
                else memory
            )

    for nbytes in (1, 4096, 5000):
        with Unaligned():
            buffer = TorchCarrier(DEVICE, at_once=True, pin_memory=True).host_buffer(nbytes)
        assert tuple(buffer.shape) == (nbytes,) and buffer.data_ptr() % mmap.PAGESIZE == 0


CHOICES = [
    # The device, torch's accelerator, whether its module has streams, and what is asked: copies at
    # once, pages locked.
    ("cpu", None, True, {}, True, False),
    ("cpu", "cuda", True, {}, True, False),
    ("cuda:0", "cuda", True, {}, False, True),
    ("cuda:0", "cuda", True, {"pin_memory": False}, False, False),
    ("cuda:0", "cuda", True, {"use_streams": False}, True, True),
    ("cuda:0", "xpu", True, {}, True, False),
    ("xpu:0", "xpu", True, {}, False, True),
    ("mps:0", "mps", False, {}, True, True),
    ("meta", None, False, {}, True, False),
]


@pytest.mark.parametrize(
    ("device", "accelerator", "has_streams", "asked", "at_once", "pinned"), CHOICES
)
def test_streams_are_taken_where_torch_has_them(
    device: str, accelerator: str | None, has_streams: bool, asked: dict[str, bool], at_once: bool, pinned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    current = None if accelerator is None else torch.device(accelerator)
    module = SimpleNamespace(Stream=object) if has_streams else SimpleNamespace()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "Stream", lambda device: SimpleNamespace(device=device))
    carrier = carrier_for(torch.device(device), **asked)
    assert carrier.at_once is at_once and carrier.device == torch.device(device)
    with Recorded() as recorded:
        carrier.host_buffer(64)
    assert any(named.get("pin_memory") for _, named in recorded.asked) is pinned
