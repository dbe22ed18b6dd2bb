"""Reads from `mp_metadata_pp_rank_*.json` how the tensors of a checkpoint are divided over its
ranks.

The file has a specification for every module with fused projections, by the name of its class:
joined linear modules, or the queries, keys and values of an attention, with keys and values
replicated. Fused projections share one A, so each of them gets that A. Replicated tensors must
agree on all ranks. If they do not, the caller can choose the first rank's, which optimum-neuron
itself would use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from lema.backend.layout import KvLayout, Layout, column, fused, kv, query, replicated
from lema.errors import AdapterError, DataError, WeightsError
from lema.storage.header import parse_json
from lema.storage.regular import read_regular

__all__ = [
    "FUSED",
    "GROUPED",
    "OWN_NAME",
    "Metadata",
    "Rule",
    "metadata_of",
    "plain_rule",
    "read_metadata",
]

# the adapter's name, which its files leave out
OWN_NAME = re.compile(r"(\.lora_\w+)\.[^.]+|\.modules_to_save\.[^.]+")
FUSED = "FusedLinearsSpec"
GROUPED = "GQAQKVColumnParallelLinearSpec"


@dataclass(frozen=True)
class Rule:
    """The tensors that one tensor of a fused module is split into."""

    layout: Layout  # how the fused tensor is divided over the ranks
    # The names of the results: one; or one for each part, if the layout has parts; or one for each
    # copy.
    names: tuple[str, ...]


@dataclass(frozen=True)
class Metadata:
    """The metadata of one stage's tensors."""

    file: Path  # the file that they were read from
    # name without the adapter's -> how the parameter is partitioned
    parameters: Mapping[str, Mapping[str, Any]]
    rules: Mapping[str, Rule]  # name of a fused module's tensor in the shards -> its rule
    # name of a fused module in its parent -> those of the projections in it
    modules: Mapping[str, tuple[str, ...]]


def read_metadata(file: Path, tp: int, kv_layout: KvLayout | None = None) -> Metadata:
    """Read `mp_metadata_pp_rank_*.json`, of shards of `tp` ranks. `kv_layout` says which replica of
    keys and values is on which rank; None: from the file, else `tile`. `AdapterError`: it is
    damaged, has another number of ranks, or has a module fused in an unknown way; `ConfigError`:
    the heads cannot be divided over so many ranks."""
    try:
        return metadata_of(parse_json(file, read_regular(file)), file, tp, kv_layout)
    except (WeightsError, DataError, OSError) as error:
        raise _unusable(
            file, f"it does not describe the shards ({type(error).__name__}: {error})"
        ) from error


def metadata_of(
    content: Mapping[str, Any], file: Path, tp: int, kv_layout: KvLayout | None = None
) -> Metadata:
    """Return the metadata with this content, from `file`; errors are those of `read_metadata`."""
    rules: dict[str, Rule] = {}
    modules: dict[str, tuple[str, ...]] = {}
    try:
        where: KvLayout = kv_layout or content.get("kv_layout", "tile")
        if where not in get_args(KvLayout):
            raise _unusable(file, f"keys and values are replicated in an unknown order, {where!r}")
        parameters = {
            OWN_NAME.sub(r"\1", name): dict(entry) for name, entry in content["parameters"].items()
        }
        for owner in content["model_weight_transformation_specs"]:
            module = owner["module_fully_qualified_name"]
            for kind, spec in owner["specs"]:
                if spec["tp_size"] != tp:
                    raise _unusable(
                        file,
                        f"{module} lay over {spec['tp_size']} ranks, and there are shards of {tp}",
                    )
                if kind == FUSED:
                    module_rules, (name, projections) = _fused_linears(module, spec, tp, file)
                elif kind == GROUPED:
                    module_rules, (name, projections) = _grouped_heads(module, spec, tp, where)
                else:
                    raise _unusable(file, f"{module} is transformed in an unknown way, {kind}")
                rules |= module_rules
                modules[name] = projections
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise _unusable(
            file, f"it does not describe the shards ({type(error).__name__}: {error})"
        ) from error
    return Metadata(file, parameters, rules, modules)


def _fused_linears(
    module: str, spec: Mapping[str, Any], tp: int, file: Path
) -> tuple[dict[str, Rule], tuple[str, tuple[str, ...]]]:
    name = spec["fused_linear_name"]
    linears = tuple(spec["linear_names"])
    if spec["fuse_axis"] not in (0, "column"):
        raise _unusable(
            file, f"{module}.{name} is fused along its inputs, so its adapter cannot be split"
        )
    parts = fused([(int(size), column(tp)) for size in spec["original_dims"]])
    if len(parts.parts) != len(linears):
        raise _unusable(
            file, f"{module}.{name} has {len(linears)} modules but {len(parts.parts)} sizes"
        )
    layouts = {"lora_A.weight": replicated(tp), "lora_B.weight": parts, "lora_B.bias": parts}
    rules = {
        f"{module}.{name}.{leaf}": Rule(
            layout, tuple(f"{module}.{linear}.{leaf}" for linear in linears)
        )
        for leaf, layout in layouts.items()
    }
    return rules, (name, linears)


def _grouped_heads(
    module: str, spec: Mapping[str, Any], tp: int, where: KvLayout
) -> tuple[dict[str, Rule], tuple[str, tuple[str, ...]]]:
    name = spec["gqa_qkv_projection_name"]
    copies = spec["kv_size_multiplier"]
    linears = (
        spec["query_projection_name"],
        spec["key_projection_name"],
        spec["value_projection_name"],
    )
    heads = (spec["num_attention_heads"], spec["num_key_value_heads"], where, copies)
    queries = query(tp, *heads)
    keys = kv(tp, *heads)
    q_size = spec["q_output_size_per_partition"] * tp
    kv_size = spec["kv_output_size_per_partition"] * tp // copies
    base = f"{module}.{name}"
    rules = {
        f"{base}.lora_A.weight": Rule(
            replicated(tp), tuple(f"{module}.{linear}.lora_A.weight" for linear in linears)
        )
    }
    for kind in ("weight", "bias"):
        names = tuple(f"{module}.{linear}.lora_B.{kind}" for linear in linears)
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
    return AdapterError(
        f"{file.name}: {what}", where=str(file), how="save the adapter again, with the same library"
    )


def plain_rule(name: str, local_shard: Tensor, metadata: Metadata, tp: int) -> Rule:
    """Return the rule for a tensor of a module that is not fused: whole, or cut evenly along one
    axis.
    """
    entry: Mapping[str, Any] | None = metadata.parameters.get(name)
    if entry is None:
        raise AdapterError(
            f"it does not say how {name} is divided over ranks", where=str(metadata.file)
        )
    if not entry.get("tensor_model_parallel"):
        return Rule(replicated(tp), (name,))
    dim = entry.get("partition_dim")
    stride = entry.get("partition_stride", 1)
    ranks = entry.get("num_partitions", tp)
    if (
        dim not in (0, 1)
        or type(stride) is not int
        or stride < 1
        or ranks != tp
        or local_shard.dim() <= dim
    ):
        raise AdapterError(
            f"{name} is cut as {dict(entry)}, for {tp} ranks", where=str(metadata.file)
        )
    even = Layout("column" if dim == 0 else "row", tp, dim)
    if stride == 1:
        return Rule(even, (name,))
    return Rule(fused([(local_shard.shape[dim] * tp // stride, even)] * stride), (name,))
