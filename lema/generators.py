"""What a stop goes back to: the states of all generators of random numbers at one moment, kept in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lema.backend import Backend

__all__ = ["Generators"]


@dataclass(frozen=True)
class Generators:
    """The states of Python's, NumPy's, torch's and the device's generators, as each of them gives its own."""

    python: Any
    numpy: Any
    torch: Tensor
    device: Tensor

    @classmethod
    def now(cls, backend: Backend) -> Self:
        """Return the states at this moment."""
        numpy_state = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), backend.rng_state())

    def put_back(self, backend: Backend) -> None:
        """Let the generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        backend.set_rng_state(self.device)
