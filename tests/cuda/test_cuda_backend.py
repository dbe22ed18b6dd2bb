"""What can be known of the CUDA backend without a device, whatever torch was built with."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lema_accelerator.backend
from lema.backend import Backend, BackendOptions
from lema.backend.group import Alone
from lema.errors import BackendUnavailable
from lema.testing.copies import CopyPromises
from lema_accelerator import driver
from lema_accelerator.driver import RuntimeDriver
from lema_cuda import CudaBackend
from lema_cuda.attention import gives_nan

PAGE = 4096
DEVICE = torch.device("cpu", 0)


class Runtime:
    """The functions of the runtime library that torch binds; results are numbers in an
    enumeration there.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.result

    def cudaError(self, result: int) -> int:
        return result

    def cudaGetErrorString(self, result: int) -> str:
        return {2: "no room", 700: "an illegal address"}[result]


class Library:
    """The runtime library itself: its last error, and what it says of a device."""

    def __init__(self, *errors: int, pageable: int = 0) -> None:
        self.errors = list(errors)
        self.pageable = pageable

    def cudaGetLastError(self) -> int:
        return self.errors.pop() if self.errors else 0

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:
        assert attribute == 88 and index == 0
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.pageable
        return 0


class FakeStream:
    """A stream whose work is done at once."""

    current: Any = None

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.device_index = 0
        self._before: Any = None

    def wait_event(self, event: FakeTorchEvent) -> None:
        assert event.recorded

    def __enter__(self) -> FakeStream:
        self._before = FakeStream.current
        FakeStream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeStream.current = self._before


class FakeTorchEvent:
    def __init__(self, *, blocking: bool = False) -> None:
        assert blocking, "a thread would spin"
        self.recorded = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded


@contextmanager
def on_device(index: int) -> Iterator[None]:
    yield


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Stand in for every part of torch that needs a device; what is computed is computed on the
    CPU.
    """
    found = Runtime()
    FakeStream.current = FakeStream()
    module = SimpleNamespace(
        Stream=FakeStream,
        Event=FakeTorchEvent,
        current_stream=lambda index: FakeStream.current,
        cudart=lambda: found,
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: torch.set_rng_state(state),
        get_device_properties=lambda device: SimpleNamespace(is_integrated=False),
        mem_get_info=lambda: (4, 11),
    )
    answers = {
        "set_device_index": lambda index: None,
        "device_index": on_device,
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: 5,
        "max_memory_allocated": lambda device: 7,
        "memory_reserved": lambda device: 6,
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)  # as in torch 2.9
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer, raising=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    device_of(monkeypatch)
    monkeypatch.setattr(driver, "_library", Library)
    monkeypatch.setattr(lema_accelerator.backend, "choose_device", lambda device: DEVICE)
    # so that slots are copied in pieces
    monkeypatch.setattr("lema.backend.torchstreams.PIECE", 3000)
    return found


def device_of(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (8, 0),
    built_for: tuple[str, ...] = ("sm_75",),
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [*built_for])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")


@pytest.mark.usefixtures("runtime")
class TestOnTorchItself(CopyPromises):
    """Copies go through streams, events and the runtime library by the names that torch gives
    them.
    """

    def backend(self) -> Backend:
        return CudaBackend()


def test_every_member_is_there(runtime: Runtime) -> None:
    with warnings.catch_warnings():
        backend = CudaBackend()
    assert isinstance(backend, Backend)
    assert backend.name == "cuda" and backend.replicas.size == backend.parallel.size == 1
    memory = backend.memory()
    assert (memory.used, memory.peak, memory.total, memory.free) == (5, 7, 11, 10)
    assert not memory.shared
    backend.set_rng_state(backend.rng_state())
    backend.end_step()
    whole = torch.zeros(PAGE, dtype=torch.uint8)
    source = backend.host_buffer(PAGE)
    source.fill_(4)
    backend.replicas.gather(backend.device_slots(PAGE, 1).upload(source), whole).wait()
    assert bool((whole == 4).all())
    backend.close()


@pytest.mark.usefixtures("runtime")
def test_a_device_older_than_every_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(
        lema_accelerator.backend, "join", lambda *_: (Alone(), lambda: left.append("left"))
    )
    device_of(monkeypatch, (6, 1), ("sm_75", "sm_80", "sm_90", "compute_120"))
    with pytest.raises(
        BackendUnavailable,
        match=r"A Device has compute capability 6.1, and this torch .* has kernels from 7.5 on",
    ) as caught:
        CudaBackend()
    assert "an older CUDA" in caught.value.how
    assert left == ["left"], "the other processes wait for one that has gone"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("built_for", [("sm_80", "compute_90"), ("gfx90a",), ()])
def test_a_device_newer_than_any_kernel_is_not_refused(
    built_for: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of(monkeypatch, (12, 0), built_for)
    CudaBackend().close()


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("version", "capability", "off"),
    [
        ("2.11.0+cu130", (9, 0), True),
        ("2.13.0", (9, 0), True),
        ("2.10.1", (9, 0), False),
        ("2.13.0", (8, 0), False),
        ("2.13.0", (12, 0), False),
    ],
)
def test_attention_that_may_give_nan_is_off_while_the_backend_is_open(
    version: str,
    capability: tuple[int, int],
    off: bool,
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = {"on": before}
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: switch["on"])
    monkeypatch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: switch.update(on=enabled)
    )
    device_of(monkeypatch, capability)
    backend = CudaBackend()
    assert gives_nan(version, capability) is off
    assert switch["on"] is (before and not off)
    backend.close()
    assert switch["on"] is before


def test_memory_is_registered_for_every_device_and_unregistered(runtime: Runtime) -> None:
    backend = CudaBackend(options=BackendOptions(page_locked=True))
    buffer = backend.host_buffer(PAGE + 1)
    address = buffer.data_ptr()
    assert runtime.calls == [("register", address, PAGE + 1, 1)]
    del buffer
    gc.collect()
    assert runtime.calls[1:] == [("unregister", address)]
    backend.close()


def test_a_refusal_is_passed_on_and_forgotten_by_the_runtime(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last error is what the next kernel would report. No kernel is run to clear it, and no
    memory is taken.
    """
    runtime.result = 2
    library = Library(2, 2)
    monkeypatch.setattr(driver, "_library", lambda: library)
    for name in ("ones", "empty", "zeros"):
        monkeypatch.setattr(torch, name, None)
    assert RuntimeDriver(DEVICE).lock(PAGE, PAGE) == "no room (CUDA error 2)"
    assert library.errors == [2]
    RuntimeDriver(DEVICE).unlock(PAGE)
    assert library.errors == []


def test_an_error_of_another_reason_is_raised(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.result = 2
    monkeypatch.setattr(driver, "_library", lambda: Library(700))
    with pytest.raises(RuntimeError, match="an illegal address"):
        RuntimeDriver(DEVICE).lock(PAGE, PAGE)


def test_a_runtime_library_that_is_no_file_of_its_own_is_left_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.result = 2
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert RuntimeDriver(DEVICE).lock(PAGE, PAGE) == "no room (CUDA error 2)"
    assert not RuntimeDriver(DEVICE).reaches_all()


@pytest.mark.parametrize("pageable", [0, 1])
def test_a_device_without_memory_of_its_own_registers_only_what_it_does_not_reach(
    pageable: int, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch.get_device_module(DEVICE)
    monkeypatch.setattr(
        module, "get_device_properties", lambda device: SimpleNamespace(is_integrated=True)
    )
    monkeypatch.setattr(driver, "_library", lambda: Library(pageable=pageable))
    backend = CudaBackend()
    assert backend.memory().shared
    runtime.calls.clear()
    buffer = backend.host_buffer(PAGE)
    assert len(runtime.calls) == 1 - pageable
    assert backend.device_slots(PAGE, 1).upload(buffer).wait().data_ptr() == buffer.data_ptr()
    backend.close()


def test_the_library_that_is_loaded_is_called(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file that it was loaded from."""
    file = tmp_path / "maps"
    loaded = list[str]()
    monkeypatch.setattr(driver, "MAPS", file)
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    find = driver._library.__wrapped__
    file.write_text("7f0000-7f1000 r-xp 00000000 08:01 123   /usr/lib/libc.so.6\n")
    assert find() is None
    for name in (
        "/a b/nvidia/cuda_runtime/lib/libcudart.so.13",
        "/opt/rocm/lib/libamdhip64.so.7.0.1",
    ):
        file.write_text(f"7f0000-7f1000 r-xp 00000000 08:01 123   {name}\n")
        find()
        assert loaded.pop() == name
