"""Freed memory is given back to the system where memory is scarce, and only there."""

from pathlib import Path

import pytest
import torch
from smallrun import batch, opened, settings, write_model

from lema_cpu import CpuBackend, heap

PLENTY = 1 << 50
SCARCE = 0
COUNT = 200
SIZE = 1 << 20  # tensors, of bytes that malloc takes from its heap once it has seen some freed


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
    # from now on tensors of this size come from the heap
    warm = torch.ones(16 << 20, dtype=torch.uint8)
    del warm
    tensors = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(COUNT)]
    return tensors[::2]


def own_bytes() -> int:
    return heap.Heap()._own_bytes()


def test_free_memory_goes_back_when_memory_is_scarce_and_no_value_changes(looks: list[int]) -> None:
    backend = CpuBackend()
    stay = scattered()
    before = own_bytes()
    backend.end_visit()
    assert own_bytes() > before - COUNT * SIZE // 8, "memory was given back though there was enough"
    looks.append(SCARCE)
    stay += scattered()  # grows, so that it looks again
    before = own_bytes()
    backend.end_visit()
    assert before - own_bytes() > COUNT * SIZE // 4
    assert all(bool((one == 1).all()) for one in stay)


def test_it_looks_only_after_the_process_has_grown(looks: list[int]) -> None:
    backend = CpuBackend()
    backend.end_visit()
    once = len(looks)
    for _ in range(10):
        backend.end_visit()
    assert len(looks) == once == 2
    # not malloc's, which may have memory left
    grown = CpuBackend().host_buffer(2 * heap.GROWTH).fill_(1)
    backend.end_visit()
    assert len(looks) == once + 1
    del grown


def test_a_step_looks_after_each_visit_but_that_of_the_top_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = list[None]()
    monkeypatch.setattr(CpuBackend, "end_visit", lambda _: visits.append(None))
    model = write_model(tmp_path / "model", num_hidden_layers=4)
    with opened(settings(model, tmp_path / "out", gradient_checkpointing=True)) as streamed:
        before = streamed.memory.counters.leases
        streamed.get_trainer().train_step(batch(1)["input_ids"])
        # three layers in both directions, and the top one
        assert len(visits) == 6 == streamed.memory.counters.leases - before - 1


def test_another_malloc_is_left_alone(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "c_function", lambda _: None)
    CpuBackend().end_visit()
    assert looks == [PLENTY]
