"""Rounds to a narrower type, to the nearest value or at random between the two neighbours.

A weight drawn with a spread of 0.02 has neighbours about 1e-4 apart in bfloat16. A change of 1e-6 is nearly always lost
to the nearest one, and with it what was trained. Stochastic rounding (Gupta et al. 2015,
https://arxiv.org/abs/1502.02551) takes each neighbour with the probability that makes the mean exact.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Rounding", "rounded"]

Rounding = Literal["nearest", "stochastic"]


def rounded(exact: Tensor, dtype: torch.dtype, rounding: Rounding, seed: int, name: str) -> Tensor:
    """Return `exact` as `dtype`.

    What is drawn depends on `seed`, `name` and the place in the tensor, and on nothing that was drawn before: a model
    is rounded alike in any order and in any number of files.

    Args:
        exact: fp32, where it is to be rounded at random.
        dtype: the type wanted. What is not a half precision is rounded to the nearest.
        rounding: `nearest`, or `stochastic`: up or down, such that the mean is exact. Infinite values and those beyond
            the largest of the type are rounded to the nearest in both.
        seed: of what is drawn.
        name: of the tensor.
    """
    near = exact.to(dtype)
    if rounding == "nearest" or dtype not in (torch.bfloat16, torch.float16):
        return near
    missed = exact - near.to(exact.dtype)
    bits = near.view(torch.int16)
    away = torch.signbit(missed) == torch.signbit(near)  # floating point counts in magnitudes from zero
    other = torch.where(away, bits + 1, bits - 1).view(dtype)
    share = missed.abs() / (other.to(exact.dtype) - near.to(exact.dtype)).abs()
    drawn = torch.rand(exact.shape, generator=_generator(seed, name), dtype=torch.float32).to(exact.device)
    taken = (missed != 0) & (drawn < share)  # NaN is less than nothing
    return torch.where(taken, other, near)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
