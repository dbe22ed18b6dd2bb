"""Reads the sharded checkpoints of another parallel library, and puts their adapters together as PEFT has them.

`model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt` is a pickle with the tensors of a rank by name. In the other form it holds a
reference in the place of every tensor, and `tensor_N.pt` in a neighbouring directory, `....pt.tensors`, is the N-th.
Only tensors and such references are loaded; all else is refused, because a pickle may run code.

The checkpoints' metadata has a specification for every module whose projections were fused, by the name of its class:
linear modules one after the other, or the queries, keys and values of an attention, with keys and values replicated.
Fused projections share one A, so each of them gets that A. Replicated tensors must agree on all ranks; where a run did
not keep them so, the caller can ask for the first rank's, as that library itself would take.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from lema.backend.layout import Difference, KvLayout, Layout, column, fused, kv, query, replicated
from lema.errors import AdapterError, ConfigError, WeightsError
from lema.lora.shards import join
from lema.storage.header import check_pickled, parse_json

__all__ = ["read_foreign"]

NAME = re.compile(r"dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
REFERENCE = ".serialization.TensorReference"  # the end of the full name of the one class that may be asked for
# What torch.load says of bytes that it did not write; bytes that are nested too deep are a RuntimeError.
UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, EOFError, OSError, ValueError, AttributeError),
    *(LookupError, TypeError, AssertionError, ArithmeticError),
)


class Reference:
    """What stands in a file in the place of the tensor `tid`, which lies in a file of its own."""

    tid: Any = None


def find_stages(directory: Path) -> list[tuple[Path, list[Path]]]:
    """Find what describes each pipeline stage of a checkpoint, and the files of its ranks in their order: a directory
    of `model/` and `mp_metadata_pp_rank_*.json`. A file that is missing is an `AdapterError`."""
    if (directory / "checkpoint").is_file() and not (directory / "done").is_file():
        what = "this checkpoint was not saved to its end: there is no file `done`"
        raise AdapterError(what, where=str(directory), how="use an earlier one, or save it again")
    found: dict[int, dict[int, Path]] = {}
    for file in sorted((directory / "model").glob("dp_rank_*.pt")):
        if named := NAME.fullmatch(file.name):
            found.setdefault(int(named[2]), {})[int(named[1])] = file
    if not found:
        raise AdapterError("there are no shards here", where=str(directory / "model"), how="copy the directory again")
    stages = []
    ranks = 1 + max(rank for files in found.values() for rank in files)
    for number in range(1 + max(found)):
        files = found.get(number, {})
        missing = next((rank for rank in range(ranks) if rank not in files), None)  # of perhaps millions
        if missing is not None:
            name = f"dp_rank_00_tp_rank_{missing:02}_pp_rank_{number:02}.pt"
            raise AdapterError(f"the shard {name} is missing", where=str(directory / "model"), how="copy it again")
        metadata = directory / f"mp_metadata_pp_rank_{number}.json"
        if not metadata.is_file():
            raise AdapterError(f"{metadata.name} is missing", where=str(directory), how="copy it again")
        stages.append((metadata, [files[rank] for rank in range(ranks)]))
    return stages


def load_rank(file: Path) -> dict[str, Tensor]:
    """Load the tensors of one rank, by name; no code of the file's is run. `AdapterError`: the file is damaged, or
    holds something else than tensors."""
    folder = file.with_name(f"{file.name}.tensors")
    content = _load(file, references=True) if folder.is_dir() else _load(file)
    if not isinstance(content, dict):
        raise AdapterError("the shard is not a table of tensors", where=str(file))
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Reference):
            if type(value.tid) is not int:
                what = f"a reference to the tensor {value.tid!r}"
                raise AdapterError(what, where=str(file), how="save the adapter again")
            part = folder / f"tensor_{value.tid}.pt"
            if not part.is_file():
                raise AdapterError(f"{part.name} is missing", where=str(folder), how="copy the directory again")
            value = _load(part)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            what = f"{name!r} is not a tensor but {type(value).__name__}"
            raise AdapterError(what, where=str(file), how="save the adapter alone")
        tensors[name] = value.detach()
    return tensors


def _load(file: Path, *, references: bool = False) -> Any:
    try:
        check_pickled(file)
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        odd = [name for name in asked if not (references and name.endswith(REFERENCE))]
        if odd:
            what = f"{file.name} holds objects of {', '.join(sorted(odd))}, and only tensors are loaded"
            raise AdapterError(what, where=str(file), how="do not trust it; or save the adapter alone, as tensors")
        known: list[Any] = [(Reference, name) for name in asked]
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True)
    except WeightsError as error:
        raise AdapterError(error.what, where=error.where, how=error.how) from error
    except UNREADABLE as error:
        raise AdapterError(f"{file.name} is damaged: {error}", where=str(file), how="copy it again") from error


OWN_NAME = re.compile(r"(\.lora_\w+)\.[^.]+|\.modules_to_save\.[^.]+")  # the adapter's, which its files leave out
FUSED = "FusedLinearsSpec"
GROUPED = "GQAQKVColumnParallelLinearSpec"


@dataclass(frozen=True)
class Rule:
    """What becomes of one tensor of a fused module."""

    layout: Layout  # how it lies over the ranks
    # Of the tensors it becomes: one; or of each part, if the layout has parts; or of as many copies.
    names: tuple[str, ...]


@dataclass(frozen=True)
class Metadata:
    """What is known of the tensors of one stage."""

    file: Path  # where it was read
    parameters: Mapping[str, Mapping[str, Any]]  # name without the adapter's -> how the parameter is partitioned
    rules: Mapping[str, Rule]  # name of a tensor of a fused module, as shards have it -> what becomes of it
    modules: Mapping[str, tuple[str, ...]]  # name of a fused module in its parent -> those of the projections in it


def read_metadata(file: Path, tp: int, kv_layout: KvLayout | None = None) -> Metadata:
    """Read `mp_metadata_pp_rank_*.json`, of shards of `tp` ranks. `kv_layout` says which replica of keys and values
    lies where; None: as the file says, else `tile`. `AdapterError`: it is damaged, is of another number of ranks, or
    has a module fused in an unknown way; `ConfigError`: heads that cannot lie over so many ranks."""
    rules: dict[str, Rule] = {}
    modules: dict[str, tuple[str, ...]] = {}
    try:
        content = parse_json(file, file.read_bytes())
        where: KvLayout = kv_layout or content.get("kv_layout", "tile")
        if where not in get_args(KvLayout):
            raise _unusable(file, f"keys and values are replicated in an unknown order, {where!r}")
        parameters = {OWN_NAME.sub(r"\1", name): dict(entry) for name, entry in content["parameters"].items()}
        for owner in content["model_weight_transformation_specs"]:
            module = owner["module_fully_qualified_name"]
            for kind, spec in owner["specs"]:
                if spec["tp_size"] != tp:
                    raise _unusable(file, f"{module} lay over {spec['tp_size']} ranks, and there are shards of {tp}")
                if kind == FUSED:
                    made, (name, projections) = _fused_linears(module, spec, tp, file)
                elif kind == GROUPED:
                    made, (name, projections) = _grouped_heads(module, spec, tp, where)
                else:
                    raise _unusable(file, f"{module} is transformed in an unknown way, {kind}")
                rules |= made
                modules[name] = projections
    except (WeightsError, OSError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise _unusable(file, f"it does not describe the shards ({type(error).__name__}: {error})") from error
    return Metadata(file, parameters, rules, modules)


def _fused_linears(
    module: str, spec: Mapping[str, Any], tp: int, file: Path
) -> tuple[dict[str, Rule], tuple[str, tuple[str, ...]]]:
    name, linears = spec["fused_linear_name"], tuple(spec["linear_names"])
    if spec["fuse_axis"] not in (0, "column"):
        raise _unusable(file, f"{module}.{name} is fused along its inputs, which no adapter of it survives")
    parts = fused([(int(size), column(tp)) for size in spec["original_dims"]])
    if len(parts.parts) != len(linears):
        raise _unusable(file, f"{module}.{name} is of {len(linears)} modules and of {len(parts.parts)} sizes")
    layouts = {"lora_A.weight": replicated(tp), "lora_B.weight": parts, "lora_B.bias": parts}
    rules = {
        f"{module}.{name}.{leaf}": Rule(layout, tuple(f"{module}.{linear}.{leaf}" for linear in linears))
        for leaf, layout in layouts.items()
    }
    return rules, (name, linears)


def _grouped_heads(
    module: str, spec: Mapping[str, Any], tp: int, where: KvLayout
) -> tuple[dict[str, Rule], tuple[str, tuple[str, ...]]]:
    name, copies = spec["gqa_qkv_projection_name"], spec["kv_size_multiplier"]
    linears = (spec["query_projection_name"], spec["key_projection_name"], spec["value_projection_name"])
    heads = (spec["num_attention_heads"], spec["num_key_value_heads"], where, copies)
    queries, keys = query(tp, *heads), kv(tp, *heads)
    q_size, kv_size = spec["q_output_size_per_partition"] * tp, spec["kv_output_size_per_partition"] * tp // copies
    base = f"{module}.{name}"
    rules = {f"{base}.lora_A.weight": Rule(replicated(tp), tuple(f"{module}.{one}.lora_A.weight" for one in linears))}
    for kind in ("weight", "bias"):
        names = tuple(f"{module}.{one}.lora_B.{kind}" for one in linears)
        if spec["fuse_qkv"]:
            rule = Rule(fused([(q_size, queries), (kv_size, keys), (kv_size, keys)]), names)
            rules |= {f"{base}.lora_B.{kind}_qkv": rule, f"{base}.lora_B.{kind}": rule}
        else:
            for suffix, layout, target in zip("qkv", (queries, keys, keys), names, strict=True):
                rules[f"{base}.lora_B.{kind}_{suffix}"] = Rule(layout, (target,))
    after = f"{module}.{spec['output_projection_name']}.lora_A.weight"
    rules[after] = Rule(query(tp, *heads, dim=1), (after,))
    return rules, (name, linears)


def _unusable(file: Path, what: str) -> AdapterError:
    return AdapterError(f"{file.name}: {what}", where=str(file), how="save the adapter again, with the same library")


def read_foreign(
    directory: Path, kv_layout: KvLayout | None, *, check: bool
) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int, dict[str, tuple[str, ...]]]:
    """Read all ranks and stages of a sharded adapter (`find_stages`, `read_metadata`) and put them together. Return the
    tensors by PEFT's names; which replicas of which differ; over how many ranks they lay; and the name of each fused
    module -> those of the projections its adapter now is of. Replicas must agree, bit for bit, if `check`; else the
    first rank's are taken. `AdapterError`: a file is missing, damaged or unsafe, or ranks or replicas differ."""
    tensors: dict[str, Tensor] = {}
    differing: dict[str, list[Difference]] = {}
    modules: dict[str, tuple[str, ...]] = {}
    stages = find_stages(directory)
    for about, files in stages:
        try:
            metadata = read_metadata(about, len(files), kv_layout)
        except ConfigError as error:
            raise AdapterError(f"{about.name}: {error.what}", where=str(about)) from error
        ranks = [load_rank(file) for file in files]
        for rank, held in enumerate(ranks):
            if odd := sorted(held.keys() ^ ranks[0].keys()):
                what = f"rank 0 and rank {rank} hold different tensors: {odd[0]}"
                how = "the files are not of one checkpoint; copy it again"
                raise AdapterError(what, where=str(files[rank]), how=how)
        for name in ranks[0]:
            rule = metadata.rules.get(name) or _plain_rule(name, ranks[0][name], metadata, len(ranks))
            whole, found = join([held[name] for held in ranks], rule.layout, name, check=check)
            if found:
                differing[name] = found
            parts = [whole] if len(rule.names) == 1 else [whole.clone() for _ in rule.names]
            if len(rule.names) > 1 and rule.layout.parts:
                sizes = [size for size, _ in rule.layout.parts]
                parts = [part.contiguous() for part in whole.split(sizes, rule.layout.dim)]
            for target, piece in zip(rule.names, parts, strict=True):
                if target in tensors:
                    if tensors[target].dtype == piece.dtype and torch.equal(tensors[target], piece):
                        continue  # a weight that two stages share is in both
                    raise AdapterError(f"{target} comes twice, once from {name}", where=str(about))
                tensors[target] = piece
        modules |= metadata.modules
    return tensors, differing, len(stages[0][1]), modules


def _plain_rule(name: str, held: Tensor, metadata: Metadata, tp: int) -> Rule:
    """The rule of a tensor of a module that is not fused: whole, or cut evenly along one axis."""
    known: Mapping[str, Any] | None = metadata.parameters.get(name)
    if known is None:
        raise AdapterError(f"it does not say how {name} lies over ranks", where=str(metadata.file))
    if not known.get("tensor_model_parallel"):
        return Rule(replicated(tp), (name,))
    dim, stride, ranks = known.get("partition_dim"), known.get("partition_stride", 1), known.get("num_partitions", tp)
    if dim not in (0, 1) or type(stride) is not int or stride < 1 or ranks != tp or held.dim() <= dim:
        raise AdapterError(f"{name} is cut as {dict(known)}, for {tp} ranks", where=str(metadata.file))
    even = Layout("column" if dim == 0 else "row", tp, dim)
    if stride == 1:
        return Rule(even, (name,))
    return Rule(fused([(held.shape[dim] * tp // stride, even)] * stride), (name,))
