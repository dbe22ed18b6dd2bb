"""The quantised formats: those of two libraries that quantise and expand, and those that models are
published in.

What a library stores it expands again. Of weights published otherwise `transformers` makes
parameters from several stored tensors by arithmetic. The operations are those of its quantizers,
run on the device at each lease. Their temporaries are several times as large as what they are
given, so they are run for one expert, or some rows, at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lema.storage.quantized import bitsandbytes, torchao
from lema.storage.quantized.records import (
    CUT,
    NARROW,
    STORED,
    QuantizedRecord,
    part_of_quantized,
    pieces,
)
from lema.storage.slices import Move, rows_of

__all__ = [
    "KINDS",
    "LIBRARIES",
    "LIBRARY",
    "PLAN",
    "Plan",
    "Step",
    "cut",
    "cut_rows",
    "expand",
    "move_elements",
]

# Each is a module with the same functions: `takes`, `specs`, `quantize`, `expand`, `part_name`,
# `metadata`, `settings`.
LIBRARIES: Mapping[str, Any] = {"torchao": torchao, "bitsandbytes": bitsandbytes}
KINDS: Mapping[str, str] = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


@torch.no_grad()
def expand(
    library: str,
    parts: Mapping[str, Tensor],
    about: Mapping[str, Any],
    out: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """Fill `out`, contiguous, with the weight that the parts stand for: bitwise what the library
    dequantises. `scratch`, uint8, has room for the whole weight that contains `out`."""
    if CUT in about:
        axis, ranges, shape = about[CUT]
        assert scratch is not None, "a whole weight needs memory to be expanded into"
        full_weight = scratch[: prod(shape) * out.itemsize].view(out.dtype).view(shape)
        expand(
            library, parts, {key: entry for key, entry in about.items() if key != CUT}, full_weight
        )
        out.copy_(
            torch.cat(
                [full_weight.narrow(axis, start, stop - start) for start, stop in ranges], axis
            )
        )
        return
    if library == NARROW:
        out.copy_(parts[STORED])
        return
    if library != LIBRARY:
        LIBRARIES[library].expand(parts, about, out)
        return
    plan: Plan = about[PLAN]
    for step in plan.steps:
        inputs = {name: [parts[part] for part in group] for name, group in step.parts.items()}
        if step.units == 1:
            outputs = plan.make(step, inputs, out.dtype)
            for name, move in step.moves:
                move_elements(outputs[name].contiguous(), move, out)
            continue
        # What one piece after the other makes fills a range of `out`.
        flat = out.view(-1)
        offsets = {name: move.write for name, move in step.moves}
        for span in pieces(out, step.units, sum(move.count for _, move in step.moves)):
            outputs = plan.make(*cut(step, inputs, span.start, span.stop), out.dtype)
            for name in offsets:
                tensor = outputs[name]
                flat[offsets[name] : offsets[name] + tensor.numel()].view(tensor.shape).copy_(
                    tensor
                )
                offsets[name] += tensor.numel()


LIBRARY = "transformers"
PLAN = "plan"  # the key of `about` that a record's plan lies under


Lists = Mapping[str, Sequence[Tensor]]  # tensors by what the operations call them


@dataclass(frozen=True)
class Step:
    """What is made of a few stored tensors at once."""

    # what the operations call each list of stored tensors -> the parts' names
    parts: Mapping[str, tuple[str, ...]]
    # small tensors of whole numbers, shapes for one: on the host, because their values are read
    # there
    constants: Lists
    # What the operations call a tensor that is padded with zeros first, and what is made of it cut
    # again, because its blocks of scales reach beyond it -> the rows and columns with padding.
    padded: Mapping[str, tuple[int, int]]
    moves: tuple[tuple[str, Move], ...] = ()  # the operations' name of what is made, and its place
    # how many parts along the first dimension it may be cut into: rows, blocks of rows, or experts
    units: int = 1

    def for_units(self, units: int) -> "Step":
        """Return the step for so many of its units: what constants say of the first dimension is
        said of these.
        """
        constants = {
            name: [
                torch.tensor([int(constant[0]) // self.units * units, *constant[1:]])
                for constant in group
            ]
            for name, group in self.constants.items()
        }
        return replace(self, constants=constants)

    @cached_property
    def span(self) -> tuple[int, int]:
        """Return the first element of the parameter that it fills, and the one after the last."""
        low = min(move.write for _, move in self.moves)
        lasts = (
            move.write + sum((size - 1) * by for size, _, by in move.dims) for _, move in self.moves
        )
        return low, 1 + max(lasts)


@dataclass(frozen=True)
class Plan:
    """How a parameter is made."""

    # the operations, from named lists of tensors to named tensors
    run: Callable[[Lists], dict[str, Tensor]]
    steps: tuple[Step, ...]  # which fill every element of the parameter once
    # stored tensors become the parameter's type first, as in `from_pretrained` of what is not
    # quantised
    cast: bool

    def make(self, step: Step, parts: Lists, dtype: torch.dtype) -> dict[str, Tensor]:
        """Run the operations of one step, on any device."""
        inputs = {
            name: [part.to(dtype) if self.cast else part for part in group]
            for name, group in parts.items()
        }
        for name, (height, width) in step.padded.items():
            # As bytes, because torch pads no floats of 8 bits.
            inputs[name] = [
                pad(
                    part.view(torch.uint8), (0, width - part.shape[-1], 0, height - part.shape[-2])
                ).view(part.dtype)
                for part in inputs[name]
            ]
        outputs = self.run({**inputs, **step.constants})
        for weight in step.padded:
            rows, columns = parts[weight][0].shape[-2:]
            # alone it already has the parameter's name
            name = weight if weight in outputs else next(iter(outputs))
            outputs[name] = outputs[name][..., :rows, :columns]
        return outputs


def cut(step: Step, parts: Lists, start: int, stop: int) -> tuple[Step, Lists]:
    """Return a step for some of its units, and its parts for them."""

    def rows(tensor: Tensor) -> Tensor:
        if tensor.numel() == 1:
            return tensor  # one scale for all
        rows_per_unit = tensor.shape[0] // step.units
        return tensor[start * rows_per_unit : stop * rows_per_unit]

    cut_step = step.for_units(stop - start)
    return cut_step, {name: [rows(tensor) for tensor in group] for name, group in parts.items()}


def cut_rows(record: QuantizedRecord, first: int, end: int) -> QuantizedRecord:
    """Return the rows `first` to `end - 1` of a quantised parameter along its first dimension, such
    as some of several experts, of which alone is read what they expand from. `ValueError`: what is
    stored is not of single rows."""
    if record.library == "torchao":
        return part_of_quantized(record, 0, [(first, end)])
    if record.library != LIBRARY:
        return bitsandbytes.cut_rows(record, first, end)
    plan: Plan = record.about[PLAN]
    row = prod(record.shape[1:])
    steps = list[Step]()
    parts = dict(record.parts)
    for step in plan.steps:
        low, high = step.span
        if first * row <= low and high <= end * row:
            moves = tuple(
                (name, replace(move, write=move.write - first * row)) for name, move in step.moves
            )
            steps.append(replace(step, moves=moves))
        elif low < end * row and first * row < high:  # it makes other rows, too
            if (low, high, step.units % record.shape[0], len(step.moves)) != (
                0,
                prod(record.shape),
                0,
                1,
            ):
                raise ValueError(f"{record.name} is stored with scales that several experts share")
            for part in (part for group in step.parts.values() for part in group):
                if prod(record.parts[part].shape) > 1:  # else it is one scale for all
                    rows_per_expert = record.parts[part].shape[0] // record.shape[0]
                    parts[part] = rows_of(
                        record.parts[part], first * rows_per_expert, end * rows_per_expert
                    )
            ((name, _),) = step.moves
            size = (end - first) * row
            units = step.units // record.shape[0] * (end - first)
            steps.append(
                replace(
                    step.for_units(units), moves=((name, Move(0, 0, ((size, 1, 1),))),), units=units
                )
            )
    needed = [part for step in steps for group in step.parts.values() for part in group]
    about = {**record.about, PLAN: replace(plan, steps=tuple(steps))}
    shape = (end - first, *record.shape[1:])
    return replace(record, parts={part: parts[part] for part in needed}, shape=shape, about=about)


def move_elements(source: Tensor, move: Move, target: Tensor) -> Tensor:
    """Copy elements between two contiguous tensors, and return those that were written to, as a
    view.
    """
    sizes = [size for size, _, _ in move.dims]
    reads = [read for _, read, _ in move.dims]
    writes = [write for _, _, write in move.dims]
    written = torch.as_strided(target, sizes, writes, target.storage_offset() + move.write)
    return written.copy_(
        torch.as_strided(source, sizes, reads, source.storage_offset() + move.read)
    )
