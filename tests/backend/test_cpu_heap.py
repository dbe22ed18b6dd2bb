"""Freed memory is given back to the system where memory is scarce, and only there."""

import pytest
import torch

from lema_cpu import CpuBackend, heap

PLENTY, SCARCE = 1 << 50, 0
COUNT, SIZE = 200, 1 << 20  # tensors, of bytes that malloc takes from its heap once it has seen some freed


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The answers about available memory that were asked for; the last one is given again."""
    asked = [PLENTY]

    def available() -> int:
        asked.append(asked[-1])
        return asked[-1]

    monkeypatch.setattr(heap, "memory_available", available)
    return asked


def scattered() -> list[torch.Tensor]:
    """Free every second of many tensors, between others that stay: malloc keeps the memory."""
    warm = torch.ones(16 << 20, dtype=torch.uint8)  # from now on tensors of this size come from the heap
    del warm
    tensors = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(COUNT)]
    return tensors[::2]


def release(slots: object) -> None:
    slots.upload(torch.empty(1, dtype=torch.uint8)).release()  # type: ignore[attr-defined]


def test_free_memory_goes_back_when_memory_is_scarce_and_no_value_changes(looks: list[int]) -> None:
    slots, stay = CpuBackend().device_slots(1, 2), scattered()
    before = heap._own_bytes()
    release(slots)
    assert heap._own_bytes() > before - COUNT * SIZE // 8, "memory was given back though there was enough"
    looks.append(SCARCE)
    stay += scattered()  # grows, so that it looks again
    before = heap._own_bytes()
    release(slots)
    assert before - heap._own_bytes() > COUNT * SIZE // 4
    assert all(bool((one == 1).all()) for one in stay)


def test_it_looks_only_after_the_process_has_grown(looks: list[int]) -> None:
    slots = CpuBackend().device_slots(1, 2)
    release(slots)
    once = len(looks)
    for _ in range(10):
        release(slots)
    assert len(looks) == once == 2
    grown = CpuBackend().host_buffer(2 * heap.GROWTH).fill_(1)  # not malloc's, which may have memory left
    release(slots)
    assert len(looks) == once + 1
    del grown


def test_another_malloc_is_left_alone(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: object())
    release(CpuBackend().device_slots(1, 2))
    assert looks == [PLENTY]
