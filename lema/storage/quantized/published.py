"""Parameters that `transformers` makes of several stored tensors by arithmetic: weights published quantised.

The operations are those of its quantizers, run on the device at each lease. They run for a few tensors at a time, one
expert for one, because they make temporaries several times as large as what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lema.storage.slices import Move

__all__ = ["LIBRARY", "PLAN", "Plan", "Step", "expand", "move_elements"]


LIBRARY = "transformers"
PLAN = "plan"  # the key of `about` that a record's plan lies under


Lists = Mapping[str, Sequence[Tensor]]  # tensors by what the operations call them


@dataclass(frozen=True)
class Step:
    """What is made of a few stored tensors at once.

    Attributes:
        parts: what the operations call each list of stored tensors -> the names of the parts.
        constants: small tensors of whole numbers, shapes for one: on the host, because their values are read there.
        padded: what the operations call a tensor that is padded with zeros first, and what is made of it cut again,
            because its blocks of scales reach beyond it -> the rows and columns with padding.
        moves: what the operations call what they make, and where its elements go in the parameter.
    """

    parts: Mapping[str, tuple[str, ...]]
    constants: Lists
    padded: Mapping[str, tuple[int, int]]
    moves: tuple[tuple[str, Move], ...] = ()


@dataclass(frozen=True)
class Plan:
    """How a parameter is made.

    Attributes:
        run: the operations, from named lists of tensors to named tensors.
        steps: which fill every element of the parameter once.
        cast: the stored tensors become the parameter's type first, as in `from_pretrained` of what is not quantised.
    """

    run: Callable[[Lists], dict[str, Tensor]]
    steps: tuple[Step, ...]
    cast: bool

    def make(self, step: Step, parts: Lists, dtype: torch.dtype) -> dict[str, Tensor]:
        """Run the operations of one step, on any device."""
        given = {name: [part.to(dtype) if self.cast else part for part in group] for name, group in parts.items()}
        for name, shape in step.padded.items():
            given[name] = [_padded(part, shape) for part in given[name]]
        made = self.run({**given, **step.constants})
        for weight in step.padded:
            rows, columns = parts[weight][0].shape[-2:]
            name = weight if weight in made else next(iter(made))  # alone it already has the parameter's name
            made[name] = made[name][..., :rows, :columns]
        return made


@torch.no_grad()
def expand(parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    """Fill `out`, contiguous, with what the operations make of the parts."""
    plan: Plan = about[PLAN]
    for step in plan.steps:
        given = {name: [parts[part] for part in group] for name, group in step.parts.items()}
        made = plan.make(step, given, out.dtype)
        for name, move in step.moves:
            move_elements(made[name].contiguous(), move, out)


def move_elements(source: Tensor, move: Move, target: Tensor) -> Tensor:
    """Copy elements between two contiguous tensors, and return those that were written to, as a view."""
    sizes = [size for size, _, _ in move.dims]
    reads, writes = [read for _, read, _ in move.dims], [write for _, _, write in move.dims]
    written = torch.as_strided(target, sizes, writes, target.storage_offset() + move.write)
    return written.copy_(torch.as_strided(source, sizes, reads, source.storage_offset() + move.read))


def _padded(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, columns = tensor.shape[-2:]
    room = (0, shape[1] - columns, 0, shape[0] - rows)
    return pad(tensor.view(torch.uint8), room).view(tensor.dtype)  # torch pads no floats of 8 bits
