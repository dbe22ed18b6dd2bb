"""Logits computed over other rows at once may differ in their last place, and in nothing else."""

import pytest
import torch

from lema.model.capture import alike

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _logits(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_differ_in_the_last_place_of_their_dtype_are_alike(dtype: torch.dtype) -> None:
    expected = _logits(dtype)
    assert alike(torch.nextafter(expected, torch.full_like(expected, torch.inf)), expected)
    assert alike(torch.nextafter(expected, torch.full_like(expected, -torch.inf)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_logit_that_is_another_number_is_not_alike(dtype: torch.dtype) -> None:
    found = _logits(dtype)
    expected = _logits(dtype)
    found[1, 3, 50] += 0.25
    assert not alike(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_masked_logit_does_not_excuse_the_others(dtype: torch.dtype) -> None:
    found = _logits(dtype)
    expected = _logits(dtype)
    found[..., 0] = expected[..., 0] = -torch.inf
    assert alike(found, expected)
    found[1, 3, 50] += 0.25
    assert not alike(found, expected)
