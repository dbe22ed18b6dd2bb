"""Large results lie in memory that is used again, with the values they would have anywhere else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_bytes import ScratchBytes
from torch import Tensor

from lema.convert.buffers import LARGE, LargeInScratch, Scratch

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "stacked": lambda t: torch.stack([t, t.flip(0)], dim=1),
    "concatenated": lambda t: torch.cat((t, t.flip(0)), dim=-1),
    "concatenated by name": lambda t: torch.cat(tensors=[t, t.flip(0)], dim=1),
    "turned over": lambda t: t.transpose(1, 2).contiguous(),
    "turned over otherwise": lambda t: t.transpose(0, 2).contiguous(),
    "interleaved": lambda t: t.reshape(t.shape[0], -1, 2, t.shape[2]).transpose(1, 2).reshape(t.shape),
    "a part": lambda t: t.chunk(2, dim=2)[1].contiguous(),
    "a part turned over": lambda t: t[:, ::2].transpose(1, 2).contiguous(),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> ScratchBytes:
    return ScratchBytes(monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_large_results_have_the_same_values_and_lie_in_our_memory(
    taken: ScratchBytes, name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    source = torch.randint(-100, 100, (4, 512, LARGE // 1024), dtype=torch.int8).to(dtype)
    expected = OPERATIONS[name](source)
    with LargeInScratch(Scratch()):
        result = OPERATIONS[name](source)
    assert result.dtype == dtype and result.shape == expected.shape and result.is_contiguous()
    assert torch.equal(result, expected)
    assert taken.now == result.nbytes


def test_small_tensors_and_tensors_without_bytes_are_left_alone(taken: ScratchBytes) -> None:
    small, absent = torch.ones(3, 5), torch.empty(4, 1024, LARGE, device="meta")
    with LargeInScratch(Scratch()):
        for operation in (lambda t: torch.stack([t, t]), lambda t: torch.cat([t, t]), lambda t: t.t().contiguous()):
            assert torch.equal(operation(small), operation(small.clone()))
        assert torch.cat([absent, absent]).device.type == torch.stack([absent, absent]).device.type == "meta"
        assert absent.transpose(1, 2).contiguous().shape == (4, LARGE, 1024)
    assert taken.now == 0


def test_mixed_dtypes_are_promoted_as_ever() -> None:
    wide, narrow = torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bfloat16)
    with LargeInScratch(Scratch()):
        assert torch.cat([wide, narrow]).dtype == torch.float32


def test_neighbours_are_stacked_where_they_are() -> None:
    whole = torch.arange(24.0)
    neighbours = list(whole.view(4, 2, 3))
    with LargeInScratch(Scratch()):
        stacked = torch.stack(neighbours)
        others = [
            torch.stack([neighbours[1], neighbours[0]]),
            torch.stack([neighbours[0], neighbours[2]]),
            torch.stack([neighbours[0], whole[6:12].clone().view(2, 3)]),
            torch.stack([t.t() for t in neighbours]),
            torch.stack(neighbours, dim=1),
        ]
    assert stacked.data_ptr() == whole.data_ptr() and torch.equal(stacked, whole.view(4, 2, 3))
    assert all(other.data_ptr() != whole.data_ptr() for other in others)
    assert torch.equal(others[1], whole.view(4, 2, 3)[::2]) and torch.equal(
        others[4], whole.view(4, 2, 3).transpose(0, 1)
    )


@pytest.mark.parametrize("nbytes", [0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 7])
def test_memory_has_exactly_the_bytes_asked_for(nbytes: int) -> None:
    memory = Scratch().bytes(nbytes)
    memory.fill_(7)
    assert memory.dtype == torch.uint8 and memory.untyped_storage().nbytes() == memory.numel() == nbytes


def test_memory_is_used_again_only_when_no_tensor_lies_in_it() -> None:
    memory = Scratch()
    first = memory.bytes(LARGE)
    place, part = first.data_ptr(), first[5:9]
    del first
    other = memory.bytes(LARGE)
    assert other.data_ptr() != place  # a part of it is still in use
    del part
    assert memory.bytes(LARGE).data_ptr() == place


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 5)), max_size=30))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_is_never_more_memory_than_was_alive_at_once(
    taken: ScratchBytes, steps: list[tuple[int, bool, int]]
) -> None:
    memory, alive, most = Scratch(), list[Tensor](), 0
    for pages, take, which in steps:
        if take:
            alive.append(memory.bytes(pages * LARGE))
        elif alive:
            alive.pop(which % len(alive))
        most = max(most, sum(tensor.nbytes for tensor in alive))
        assert taken.now <= most
    del memory
    alive.clear()
    assert taken.now == 0
