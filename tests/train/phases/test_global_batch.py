"""Rows among processes and micro-batches, and tokens among steps: exactly, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.errors import ConfigError
from lema.train.phases.plan import GlobalBatch, TokenSteps, solve_batch, steps_of

counts = st.integers(1, 600)


@given(counts, st.none() | counts, st.integers(1, 16))
def test_the_micro_batch_is_the_largest_that_is_allowed_and_leaves_nothing_over(
    share: int, per_device: int | None, processes: int
) -> None:
    rows = share * processes
    batch = solve_batch(rows, per_device, processes)
    assert batch.micro_batch_size * batch.accumulation * batch.num_processes == batch.rows == rows
    assert batch.micro_batch_size <= (per_device or share)
    larger = range(batch.micro_batch_size + 1, min(share, per_device or share) + 1)
    assert all(rows % (size * processes) for size in larger)


@given(counts, st.integers(2, 16))
def test_rows_that_do_not_divide_are_refused_with_the_nearest_that_do(rows: int, processes: int) -> None:
    if rows % processes == 0:
        assert solve_batch(rows, None, processes).rows == rows
        return
    with pytest.raises(ConfigError, match=f"{rows} rows cannot be divided among {processes} processes") as caught:
        solve_batch(rows, None, processes)
    assert caught.value.where == "batch_size"
    offered = [int(word) for word in caught.value.how.replace(",", "").split() if word.isdecimal()]
    below, above = rows - rows % processes, rows - rows % processes + processes
    assert offered == ([below, above] if below else [above])
    assert all(solve_batch(one, None, processes).rows == one for one in offered)


def test_examples() -> None:
    assert solve_batch(512, 8, 4) == GlobalBatch(512, 8, 16, 4)
    assert solve_batch(12, 5, 1) == GlobalBatch(12, 4, 3, 1)
    assert solve_batch(7, 4, 1) == GlobalBatch(7, 1, 7, 1)
    assert solve_batch(8) == GlobalBatch(8, 8, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "key"), [((0, 1, 1), "batch_size"), ((4, 0, 1), "micro_batch_size"), ((4, 1, 0), "processes")]
)
def test_numbers_below_one_are_refused(arguments: tuple[int, int, int], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be at least 1, not 0"):
        solve_batch(*arguments)


@given(st.integers(1, 10**13), counts, st.integers(1, 8192))
def test_steps_take_no_more_tokens_than_were_given_and_leave_less_than_a_step(
    tokens: int, rows: int, block: int
) -> None:
    step = rows * block
    if tokens < step:
        with pytest.raises(ConfigError, match="do not make one step") as caught:
            steps_of(tokens, rows, block)
        assert f"give at least {step} tokens" in caught.value.how
        return
    found = steps_of(tokens, rows, block)
    assert found.steps * step == found.tokens
    assert found.tokens + found.leftover == tokens
    assert 0 <= found.leftover < step


def test_there_is_no_extra_step() -> None:
    assert steps_of(8 * 4 * 16, 4, 16) == TokenSteps(8, 512, 0)
    assert steps_of(8 * 4 * 16 - 1, 4, 16) == TokenSteps(7, 448, 63)
    assert steps_of(10**9, 512, 512) == TokenSteps(3814, 3814 * 512 * 512, 10**9 - 3814 * 512 * 512)
