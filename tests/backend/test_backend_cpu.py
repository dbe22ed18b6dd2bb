"""What the reference backend does beyond the contract: moves nothing by default, and poisons
what is released.
"""

import psutil
import pytest
import torch

from lema.backend import Backend, available, load
from lema.backend.hostmemory import HUGE_PAGE
from lema.errors import BackendUnavailable
from lema.stream.placement import PAGE
from lema_cpu import CpuBackend
from lema_cpu.backend import NAN_BYTE

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def test_it_is_installed_and_opened_by_name() -> None:
    assert isinstance(load("cpu"), CpuBackend)
    (info,) = [info for info in available() if info.name == "cpu"]
    assert info.ok and info.reason is None and info.source == "lema_cpu:CpuBackend"


def test_there_is_one_device() -> None:
    with pytest.raises(BackendUnavailable, match="one device") as caught:
        load("cpu:1")
    assert caught.value.where == "device: cpu:1"
    assert caught.value.how == "write device: cpu"
    assert CpuBackend().device == torch.device("cpu")


def test_what_is_opened_is_a_backend_of_one_process() -> None:
    for backend in (CpuBackend(), CpuBackend(poison=True)):
        assert isinstance(backend, Backend)
        assert (backend.parallel.rank, backend.parallel.size) == (0, 1)


def test_nothing_is_copied_where_the_host_is_the_device() -> None:
    backend = CpuBackend()
    source = backend.host_buffer(3 * PAGE)
    upload = backend.device_slots(4 * PAGE, 2).upload(source)
    assert upload.wait().data_ptr() == source.data_ptr()
    upload.release()
    upload.drained()


def test_a_host_buffer_takes_no_memory_until_it_is_written() -> None:
    process = psutil.Process()
    size = 256 << 20
    before = process.memory_info().rss
    buffer = CpuBackend().host_buffer(size)
    assert process.memory_info().rss - before < size // 4
    buffer[: size // 2] = 1
    assert process.memory_info().rss - before > size // 4


@pytest.mark.parametrize("size", [HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + PAGE + 17])
def test_a_host_buffer_begins_where_a_huge_page_could_and_ends_where_it_should(size: int) -> None:
    """What does not fill a huge page takes small ones: memory is what was asked for."""
    buffer = CpuBackend().host_buffer(size)
    assert buffer.numel() == buffer.untyped_storage().nbytes() == size
    assert buffer.data_ptr() % (HUGE_PAGE if size >= HUGE_PAGE else PAGE) == 0
    before = psutil.Process().memory_info().rss
    buffer.fill_(1)
    assert psutil.Process().memory_info().rss - before < size + HUGE_PAGE // 2


def test_a_host_buffer_outlives_the_backend_that_made_it() -> None:
    backend = CpuBackend()
    buffer = backend.host_buffer(PAGE).fill_(3)
    backend.close()
    del backend
    assert int(buffer.sum()) == 3 * PAGE


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_released_slot_reads_as_nan_in_every_floating_dtype(dtype: torch.dtype) -> None:
    slots = CpuBackend(poison=True).device_slots(PAGE, 1)
    upload = slots.upload(torch.zeros(PAGE, dtype=torch.uint8))
    slot = upload.wait()
    assert not bool(slot.view(dtype).float().isnan().any())
    upload.release()
    assert bool(slot.view(dtype).float().isnan().all())


def test_a_poisoned_slot_is_private() -> None:
    source = torch.ones(PAGE, dtype=torch.uint8)
    upload = CpuBackend(poison=True).device_slots(PAGE, 1).upload(source)
    source.fill_(7)
    assert bool((upload.wait() == 1).all())
    upload.wait().fill_(9)
    assert bool((source == 7).all())


def test_what_the_source_does_not_fill_is_poison_too() -> None:
    upload = CpuBackend(poison=True).device_slots(PAGE, 1).upload(torch.ones(8, dtype=torch.uint8))
    slot = upload.wait()
    assert slot.numel() == 8
    rest = torch.empty(0, dtype=torch.uint8).set_(slot.untyped_storage())[8:]
    assert rest.numel() == PAGE - 8 and bool((rest == NAN_BYTE).all())


def test_misuse_of_a_poisoned_slot_is_an_error() -> None:
    slots = CpuBackend(poison=True).device_slots(PAGE, 1)
    source = torch.ones(PAGE, dtype=torch.uint8)
    upload = slots.upload(source)
    with pytest.raises(AssertionError, match="more uploads"):
        slots.upload(source)
    upload.release()
    with pytest.raises(AssertionError, match="released twice"):
        upload.release()
    slots.upload(source).release()
    with pytest.raises(AssertionError, match="something else was uploaded to"):
        upload.wait()
    with pytest.raises(RuntimeError, match="size"):
        slots.upload(torch.ones(PAGE + 1, dtype=torch.uint8))


def test_a_slot_leased_again_brings_back_no_view_of_the_lease_before() -> None:
    slots = CpuBackend(poison=True).device_slots(PAGE, 1)
    upload = slots.upload(torch.ones(PAGE, dtype=torch.uint8))
    first = upload.wait()
    upload.release()
    second = upload.wait()
    assert bool((second == 1).all()) and bool((first == NAN_BYTE).all())
    with pytest.raises(AssertionError, match="more uploads"):
        slots.upload(first)
    upload.release()
    slots.upload(torch.zeros(PAGE, dtype=torch.uint8)).wait()
    assert bool((first == NAN_BYTE).all()) and bool((second == NAN_BYTE).all())


def test_the_generator_is_torchs_own() -> None:
    backend = CpuBackend()
    torch.manual_seed(3)
    assert torch.equal(backend.rng_state(), torch.get_rng_state())
    first = torch.rand(4)
    torch.manual_seed(3)
    state = backend.rng_state()
    torch.rand(9)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_memory_is_that_of_this_process() -> None:
    backend = CpuBackend()
    before = backend.memory()
    assert before.total == psutil.virtual_memory().total
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert backend.memory().peak >= before.used + block.numel() // 2
    assert int(block[0]) == 1
