"""What the parallel library's metadata says of fused modules, read and checked: which projections are in which module.

Its checkpoints have, for a module whose projections it fused, a specification by the name of its class: linear modules
one after the other, or the queries, keys and values of an attention, with keys and values replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lema.errors import AdapterError, WeightsError
from lema.header import parse_json
from lema.layout import KvLayout, Layout, column, fused, kv, query, replicated

__all__ = ["Metadata", "Rule", "read_metadata"]

FUSED = "FusedLinearsSpec"
GROUPED = "GQAQKVColumnParallelLinearSpec"


@dataclass(frozen=True)
class Rule:
    """What becomes of one tensor of a fused module.

    Attributes:
        layout: how it lies over the ranks.
        names: of the tensors it becomes: one; or of each part, if the layout has parts; or of as many copies.
    """

    layout: Layout
    names: tuple[str, ...]


@dataclass(frozen=True)
class Metadata:
    """What is known of the tensors of one stage.

    Attributes:
        file: where it was read.
        parameters: name without the adapter's -> how the parameter is partitioned.
        rules: name of a tensor of a fused module, as shards have it -> what becomes of it.
        modules: name of a fused module in its parent -> those of the projections in it.
    """

    file: Path
    parameters: Mapping[str, Mapping[str, Any]]
    rules: Mapping[str, Rule]
    modules: Mapping[str, tuple[str, ...]]


def read_metadata(file: Path, tp: int, kv_layout: KvLayout | None = None) -> Metadata:
    """Read `mp_metadata_pp_rank_*.json`.

    Args:
        file: to read.
        tp: the number of ranks there are shards of.
        kv_layout: which replica of keys and values lies where; None: as the file says, which without a word is `tile`.

    Raises:
        AdapterError: it is damaged, is of another number of ranks, or has a module fused in an unknown way.
        ConfigError: heads that cannot lie over so many ranks.
    """
    rules: dict[str, Rule] = {}
    modules: dict[str, tuple[str, ...]] = {}
    try:
        content = parse_json(file, file.read_bytes())
        where: KvLayout = kv_layout or content.get("kv_layout", "tile")
        if where not in get_args(KvLayout):
            raise _unusable(file, f"keys and values are replicated in an unknown order, {where!r}")
        parameters = {_without_adapter(name): dict(entry) for name, entry in content["parameters"].items()}
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
    rules = {f"{module}.{name}.lora_A.weight": Rule(replicated(tp), _each(module, linears, "lora_A.weight"))}
    for leaf in ("lora_B.weight", "lora_B.bias"):
        rules[f"{module}.{name}.{leaf}"] = Rule(parts, _each(module, linears, leaf))
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
    rules = {f"{base}.lora_A.weight": Rule(replicated(tp), _each(module, linears, "lora_A.weight"))}
    for kind in ("weight", "bias"):
        names = _each(module, linears, f"lora_B.{kind}")
        if spec["fuse_qkv"]:
            rule = Rule(fused([(q_size, queries), (kv_size, keys), (kv_size, keys)]), names)
            rules |= {f"{base}.lora_B.{kind}_qkv": rule, f"{base}.lora_B.{kind}": rule}
        else:
            for suffix, layout, target in zip("qkv", (queries, keys, keys), names, strict=True):
                rules[f"{base}.lora_B.{kind}_{suffix}"] = Rule(layout, (target,))
    after = f"{module}.{spec['output_projection_name']}.lora_A.weight"
    rules[after] = Rule(query(tp, *heads, dim=1), (after,))
    return rules, (name, linears)


def _each(module: str, linears: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{module}.{linear}.{leaf}" for linear in linears)


def _without_adapter(name: str) -> str:
    """A parameter's name as files of adapters have it: the adapter's own name stands behind what it is of."""
    kept: list[str] = []
    parts = iter(name.split("."))
    for part in parts:
        if part == "modules_to_save":
            next(parts, None)
        else:
            kept.append(part)
            if part.startswith("lora_"):
                next(parts, None)
    return ".".join(kept)


def _unusable(file: Path, what: str) -> AdapterError:
    return AdapterError(f"{file.name}: {what}", where=str(file), how="save the adapter again, with the same library")
