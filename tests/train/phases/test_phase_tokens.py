"""Tokens among steps: whole steps, and what is left over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.errors import ConfigError
from lema.train.phases.plan import TokenSteps, steps_of

counts = st.integers(1, 600)


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
