"""Initial values of adapters, drawn in full from seed and module name, then cut: the same for
any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256

import torch
from torch import Tensor, nn

from lema_neuron.comm import Comm

__all__ = ["common_seed", "draw_a", "draw_b", "draw_vectors", "seeded"]

_SEED: ContextVar[int | None] = ContextVar("seed of adapters", default=None)
LIMBS = 4
BITS = 16  # of a seed: each of its parts is exact in any dtype of a device


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from this seed in a `with` block."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


def common_seed(comm: Comm, device: torch.device | str = "cpu") -> int:
    """Return the seed of `seeded`, or else that of the first rank's generator,
    `torch.initial_seed()`.
    """
    seed = _SEED.get()
    if seed is not None:
        return seed
    mine = torch.initial_seed()
    limbs = torch.tensor(
        [mine >> (BITS * index) & (2**BITS - 1) for index in range(LIMBS)], device=device
    )
    return sum(
        int(limb) << (BITS * index) for index, limb in enumerate(comm.broadcast(limbs, 0).tolist())
    )


def _generator(seed: int, name: str) -> torch.Generator:
    digest = sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw_a(shape: tuple[int, int], how: bool | str, seed: int, name: str) -> Tensor:
    """Return a whole first factor, `[rank, inputs]`, fp32 on the host, filled like PEFT's."""
    full = torch.empty(shape)
    if isinstance(how, str):
        return nn.init.normal_(full, std=1 / shape[0], generator=_generator(seed, name))
    return nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=_generator(seed, name))


def draw_b(shape: tuple[int, int], how: bool | str, seed: int, name: str) -> Tensor:
    """Return a whole second factor, `[outputs, rank]`: zeros, except with
    `init_lora_weights=False`.
    """
    if how is not False:
        return torch.zeros(shape)
    return nn.init.kaiming_uniform_(
        torch.empty(shape), a=math.sqrt(5), generator=_generator(seed, name)
    )


def draw_vectors(shape: tuple[int, int], seed: int, name: str) -> Tensor:
    """Return an embedding's whole second factor, `[features, rank]`, filled like PEFT's."""
    return nn.init.normal_(torch.empty(shape), generator=_generator(seed, name))
