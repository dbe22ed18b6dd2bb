"""Adapters in the parallel library's shards, put together as PEFT has them.

Projections that it fused share one A, and so every one of them gets that A. What is replicated must agree on all ranks;
where a run did not keep it so, the first rank's can be asked for, which are what that library itself would take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.errors import AdapterError, ConfigError
from lema.foreignfiles import find_stages, load_rank
from lema.foreignspecs import Metadata, Rule, read_metadata
from lema.layout import Difference, KvLayout, Layout, fused, replicated
from lema.shardfiles import join

__all__ = ["Adapter", "read_foreign"]


@dataclass(frozen=True)
class Adapter:
    """A whole adapter.

    Attributes:
        tensors: by PEFT's names.
        differing: names of those whose replicas differ, and where.
        modules: name of a fused module -> those of the projections its adapter now is of.
        tp: how many ranks it lay over.
    """

    tensors: Mapping[str, Tensor]
    differing: Mapping[str, list[Difference]]
    modules: Mapping[str, tuple[str, ...]]
    tp: int


def read_foreign(directory: Path, kv_layout: KvLayout | None = None, *, check: bool = True) -> Adapter:
    """Read all ranks and stages of a sharded adapter and put them together.

    Args:
        directory: with `model/` and `mp_metadata_pp_rank_*.json`.
        kv_layout: which replica of keys and values lies where; None: as the metadata says, else `tile`.
        check: replicas must agree, bit for bit; else the first rank's are taken.

    Raises:
        AdapterError: a file is missing, damaged or unsafe; the ranks do not fit together; or replicas differ.
    """
    tensors: dict[str, Tensor] = {}
    differing: dict[str, list[Difference]] = {}
    modules: dict[str, tuple[str, ...]] = {}
    stages = find_stages(directory)
    for stage in stages:
        try:
            metadata = read_metadata(stage.metadata, len(stage.files), kv_layout)
        except ConfigError as error:
            raise AdapterError(f"{stage.metadata.name}: {error.what}", where=str(stage.metadata)) from error
        ranks = [load_rank(file) for file in stage.files]
        for rank, held in enumerate(ranks):
            if odd := sorted(held.keys() ^ ranks[0].keys()):
                raise AdapterError(
                    f"rank 0 and rank {rank} hold different tensors: {odd[0]}",
                    where=str(stage.files[rank]),
                    how="the files are not of one checkpoint; copy it again",
                )
        for name in ranks[0]:
            rule = metadata.rules.get(name) or _plain_rule(name, ranks[0][name], metadata, len(ranks))
            whole, found = join([held[name] for held in ranks], rule.layout, name, check=check)
            if found:
                differing[name] = found
            for target, piece in zip(rule.names, _split(whole, rule), strict=True):
                if target in tensors:
                    if tensors[target].dtype == piece.dtype and torch.equal(tensors[target], piece):
                        continue  # a weight that two stages share is in both
                    raise AdapterError(f"{target} comes twice, once from {name}", where=str(stage.metadata))
                tensors[target] = piece
        modules |= metadata.modules
    return Adapter(tensors, differing, modules, len(stages[0].files))


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


def _split(whole: Tensor, rule: Rule) -> list[Tensor]:
    if len(rule.names) == 1:
        return [whole]
    if rule.layout.parts:
        return [part.contiguous() for part in whole.split([size for size, _ in rule.layout.parts], rule.layout.dim)]
    return [whole.clone() for _ in rule.names]
