"""Adapters of experts in one tensor, taken apart into one adapter for each published expert.

`transformers` keeps the experts of a layer in one parameter of shape (experts, d1, d2), and PEFT
adapts it with factors of all experts in two matrices. Published files, and servers, have a matrix
for each expert and projection. Which of their elements lie where is asked of `transformers`:
`revert_weight_conversion`, with which `save_pretrained` writes such files, is run on a tensor
without bytes, and its copies are followed. A matrix that takes some rows of an expert, and all of
its columns, has these rows of B and all of A as its factors, so no number changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import core_model_loading as loading

from lema.lora.merge import ADAPTER, WRAPPED
from lema.model.conversions import CopyTrace
from lema.storage.slices import Move

__all__ = ["WEIGHT", "ExpertPart", "Factors", "expert_parts", "factors_of", "parameter_wrappers"]

WEIGHT = ".weight"


@dataclass(frozen=True)
class Factors:
    """An adapter of one matrix: it adds `scale` B A."""

    a: Tensor  # (rank, in)
    b: Tensor  # (out, rank)
    scale: float


@dataclass(frozen=True)
class ExpertPart:
    """A published matrix that holds elements of one expert of a parameter (experts, d1, d2)."""

    module: str  # its published name, without `.weight`
    expert: int
    shape: tuple[int, int]
    first: tuple[int, int]  # where its element (0, 0) is in (d1, d2)
    by_row: tuple[int, int]  # how far in (d1, d2) the next row is
    by_column: tuple[int, int]

    def factors(self, left: Tensor, right: Tensor, scale: float) -> Factors:
        """Return its adapter.

        Args:
            left: the factor (d1, rank) of the expert.
            right: its factor (rank, d2).
            scale: of their product.

        Returns:
            The same numbers, as B (rows, rank) and A (rank, columns) of this matrix.
        """
        rows, columns = self.shape
        if self.by_row[1] == 0 and self.by_column[0] == 0:
            b = _taken(left, 0, self.first[0], self.by_row[0], rows)
            a = _taken(right, 1, self.first[1], self.by_column[1], columns)
            return Factors(a, b, scale)
        b = _taken(right, 1, self.first[1], self.by_row[1], rows).T
        a = _taken(left, 0, self.first[0], self.by_column[0], columns).T
        return Factors(a, b, scale)

    def put(self, a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> None:
        """Put the factors of this matrix into those of its expert, which are zero.

        Args:
            a: its A (rank, columns).
            b: its B (rows, rank).
            left: receives columns of the factor (d1, rank).
            right: receives rows of the factor (rank, d2).
        """
        rows, columns = self.shape
        if self.by_row[1] == 0 and self.by_column[0] == 0:
            left[_index(self.first[0], self.by_row[0], rows)] = b
            right[:, _index(self.first[1], self.by_column[1], columns)] = a
            return
        right[:, _index(self.first[1], self.by_row[1], rows)] = b.T
        left[_index(self.first[0], self.by_column[0], columns)] = a.T


def expert_parts(model: PreTrainedModel, parameter: str) -> list[ExpertPart] | None:
    """Return the published matrices of a parameter of experts.

    Args:
        model: with or without adapters; its weights may be on `meta`.
        parameter: the name of a parameter (experts, d1, d2).

    Returns:
        The matrices, which have all elements of the parameter between them; None: its experts are
        published in one tensor, or not as matrices of rows and columns.
    """
    # Of some types the parameters of a layer are written together.
    together = {
        bare: tensor
        for name, tensor in model.named_parameters()
        if tensor.ndim == 3 and _layer(bare := WRAPPED.sub("", name)) == _layer(parameter)
    }
    experts, d1, d2 = together[parameter].shape
    names = [*together]
    trace = CopyTrace()
    dtype = together[parameter].dtype
    sources = {
        name: trace.source(number, tensor.shape, dtype)
        for number, (name, tensor) in enumerate(together.items())
    }
    with trace:
        published: Mapping[str, Tensor] = loading.revert_weight_conversion(model, sources)
    parts = list[ExpertPart]()
    for name, piece in published.items():
        moves = trace.moves(piece)
        if moves is not None and names.index(parameter) not in {number for number, _ in moves}:
            continue
        if piece.ndim != 2 or not name.endswith(WEIGHT) or moves is None or len(moves) != 1:
            return None
        shape = (int(piece.shape[0]), int(piece.shape[1]))
        part = _part(name.removesuffix(WEIGHT), shape, moves[0][1], d1, d2)
        if part is None:
            return None
        parts.append(part)
    complete = sum(prod(part.shape) for part in parts) == experts * d1 * d2
    return parts if complete else None


def _layer(name: str) -> str:
    """Return a parameter's name as far as the number of its layer."""
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else ""


def _part(module: str, shape: tuple[int, int], move: Move, d1: int, d2: int) -> ExpertPart | None:
    """Return what a move says of a matrix; None: its rows and columns are not rows and columns."""
    rows, columns = shape

    def position(row: int, column: int) -> tuple[int, int, int]:
        at = _read_from(move, row * columns + column)
        return at // (d1 * d2), at // d2 % d1, at % d2

    begin = position(0, 0)
    expert, *first = begin
    row_step = _step(position(min(1, rows - 1), 0), begin)
    column_step = _step(position(0, min(1, columns - 1)), begin)
    for corner in _corners(move, columns):
        row, column = corner
        expected = (
            expert,
            first[0] + row * row_step[1] + column * column_step[1],
            first[1] + row * row_step[2] + column * column_step[2],
        )
        if position(row, column) != expected:
            return None
    straight = row_step[2] == 0 and column_step[1] == 0
    turned = row_step[1] == 0 and column_step[2] == 0
    if row_step[0] or column_step[0] or not (straight or turned):
        return None
    return ExpertPart(module, expert, shape, (first[0], first[1]), row_step[1:], column_step[1:])


def _step(to: tuple[int, int, int], begin: tuple[int, int, int]) -> tuple[int, int, int]:
    return to[0] - begin[0], to[1] - begin[1], to[2] - begin[2]


def _corners(move: Move, columns: int) -> Iterator[tuple[int, int]]:
    """Yield rows and columns at both ends of each dimension of a move, and of all of them: between
    these it goes on evenly, and so does a matrix that is taken evenly."""
    last = 0
    for size, _, write in move.dims:
        if size > 1:
            yield divmod(write, columns)
            yield divmod((size - 1) * write, columns)
        last += (size - 1) * write
    yield divmod(last, columns)


def _read_from(move: Move, written: int) -> int:
    """Return the element of the source that a move puts at a place of its result."""
    at = move.read
    left = written - move.write
    for size, read, write in sorted(move.dims, key=lambda dim: -dim[2]):
        digit = min(left // write, size - 1) if write else 0
        at += digit * read
        left -= digit * write
    assert left == 0, "the result has gaps"
    return at


def _taken(tensor: Tensor, dim: int, first: int, step: int, count: int) -> Tensor:
    """Return every `step`-th row or column from the `first` one."""
    return tensor.index_select(dim, _index(first, step, count))


def _index(first: int, step: int, count: int) -> Tensor:
    return torch.arange(count) * step + first


def parameter_wrappers(module: nn.Module) -> list[ParamWrapper]:
    """Return PEFT's wrappers of the parameters of one module, from the outermost to the innermost;
    empty: none is adapted."""
    wrappers = list[ParamWrapper]()
    while isinstance(module, ParamWrapper):
        wrappers.append(module)
        module = module.base_layer
    return wrappers


def factors_of(wrapper: ParamWrapper, expert: int) -> tuple[Tensor, Tensor, float]:
    """Return the factors of one expert.

    Args:
        wrapper: PEFT's, of a parameter (experts, d1, d2).
        expert: its number.

    Returns:
        The left factor (d1, rank), the right one (rank, d2), and the scale of their product.
    """
    anything: Any = wrapper
    experts: int = anything.num_experts
    weight_a: Tensor = anything.lora_A[ADAPTER].weight.detach().cpu()
    weight_b: Tensor = anything.lora_B[ADAPTER].weight.detach().cpu()
    a = weight_a.reshape(experts, -1, weight_a.shape[1])[expert]
    b = weight_b.reshape(weight_b.shape[0], -1, experts)[:, :, expert]
    scale: float = anything.scaling[ADAPTER]
    # PEFT adds B A to parameters (experts, out, in), and its transpose to those (experts, in, out).
    return (b, a, scale) if anything._did_swap_in_out_features else (a.T, b.T, scale)
