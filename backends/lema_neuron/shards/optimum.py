"""optimum-neuron's adapter shards, a `ShardFormat` of `lema_tools.shards.convert`: put together
from ranks, and cut up.

The files are like those of optimum-neuron without xser, one for each rank. Its `optimum-cli neuron
consolidate` reads them, and so does `neuronx_distributed`, by their layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend.host.files import flush
from lema.backend.layout import Difference, KvLayout, shard
from lema.errors import AdapterError, ConfigError
from lema.lora.checks import check_shapes
from lema.lora.shards import module_of
from lema_neuron.shards.describe import describe
from lema_neuron.shards.metadata import (
    OWN_NAME,
    Metadata,
    Rule,
    metadata_of,
    plain_rule,
    read_metadata,
)
from lema_neuron.shards.own import join
from lema_neuron.shards.ranks import find_stages, load_rank, rank_file

__all__ = ["OPTIMUM"]

METADATA = "mp_metadata_pp_rank_{}.json"


class _Optimum:
    marks = METADATA.format("*")

    def read(
        self,
        directory: Path,
        config: Mapping[str, Any],
        model: nn.Module | None,
        kv_layout: KvLayout | None,
        *,
        check: bool,
    ) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int, dict[str, Any]]:
        """Read all ranks and stages (`find_stages`, `read_metadata`). Rows that pad a vocabulary
        are left out if the base model gives its number of words."""
        tensors, differing, tp, modules = _read(directory, kv_layout, check=check)
        if model is not None:
            tensors = {
                name: _without_padding(name, tensor, model, tp) for name, tensor in tensors.items()
            }
        return tensors, differing, tp, _with_projections(config, modules, directory)

    def write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        model: PreTrainedModel,
        tp: int,
        kv_layout: KvLayout,
    ) -> None:
        """Write the files of `tp` ranks in one pipeline stage, their metadata, and the markers
        of a save that ended.
        """
        check_shapes(tensors, model, "the base model")
        content = describe(tensors, config, model, tp, kv_layout)
        file = directory / METADATA.format(0)
        metadata = metadata_of(content, file, tp)
        names = _shard_names(content)
        rules = {
            name: metadata.rules.get(name) or _padded(name, tensors, metadata, tp) for name in names
        }
        wholes = {name: _fuse(rule, tensors) for name, rule in rules.items()}
        (directory / "model").mkdir(parents=True)
        for rank in range(tp):
            pieces = {name: shard(full, rules[name].layout, rank) for name, full in wholes.items()}
            torch.save(pieces, directory / "model" / rank_file(rank))
            flush(directory / "model" / rank_file(rank))
        file.write_text(json.dumps(content, indent=4), encoding="utf-8", newline="\n")
        flush(file)
        for marker in ("checkpoint", "done"):
            (directory / marker).write_text("1", encoding="utf-8", newline="\n")


OPTIMUM = _Optimum()


def _shard_names(content: Mapping[str, Any]) -> list[str]:
    """Name the adapter's tensors like the shards: parameters of the metadata without the
    adapter's name.
    """
    named = [OWN_NAME.sub(r"\1", name) for name in content["parameters"]]
    return [name for name in named if ".lora_" in name]


def _padded(name: str, tensors: Mapping[str, Tensor], metadata: Metadata, tp: int) -> Rule:
    """Return the rule for a tensor that is not fused; a vocabulary that does not divide evenly
    is padded with zeros.
    """
    rule = plain_rule(name, tensors[name], metadata, tp)
    size = tensors[name].shape[0] if rule.layout.kind == "column" else None
    return replace(rule, layout=replace(rule.layout, size=size))


def _fuse(rule: Rule, tensors: Mapping[str, Tensor]) -> Tensor:
    """Make one tensor from those of fused projections: their Bs joined, or the A that they
    share.
    """
    parts = [tensors[name] for name in rule.names]
    if rule.layout.parts:
        return torch.cat(parts, rule.layout.dim)
    if any(not torch.equal(parts[0], part) for part in parts):
        modules = ", ".join(module_of(name)[0] for name in rule.names)
        what = f"{modules} have an A each, and in this format they share one"
        raise AdapterError(
            what,
            where=rule.names[1],
            how="use LEMA's own format; or give the whole adapter to that library",
        )
    return parts[0]


def _without_padding(name: str, tensor: Tensor, model: nn.Module, tp: int) -> Tensor:
    """Cut off the rows that fill the last rank's part of a vocabulary."""
    path, leaf = module_of(name)
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return tensor
    if isinstance(module, nn.Linear) and leaf in ("lora_B.weight", "weight"):
        words = module.out_features
    elif isinstance(module, nn.Embedding) and leaf == "weight":
        words = module.num_embeddings
    else:
        return tensor
    return tensor[:words].clone() if tensor.shape[0] == -(-words // tp) * tp > words else tensor


def _with_projections(
    config: Mapping[str, Any], modules: Mapping[str, tuple[str, ...]], directory: Path
) -> dict[str, Any]:
    """Return the config with the names of the adapter's projections instead of the fused
    modules.
    """
    for option in ("rank_pattern", "alpha_pattern"):
        if fused := [key for key in config.get(option) or {} if key.rpartition(".")[2] in modules]:
            what = f"{option} names {fused[0]}, which is several modules in the base model"
            how = f"name {', '.join(modules[fused[0].rpartition('.')[2]])} there"
            raise AdapterError(what, where=str(directory), how=how)
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        named = {new for target in targets for new in modules.get(target, (target,))}
        if set(targets) != named:
            return {**config, "target_modules": sorted(named)}
    return dict(config)


def _read(
    directory: Path, kv_layout: KvLayout | None, *, check: bool
) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int, dict[str, tuple[str, ...]]]:
    """Read all ranks and stages of a sharded adapter (`find_stages`, `read_metadata`) and put them
    together. Return the tensors by PEFT's names; the replicas that differ; the number of ranks; and
    the name of each fused module -> those of its projections, which now have the adapter. If
    `check`, replicas must agree bit for bit; else the first rank's are used. `AdapterError`: a file
    is missing, damaged or unsafe, or ranks or replicas differ."""
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
        for rank, rank_tensors in enumerate(ranks):
            if odd := sorted(rank_tensors.keys() ^ ranks[0].keys()):
                what = f"rank 0 and rank {rank} hold different tensors: {odd[0]}"
                how = "the files are not of one checkpoint; copy it again"
                raise AdapterError(what, where=str(files[rank]), how=how)
        for name in ranks[0]:
            rule = metadata.rules.get(name) or plain_rule(
                name, ranks[0][name], metadata, len(ranks)
            )
            full, mismatches = join(
                [rank_tensors[name] for rank_tensors in ranks], rule.layout, name, check=check
            )
            if mismatches:
                differing[name] = mismatches
            parts = [full] if len(rule.names) == 1 else [full.clone() for _ in rule.names]
            if len(rule.names) > 1 and rule.layout.parts:
                sizes = [size for size, _ in rule.layout.parts]
                parts = [part.contiguous() for part in full.split(sizes, rule.layout.dim)]
            for target, piece in zip(rule.names, parts, strict=True):
                if target in tensors:
                    if tensors[target].dtype == piece.dtype and torch.equal(tensors[target], piece):
                        continue  # a weight that two stages share is in the files of both
                    raise AdapterError(f"{target} occurs twice, once from {name}", where=str(about))
                tensors[target] = piece
        modules |= metadata.modules
    return tensors, differing, len(stages[0][1]), modules
