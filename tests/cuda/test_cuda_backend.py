"""What can be known of the CUDA backend without a device: what it says is missing, and which host memory it locks."""

import gc
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import FakeDriver

import lema_cuda.backend
from lema.backend import Backend, BackendOptions, available, load
from lema.backend.hostmemory import HUGE_PAGE, anonymous
from lema.errors import BackendUnavailable, MemoryLimitError
from lema.testing.copies import CopyPromises
from lema_cuda import CudaBackend
from lema_cuda.device import choose_device
from lema_cuda.driver import CudaDriver
from lema_cuda.hostmemory import HostMemory

PAGE = 4096


def machine(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Have torch find two devices, or what `changes` says."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"):
        patch.delenv(name, raising=False)
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "compute_120"],
        "get_device_capability": lambda number: (8, 0),
        "get_device_name": lambda number: "A Device",
    }
    patch.setattr(torch.backends.cuda, "is_built", changes.pop("is_built", lambda: True))
    for name, value in {**found, **changes}.items():
        patch.setattr(torch.cuda, name, value)


def refuse(message: str) -> Callable[[], None]:
    def init() -> None:
        raise RuntimeError(message)

    return init


def warn(message: str) -> Callable[[], bool]:
    def is_available() -> bool:
        warnings.warn(message, stacklevel=1)
        return False

    return is_available


@pytest.mark.parametrize(
    ("device", "changes", "what", "how"),
    [
        ("cuda", {"is_built": lambda: False}, r"this torch \(.*\) was built without CUDA", "install a CUDA build"),
        (
            "cuda",
            {"is_available": lambda: False, "init": refuse("Found no NVIDIA driver\n on your system.")},
            "no CUDA device can be used: Found no NVIDIA driver on your system.",
            "nvidia-smi",
        ),
        (
            "cuda",
            {"is_available": warn("The NVIDIA driver is too old"), "init": refuse("it cannot begin")},
            "no CUDA device can be used: The NVIDIA driver is too old",
            "the driver is new enough",
        ),
        ("cuda", {"is_available": lambda: False}, "no CUDA device can be used: torch finds none", "CUDA_VISIBLE"),
        ("cuda:2", {}, "there is not a CUDA device 2: this process sees 2", "lower number"),
        (
            "cuda:0",
            {"get_device_capability": lambda number: (6, 1)},
            "A Device has compute capability 6.1, and this torch .* has kernels from 7.5 on",
            "an older CUDA",
        ),
        ("cuda:first", {}, "'cuda:first' is not a CUDA device", "cuda:1"),
        ("cuda:-1", {}, "'cuda:-1' is not a CUDA device", "cuda:1"),
    ],
    ids=["not built", "no driver", "old driver", "no device", "no such device", "old device", "no number", "negative"],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, Any], what: str, how: str
) -> None:
    machine(monkeypatch, **changes)
    with pytest.raises(BackendUnavailable, match=what) as caught:
        choose_device(device)
    assert how in caught.value.how
    assert caught.value.where == f"device: {device}"


@pytest.mark.parametrize(
    ("device", "environment", "number"),
    [
        ("cuda", {}, 1),
        ("cuda:0", {}, 0),
        ("cuda", {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 0),
        ("cuda", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1),
        ("cuda:0", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 0),
    ],
)
def test_each_process_has_its_device(
    monkeypatch: pytest.MonkeyPatch, device: str, environment: dict[str, str], number: int
) -> None:
    machine(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_device(device) == torch.device("cuda", number)


def test_processes_of_one_machine_cannot_share_a_device_or_have_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(BackendUnavailable, match="4 processes of this machine cannot share one device"):
        choose_device("cuda:0")
    with pytest.raises(BackendUnavailable, match="there is not a CUDA device 3: this process sees 2"):
        choose_device("cuda")


def test_a_device_newer_than_any_kernel_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (["sm_80", "compute_90"], ["gfx90a"], []):
        machine(monkeypatch, get_device_capability=lambda number: (12, 0), get_arch_list=lambda names=names: names)
        assert choose_device("cuda:0").index == 0


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch was built with CUDA")
def test_it_is_listed_with_what_it_lacks() -> None:
    (found,) = [info for info in available() if info.name == "cuda"]
    assert found.reason is not None and "was built without CUDA" in found.reason
    with pytest.raises(BackendUnavailable, match="was built without CUDA"):
        load("cuda")


# Host memory


def mapped_at(address: int) -> bool:
    """Whether this process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


class WatchfulDriver(FakeDriver):
    """Sees to it that what it unlocks is still there."""

    def unlock(self, address: int) -> None:
        assert mapped_at(address) and mapped_at(address + self.locked[address] - 1)
        super().unlock(address)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 5 * PAGE + 17, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_exactly_what_was_asked_for_is_locked_until_the_last_view_of_it_is_dropped(nbytes: int) -> None:
    driver = WatchfulDriver()
    buffer = HostMemory(driver).buffer(nbytes)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (nbytes,))
    assert driver.locked == {buffer.data_ptr(): nbytes}
    assert buffer.data_ptr() % PAGE == 0
    buffer.fill_(3)
    views: list[Any] = [buffer[:1].view(torch.int8), buffer.numpy(), memoryview(buffer.numpy())]
    del buffer
    while views:
        assert driver.locked, "memory is unlocked that is still in use"
        views.pop()
    assert not driver.locked


def test_nothing_is_nothing() -> None:
    driver = FakeDriver()
    for page_locked in (True, None, False):
        assert HostMemory(driver, page_locked).buffer(0).shape == (0,)
    assert not driver.locked


def test_memory_that_is_given_is_locked_where_it_is() -> None:
    driver, memory = WatchfulDriver(), anonymous(3 * PAGE)
    host = HostMemory(driver)
    buffers = [host.buffer(PAGE, memory[:PAGE]), host.buffer(2 * PAGE, memory[PAGE:])]
    buffers[1].fill_(8)
    assert bool((memory[PAGE:] == 8).all())
    assert driver.locked == {memory.data_ptr(): PAGE, memory.data_ptr() + PAGE: 2 * PAGE}
    del buffers[0]
    assert driver.locked == {memory.data_ptr() + PAGE: 2 * PAGE}
    del memory
    assert int(buffers[0][-1]) == 8
    buffers.clear()
    assert not driver.locked


def test_what_cannot_be_locked_is_an_error_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    host = HostMemory(FakeDriver(limit=2 * PAGE), page_locked=True)
    kept = host.buffer(2 * PAGE)
    with pytest.raises(MemoryLimitError, match="4,096 bytes of host memory cannot be page-locked: out of memory") as e:
        host.buffer(PAGE)
    assert "this process may lock 65,536 bytes" in e.value.what
    assert e.value.where == "page_locked: true"
    assert "ulimit -l" in e.value.how and "page_locked: false" in e.value.how
    del kept
    host.buffer(2 * PAGE)


def test_what_cannot_be_locked_is_pageable_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    driver = FakeDriver(limit=2 * PAGE)
    host = HostMemory(driver)
    with pytest.warns(UserWarning, match=r"may lock any number of bytes; copies .* slower; .*ulimit -l") as caught:
        buffers = [host.buffer(2 * PAGE), host.buffer(PAGE), host.buffer(PAGE)]
    assert len(caught) == 1
    assert len(driver.locked) == 1
    assert [len(buffer) for buffer in buffers] == [2 * PAGE, PAGE, PAGE]
    del buffers[0]
    buffers.append(host.buffer(PAGE))  # there is room again
    assert driver.locked == {buffers[-1].data_ptr(): PAGE}


def test_what_shall_not_be_locked_is_not() -> None:
    driver = FakeDriver()
    assert HostMemory(driver, page_locked=False).buffer(PAGE).shape == (PAGE,)
    assert not driver.locked


class Runtime:
    """The functions of the runtime library that torch binds; results are numbers in an enumeration there."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.result

    def cudaGetErrorString(self, result: int) -> str:
        return "no room"


class FakeStream:
    """A stream whose work is done at once."""

    current: Any = None

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_event(self, event: Any) -> None:
        assert event.recorded


class FakeTorchEvent:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread would spin"
        self.recorded = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded


@contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    before, FakeStream.current = FakeStream.current, stream
    yield
    FakeStream.current = before


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    yield


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Stand in for every part of torch that needs a device; what is computed is computed on the CPU."""
    found = Runtime()
    FakeStream.current = FakeStream()
    stands = {
        "set_device": lambda device: None,
        "Stream": FakeStream,
        "Event": FakeTorchEvent,
        "stream": on_stream,
        "device": on_device,
        "current_stream": lambda device: FakeStream.current,
        "cudart": lambda: found,
        "synchronize": lambda device: None,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
        "memory_allocated": lambda device: 5,
        "max_memory_allocated": lambda device: 7,
        "mem_get_info": lambda device: (4, 11),
        "memory_reserved": lambda device: 6,
    }
    for name, value in stands.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(lema_cuda.backend, "choose_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr("lema_cuda.torchqueues.PIECE", 3000)  # so that slots are copied in pieces
    return found


@pytest.mark.usefixtures("runtime")
class TestOnTorchItself(CopyPromises):
    """Copies go through streams, events and the runtime library by the names that torch gives them."""

    def backend(self) -> Backend:
        return CudaBackend()


def test_every_member_is_there(runtime: Runtime) -> None:
    with warnings.catch_warnings():
        backend = CudaBackend()
    assert isinstance(backend, Backend)
    assert backend.name == "cuda" and backend.replicas.size == backend.parallel.size == 1
    assert (backend.memory().used, backend.memory().peak, backend.memory().total) == (5, 7, 11)
    assert not backend.memory().shared
    backend.set_rng_state(backend.rng_state())
    backend.end_step()
    whole = torch.zeros(PAGE, dtype=torch.uint8)
    source = backend.host_buffer(PAGE)
    source.fill_(4)
    backend.replicas.gather(backend.device_slots(PAGE, 1).upload(source), whole).wait()
    assert bool((whole == 4).all())
    backend.close()


def test_memory_is_registered_for_every_device_and_unregistered(runtime: Runtime) -> None:
    backend = CudaBackend(options=BackendOptions(page_locked=True))
    buffer = backend.host_buffer(PAGE + 1)
    address = buffer.data_ptr()
    assert runtime.calls == [("register", address, PAGE + 1, 1)]
    del buffer
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address)]
    backend.close()


def test_a_refusal_is_passed_on_and_forgotten_by_the_runtime(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last error is what the next kernel would report: one is run that does, here."""
    runtime.result = 2
    reported: list[str] = []

    def report(*_: Any, **__: Any) -> None:
        reported.append("here")
        raise RuntimeError("CUDA error: no room")

    monkeypatch.setattr(torch, "ones", report)
    assert CudaDriver(torch.device("cpu")).lock(PAGE, PAGE) == "no room (CUDA error 2)"
    assert reported == ["here"]
    CudaDriver(torch.device("cpu")).unlock(PAGE)
    assert reported == ["here", "here"]
