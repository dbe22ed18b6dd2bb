"""The states of all random generators: as JSON in a checkpoint, or in memory for a stop that goes back to a moment.

A resumed run draws the same numbers as one that was not stopped.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lema.backend import Backend

__all__ = ["Generators", "restore_own", "states_of_all"]


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


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

    def put_back(self, backend: Backend | None) -> None:
        """Let the generators go on from here; without a backend, those of the host alone."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if backend is not None:
            backend.set_rng_state(self.device)

    def to_json(self) -> dict[str, Any]:
        """Return the states as JSON types."""
        version, words, gauss = self.python
        inner = self.numpy["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": {**self.numpy, "state": {**inner, "key": inner["key"].tolist()}},
            "torch": _encode(self.torch),
            "device": _encode(self.device),
        }

    @classmethod
    def from_json(cls, states: Mapping[str, Any]) -> Self:
        """Return what `to_json` was made of."""
        version, words, gauss = states["python"]
        inner = states["numpy"]["state"]
        numpy_state = {**states["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}}
        return cls((version, tuple(words), gauss), numpy_state, _decode(states["torch"]), _decode(states["device"]))


def states_of_all(backend: Backend) -> dict[str, Any]:
    """Return the states of every process's generators, as the keys of a checkpoint's state."""
    mine = {**Generators.now(backend).to_json(), "kind": backend.name}
    first, *others = backend.replicas.exchange(mine)
    return {"generators": first, "generators_of_others": others}


def restore_own(backend: Backend, state: Mapping[str, Any], seed: int) -> None:
    """Put this process's generators back where a checkpoint found them.

    A process that was not there, or has a device of another kind, draws other numbers, from the seed and the step.
    """
    saved, rank = [state["generators"], *state.get("generators_of_others", [])], backend.replicas.rank
    there = rank < len(saved)
    alike = there and saved[rank].get("kind", backend.name) == backend.name
    if not alike:
        torch.manual_seed(seed + rank + int(state["global_step"]))  # every device's
    if there:
        Generators.from_json(saved[rank]).put_back(backend if alike else None)
