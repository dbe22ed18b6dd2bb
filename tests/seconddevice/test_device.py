"""The second device is as strict as an accelerator: late, apart from the host, and no larger
than it says.
"""

import gc
import threading

import pytest
import torch
from seconddevice import SecondDevice
from torch import Tensor, nn

DEVICE = "second"


def copied_late(source: Tensor) -> tuple[Tensor, torch.Event]:
    """Queue a copy to the device on a stream of its own; return where it goes, and when it is
    done.
    """
    target = torch.zeros(source.shape, dtype=source.dtype, device=DEVICE)
    stream = torch.Stream(device=DEVICE)
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with stream:
        target.copy_(source, non_blocking=True)
    return target, stream.record_event()


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


def test_new_memory_is_not_a_number() -> None:
    assert bool(torch.empty(7, device=DEVICE).isnan().all())


def test_memory_is_freed_for_real_and_counted(second: SecondDevice) -> None:
    gc.collect()
    before = second.used
    held = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert second.used == before + (1 << 20) == torch.accelerator.memory_allocated()
    del held
    assert second.used == before


def test_beyond_its_limit_it_raises_torchs_own_error(second: SecondDevice) -> None:
    with (
        second.limited(second.used + 1000),
        pytest.raises(torch.OutOfMemoryError, match="40000 bytes"),
    ):
        torch.empty(10_000, device=DEVICE)


def test_kernels_refuse_host_memory_but_for_scalars() -> None:
    on_device = torch.ones(4, device=DEVICE)
    assert float((on_device * torch.tensor(3.0)).sum()) == 12.0
    with pytest.raises(RuntimeError, match=r"same device|two devices"):
        torch.ops.aten.mul.Tensor(on_device, torch.ones(4))
    with pytest.raises(RuntimeError, match="two devices"):
        nn.functional.embedding(torch.tensor([1], device=DEVICE), torch.ones(4, 2))


@pytest.mark.parametrize("offset", [0, 2])
def test_products_by_groups_ask_for_sixteen_bytes(offset: int) -> None:
    flat = torch.zeros(2 * 8 * 8 + 8, dtype=torch.float32, device=DEVICE)
    weights = flat[offset : offset + 128].view(2, 8, 8)
    ends = torch.tensor([2, 4], dtype=torch.int32, device=DEVICE)
    call = torch.nn.functional.grouped_mm
    if offset == 0:
        assert call(torch.ones(4, 8, device=DEVICE), weights, offs=ends).shape == (4, 8)
    else:
        with pytest.raises(RuntimeError, match="16 bytes"):
            call(torch.ones(4, 8, device=DEVICE), weights, offs=ends)


def test_what_is_not_waited_for_is_not_there(second: SecondDevice) -> None:
    with second.course(order_checked=False):
        source = pinned(1, 2, 3)
        target, done = copied_late(source)
        assert float(target.sum()) == 0.0
        torch.accelerator.current_stream().wait_event(done)
        assert float(target.sum()) == 6.0


def test_a_copy_reads_its_source_when_it_runs(second: SecondDevice) -> None:
    with second.course(order_checked=False):
        source = pinned(1, 2, 3)
        target, done = copied_late(source)
        source.fill_(5)  # too early
        torch.accelerator.current_stream().wait_event(done)
        assert float(target.sum()) == 15.0


@pytest.mark.parametrize("seed", range(3))
def test_reading_without_a_wait_is_refused_whenever_streams_run(
    second: SecondDevice, seed: int
) -> None:
    source = pinned(1, 2, 3)
    with second.course(seed):
        target, done = copied_late(source)
        with pytest.raises(RuntimeError, match="a wait is missing"):
            target.sum()
        torch.accelerator.current_stream().wait_event(done)
        assert float(target.sum()) == 6.0


def test_writing_what_another_stream_still_reads_is_refused() -> None:
    """Kernels are done at once here, so the numbers alone would not show it."""
    target = torch.zeros(3, device=DEVICE)
    target + 1
    stream = torch.Stream(device=DEVICE)
    with stream, pytest.raises(RuntimeError, match="a wait is missing"):
        target.copy_(pinned(1, 2, 3), non_blocking=True)


def test_memory_that_is_freed_under_a_copy_is_told() -> None:
    source = pinned(1, 2, 3)
    target, done = copied_late(source)
    del target
    with pytest.raises(RuntimeError, match="freed while"):
        torch.ones(1, device=DEVICE)
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    target, done = copied_late(source)
    torch.accelerator.current_stream().wait_event(done)
    del target
    torch.accelerator.synchronize()


def test_waits_of_the_host_are_counted(second: SecondDevice) -> None:
    source = pinned(1, 2)
    target = torch.zeros(2, device=DEVICE)
    second.forget_waits()
    target.copy_(source, non_blocking=True)
    assert second.host_waits == 0
    target.copy_(source)
    target.copy_(torch.ones(2), non_blocking=True)  # which no device can read by itself
    assert second.waits() == {"copy to the device": 2}
    assert target.sum().item() == 2.0
    assert second.waits()["aten::_local_scalar_dense"] == 1


def test_a_backward_runs_in_a_thread_of_the_device() -> None:
    threads: list[threading.Thread] = []
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    product = weight * 2
    product.register_hook(lambda _: threads.append(threading.current_thread()))
    product.sum().backward()
    assert threads and threads[0] is not threading.main_thread()


def test_autocast_computes_products_in_half_precision_and_norms_in_full() -> None:
    weight, state = (torch.randn(4, 4, device=DEVICE) for _ in range(2))
    with torch.autocast("second", dtype=torch.bfloat16):
        product = nn.functional.linear(state, weight)
        assert product.dtype == torch.bfloat16
        assert nn.functional.softmax(product, -1).dtype == torch.float32
