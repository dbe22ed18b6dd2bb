"""Conversions: tensors on disk which only together give tensors of the model, as `transformers`
rearranges them.

A conversion is run once on tensors without bytes. What it only arranges is assembled from the files
when it is read; where it computes, as dequantising does, its operations are run again at every
lease, on the device.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from lema.errors import is_out_of_memory
from lema.storage.header import TensorRecord
from lema.storage.quantized.formats import LIBRARY, PLAN, Plan, Step, cut
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import Box, Move, Piece, contiguous, follow, simplest
from lema.storage.tensorfile import read_into
from lema.stream.placement import DTYPES

__all__ = ["Conversion", "CopyTrace", "Misfit"]

CONSTANTS = ("I64", "I32")
MOST_CONSTANT = 64  # bytes of such a tensor
SHAPE = re.compile(
    r"_shape$"
)  # of a packed weight, whose values are read on the host; codes may be as small
SCALE = re.compile(
    r"(?<!activation_)(?<!input_)(?<!input_global_)scale"
)  # of a weight, not of what it multiplies
Groups = dict[str, list[TensorRecord]]  # by the pattern of the converter that they matched


class Misfit(ValueError):
    """What is stored does not make what the model needs; the message says why."""


_aten = torch.ops.aten
MAKE_ONE = (_aten.clone.default, _aten._to_copy.default)


class CopyTrace(TorchDispatchMode):
    """Writes down the copies that are made while it is active, between tensors on `meta`: stacking,
    concatenating, cloning, and whatever makes a view. What computes is found out: its result shares
    no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self._sources: dict[int, int] = {}  # by storage, the number of the source that it is
        self._filled: dict[
            int, tuple[tuple[int, ...], list[Box]]
        ] = {}  # by storage, its shape and where it came from
        self._alive: list[Tensor] = []  # so that no address of a storage is used again

    def source(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that stands for a source."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = number
        self._alive.append(tensor)
        return tensor

    def moves(self, tensor: Tensor) -> list[tuple[int, Move]] | None:
        """Return which elements of which source go where in a tensor, as a contiguous array; None
        if some are computed, or copied in a way that is not followed."""
        dims = zip(tensor.shape, tensor.stride(), contiguous(tensor.shape), strict=True)
        waiting = [(_storage(tensor), Move(int(tensor.storage_offset()), 0, tuple(dims)).joined())]
        traced_moves: list[tuple[int, Move]] = []
        try:
            while waiting:
                storage, move = waiting.pop()
                if storage in self._sources:
                    traced_moves.append((self._sources[storage], move))
                elif storage in self._filled:
                    waiting += follow(move, *self._filled[storage])
                else:
                    return None
        except ValueError:
            return None
        return (
            traced_moves if sum(move.count for _, move in traced_moves) == tensor.numel() else None
        )

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        options = kwargs or {}
        result = func(*args, **options)
        if not isinstance(result, Tensor):
            return result
        if func in (_aten.cat.default, _aten.stack.default):
            dim = args[1] if len(args) > 1 else options.get("dim", 0)
            stacked = func is _aten.stack.default
            parts = args[0] if stacked else [tensor for tensor in args[0] if tensor.numel()]
            self._note(result, parts, dim % result.ndim, stacked=stacked)
        elif func in MAKE_ONE and result.dtype == args[0].dtype:
            self._note(result, [args[0]], 0, stacked=False)
        return result

    def _note(self, result: Tensor, parts: Sequence[Tensor], dim: int, *, stacked: bool) -> None:
        if not result.is_contiguous():
            return  # where it lies is not followed, so neither is what becomes of it
        boxes = []
        at = 0
        for part in parts:
            size = list(part.shape)
            strides = list(part.stride())
            if stacked:
                size.insert(dim, 1)
                strides.insert(dim, 0)
            low = [0] * result.ndim
            if result.ndim:
                low[dim] = at
                at = at + size[dim]
            boxes.append(
                Box(
                    _storage(part),
                    tuple(low),
                    tuple(size),
                    int(part.storage_offset()),
                    tuple(strides),
                )
            )
        self._filled[_storage(result)] = (tuple(result.shape), boxes)
        self._alive += [result, *parts]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass
class Conversion:
    """Tensors on disk which only together give tensors of the model."""

    first: str  # the in-memory name `transformers` files the conversion under
    converter: WeightConverter  # its own, which is not changed
    # The tensors on disk with the pattern of the converter each matched, in the converter's order.
    sources: list[tuple[str, TensorRecord]] = field(default_factory=list)
    # What operations make of tensors without bytes, by converter and shapes: many layers and
    # experts are alike.
    tried: dict[Any, list[tuple[str, torch.Size, torch.dtype]]] = field(
        default_factory=dict, repr=False
    )

    @property
    def described(self) -> str:
        """The sources, in words."""
        files = ", ".join(sorted({record.file.name for _, record in self.sources}))
        return f"{len(self.sources)} tensors in {files} ({self.sources[0][1].name} ...)"

    def records(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Stored]:
        """Return how each tensor that comes out is stored, by its name in the model. `Misfit`: the
        sources do not make what the converter makes."""
        groups = self._groups()
        operations = self.converter.operations
        quantizer = getattr(operations[0], "hf_quantizer", None)
        if quantizer is None:
            copied = self._copied(groups, operations, model, dtype)
            return copied or self._computed(groups, operations, [], model, dtype)
        first, *later_operations = operations
        stored = [DTYPES.get(record.dtype) for group in groups.values() for record in group]
        if not all(
            dtype and dtype.is_floating_point and dtype.itemsize > 1 for dtype in stored
        ):  # some are quantised
            if not any(
                SCALE.search(pattern) for pattern in groups
            ):  # some operations would take it for the weight
                name = next(
                    (record.name for pattern, record in self.sources if "scale" not in pattern),
                    self.first,
                )
                raise Misfit(f"{name} has no scales")
            return self._computed(groups, [first], later_operations, model, dtype)
        # Of a quantised model, a weight that is not: the quantizer's operation would let it pass.
        if (
            later_operations
            and (copied := self._copied(groups, later_operations, model, dtype)) is not None
        ):
            return copied
        if len(self.sources) > 1:
            raise Misfit("there are scales without a quantised weight")
        return {self.first: self.sources[0][1]}

    def _groups(self) -> Groups:
        """Return the sources of each pattern, after making sure that no number is missing among
        their names.
        """
        groups: Groups = {}
        for pattern, record in self.sources:
            groups.setdefault(pattern, []).append(record)
        numbers = {
            pattern: _numbers([record.name for record in group])
            for pattern, group in groups.items()
        }
        most = max(max(there) for there in numbers.values())
        for pattern, there in numbers.items():
            if missing := sorted(set(range(most + 1)) - there):
                shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
                raise Misfit(f"of {pattern}, number {shown} is missing")
        return groups

    def _copied(
        self, groups: Groups, operations: Sequence[Any], model: PreTrainedModel, dtype: torch.dtype
    ) -> dict[str, Stored] | None:
        """Return the results as assemblies of the sources; None: the operations do more than
        copy.
        """
        trace = CopyTrace()
        records = [record for group in groups.values() for record in group]
        sources = iter(
            [trace.source(number, record.shape, dtype) for number, record in enumerate(records)]
        )
        inputs = {pattern: [next(sources) for _ in group] for pattern, group in groups.items()}
        with trace:
            results = self.run(operations, inputs, model)
        stored: dict[str, Stored] = {}
        for name, tensor in results.items():
            if (moves := trace.moves(tensor)) is None:
                return None
            pieces = tuple(Piece(records[number], move) for number, move in moves)
            stored[name] = simplest(name, tuple(tensor.shape), pieces)
        return stored

    def _computed(
        self,
        groups: Groups,
        first: Sequence[Any],
        later_operations: Sequence[Any],
        model: PreTrainedModel,
        dtype: torch.dtype,
    ) -> dict[str, Stored]:
        """Return the results as what the first operations compute and the others arrange. Where
        others arrange, the first are run for one expert at a time."""
        names = {
            pattern: [f"{pattern} {number}" for number in range(len(group))]
            for pattern, group in groups.items()
        }
        run = _Operations(self, first, model, single=bool(later_operations))
        padded = _padding(groups, first[0])
        steps: list[Step] = []
        trace = CopyTrace()
        lists = defaultdict[str, list[Tensor]](list)
        cast = not hasattr(first[0], "hf_quantizer")
        keys: list[str] = []
        for number in range(max(map(len, groups.values())) if later_operations else 1):
            mine = {
                pattern: group[number : number + 1] if later_operations else group
                for pattern, group in groups.items()
            }
            constants = _constants_by_pattern(mine)
            here = {
                pattern: tuple(
                    names[pattern][number : number + 1] if later_operations else names[pattern]
                )
                for pattern in mine.keys() - constants.keys()
            }
            steps.append(Step(here, constants, padded))
            inputs = {pattern: [_empty(record) for record in mine[pattern]] for pattern in here}
            outputs = Plan(run.tried, (), cast).make(steps[-1], inputs, dtype)
            keys = keys or list(outputs)
            for at, key in enumerate(keys):
                _require_scaled(outputs[key], mine.get(key) or mine[next(iter(mine))])
                lists[key].append(trace.source(number * len(keys) + at, outputs[key].shape, dtype))
        with trace:
            results = (
                self.run(later_operations, lists, model)
                if later_operations
                else {key: tensors[0] for key, tensors in lists.items()}
            )
        run.forget_model(model, results)
        records = {
            names[pattern][number]: record
            for pattern, group in groups.items()
            for number, record in enumerate(group)
        }
        stored: dict[str, Stored] = {}
        for name, tensor in results.items():
            used = _moved_steps(steps, keys, trace.moves(tensor) or ())
            used = used if cast else tuple(_divided(step, run, records, dtype) for step in used)
            needed = [part for step in used for group in step.parts.values() for part in group]
            parts = {part: records[part] for part in needed}
            stored[name] = QuantizedRecord(
                name, LIBRARY, parts, tuple(tensor.shape), {PLAN: Plan(run, used, cast)}
            )
        return stored

    def run(
        self,
        operations: Sequence[Any],
        inputs: Mapping[str, Sequence[Tensor]],
        model: nn.Module,
        *,
        single: bool = False,
    ) -> dict[str, Tensor]:
        """Run operations of the converter, and name what comes out as `transformers` does. If
        `single`, each result is a row of one. `Misfit`: an operation fails."""
        converter = copy.copy(self.converter)
        converter.operations = list(operations)
        converter.layer_targets = defaultdict(set)
        collected: Any = {pattern: list(tensors) for pattern, tensors in inputs.items()}
        converter.collected_tensors = defaultdict(list, collected)
        try:
            with torch.no_grad():
                outputs: dict[str, Any] = converter.convert(
                    self.first, model=model, config=model.config
                )
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            if is_out_of_memory(error):  # at a lease, where it is tried again with less at once
                raise
            raise Misfit(str(error) or type(error).__name__) from error
        return {
            name: output[0] if single or isinstance(output, list) else output
            for name, output in outputs.items()
        }


@dataclass(eq=False)
class _Operations:
    """Operations of a converter, to be run whenever a parameter is leased."""

    conversion: Conversion
    operations: Sequence[Any]
    model: nn.Module  # which they may look at
    single: bool  # they run for one of several experts, and return their result in a row of one

    def __call__(self, inputs: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        return self.conversion.run(self.operations, inputs, self.model, single=self.single)

    def tried(self, inputs: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the result for tensors without bytes; small constants among them have theirs."""
        shapes = tuple(
            (
                name,
                *(
                    (tensor.shape, tensor.dtype) if tensor.is_meta else tuple(tensor.tolist())
                    for tensor in group
                ),
            )
            for name, group in sorted(inputs.items())
        )
        first_name = self.conversion.first
        cache = self.conversion.tried
        key = (id(self.conversion.converter), shapes)
        if key not in cache:
            outputs = self(inputs)
            cache[key] = [
                ("" if name == first_name else name, output.shape, output.dtype)
                for name, output in outputs.items()
            ]
        return {
            name or first_name: torch.empty(shape, dtype=dtype, device="meta")
            for name, shape, dtype in cache[key]
        }

    def forget_model(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        """Keep of the model only what the operations may ask for, because adapters will change
        its modules' names.
        """
        stub: Any = nn.Module()
        stub.config = model.config
        for name in {*names, self.conversion.first}:
            *owners, leaf = name.split(".")
            owner = stub
            for part in owners:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(
                leaf, nn.Parameter(model.get_parameter_or_buffer(name).detach(), False)
            )
        self.model = stub


def _divided(
    step: Step, run: _Operations, records: Mapping[str, TensorRecord], dtype: torch.dtype
) -> Step:
    """Let a step be cut along the first dimension, where its parts and what is made of them have
    one in common. All operations that are known work on each row, or block of rows, by itself; that
    a part of them makes the part of the result is tried on tensors without bytes."""
    inputs = {name: [_empty(records[part]) for part in group] for name, group in step.parts.items()}
    # One scale is for all; one word of codes is of a few rows.
    large = [
        tensor
        for group in inputs.values()
        for tensor in group
        if tensor.numel() > 1 or not tensor.is_floating_point()
    ]
    units = min((tensor.shape[0] for tensor in large if tensor.ndim), default=1)
    lengths = [tensor.shape[0] for tensor in large] + [
        int(constant[0]) for group in step.constants.values() for constant in group
    ]
    ordered = len({name for name, _ in step.moves}) == len(step.moves)
    contiguous = ordered and all(move.is_contiguous for _, move in step.moves)
    if step.padded or not contiguous or units < 2 or any(length % units for length in lengths):
        return step
    divided = replace(step, units=units)
    try:
        plan = Plan(run.tried, (), cast=False)
        full, part = (
            plan.make(*arguments, dtype)
            for arguments in ((step, inputs), cut(divided, inputs, 0, 1))
        )
    except (Misfit, RuntimeError, ValueError):
        return step
    fits = all(
        tuple(part[name].shape) == (tensor.shape[0] // units, *tensor.shape[1:])
        for name, tensor in full.items()
    )
    return divided if fits else step


def _numbers(names: Sequence[str]) -> set[int]:
    """Return the numbers that tell names apart, of experts for one; 0 where there is one name."""
    rows = [re.split("[._]", name) for name in names]
    different = [parts for parts in zip(*rows, strict=False) if len(set(parts)) > 1]
    if len(names) == 1:
        return {0}
    if len(different) != 1 or not all(part.isdigit() for part in different[0]):
        raise Misfit(f"{names[0]} and {names[1]} are not told apart by a number")
    return {int(part) for part in different[0]}


def _constants(group: Sequence[TensorRecord]) -> list[Tensor] | None:
    """Read small whole numbers; None: some are something else."""
    if not all(record.dtype in CONSTANTS and record.nbytes <= MOST_CONSTANT for record in group):
        return None
    data = [bytearray(record.nbytes) for record in group]
    for record, there in zip(group, data, strict=True):
        read_into(record, memoryview(there))
    pairs = zip(group, data, strict=True)
    return [
        torch.frombuffer(there, dtype=DTYPES[record.dtype]).view(record.shape)
        for record, there in pairs
    ]


def _constants_by_pattern(groups: Groups) -> dict[str, list[Tensor]]:
    """Read the small whole numbers that say the shapes of others, by pattern."""
    shapes = {pattern: group for pattern, group in groups.items() if SHAPE.search(pattern)}
    return {
        pattern: constant_tensors
        for pattern, group in shapes.items()
        if (constant_tensors := _constants(group)) is not None
    }


def _require_scaled(result: Tensor, sources: Sequence[TensorRecord]) -> None:
    """Raise `Misfit` if a result is still quantised, because nothing has scaled it."""
    if not result.is_floating_point() or result.itemsize == 1:
        raise Misfit(f"{sources[0].name} has no scales")


def _moved_steps(
    steps: Sequence[Step], keys: Sequence[str], sources: Iterable[tuple[int, Move]]
) -> tuple[Step, ...]:
    """Return the steps whose results a tensor is copied from, each with what is copied. `Misfit`:
    it is copied from none."""
    moves = defaultdict[int, list[tuple[str, Move]]](list)
    for source, move in sources:
        moves[source // len(keys)].append((keys[source % len(keys)], move))
    if not moves:
        raise Misfit("a dequantised tensor is not only copied")
    return tuple(replace(steps[number], moves=tuple(moves[number])) for number in sorted(moves))


def _empty(record: TensorRecord) -> Tensor:
    if (dtype := DTYPES.get(record.dtype)) is None:
        raise Misfit(f"{record.name} is stored as {record.dtype}")
    return torch.empty(record.shape, dtype=dtype, device="meta")


def _padding(groups: Groups, operation: object) -> dict[str, tuple[int, int]]:
    """Return what to pad weights to whose last blocks of scales are not full, by pattern. `Misfit`:
    scales are not those of the blocks that the config names."""
    settings = getattr(getattr(operation, "hf_quantizer", None), "quantization_config", None)
    block = getattr(settings, "weight_block_size", None)
    padding = {}
    named = {
        pattern.removesuffix("$"): group for pattern, group in groups.items()
    }  # some releases end patterns so
    for pattern, group in groups.items():
        weight = group[0]
        scales = named.get(f"{pattern.removesuffix('$')}_scale_inv", [])
        if (
            block is None
            or not scales
            or not weight.dtype.startswith("F8")
            or prod(scales[0].shape) == 1
        ):
            continue
        for record, scale in zip(group, scales, strict=True):
            grid = tuple(-(-size // of) for size, of in zip(record.shape[-2:], block, strict=True))
            if scale.shape[-2:] != grid:
                what = (
                    f"{scale.name} is {list(scale.shape)}, and blocks of {list(block)} have "
                    f"{list(grid)} scales"
                )
                raise Misfit(what)
        rows, columns = (
            number * of for number, of in zip(scales[0].shape[-2:], block, strict=True)
        )
        if (rows, columns) != tuple(weight.shape[-2:]):
            padding[pattern] = (rows, columns)
    return padding
