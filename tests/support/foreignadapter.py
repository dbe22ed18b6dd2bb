"""Adapters as the parallel library saves them, written by its documented rules and with none of
the code under test.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ATTENTION = "base_model.model.model.layers.{}.self_attn"
MLP = "base_model.model.model.layers.{}.mlp"
EMBEDDING = "base_model.model.model.embed_tokens"
HEAD_DIM = 4


@dataclass(frozen=True)
class Shape:
    """Of the model and the group: `copies` of keys and values; grouped where these are
    replicated.
    """

    tp: int
    heads: int
    kv_heads: int
    copies: int = 1
    layers: int = 8
    fuse_qkv: bool = False
    where: str = "tile"

    @property
    def grouped(self) -> bool:
        return self.copies > 1

    def key_slots(self, rank: int) -> list[tuple[int, int]]:
        """Which (head of keys, replica) one rank holds."""
        if self.where == "tile":
            line = [
                (head, replica) for replica in range(self.copies) for head in range(self.kv_heads)
            ]
        else:  # as many heads as a rank holds, on `copies` ranks in a row
            each = self.kv_heads * self.copies // self.tp
            line = [
                (head, replica)
                for first in range(0, self.kv_heads, each)
                for replica in range(self.copies)
                for head in range(first, first + each)
            ]
        each = len(line) // self.tp
        return line[rank * each : (rank + 1) * each]

    def query_heads(self, rank: int) -> list[int]:
        """The query heads of a rank: of each of its heads of keys the replica's share."""
        group = self.heads // self.kv_heads
        share = group // self.copies
        return [
            head * group + replica * share + i
            for head, replica in self.key_slots(rank)
            for i in range(share)
        ]


def rows(tensor: Tensor, heads: list[int]) -> Tensor:
    return torch.cat([tensor[head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in heads])


def chunk(tensor: Tensor, shape: Shape, rank: int, dim: int) -> Tensor:
    return tensor.chunk(shape.tp, dim)[rank].clone()


def of_rank(
    adapter: Mapping[str, Tensor], shape: Shape, rank: int, layers: range
) -> dict[str, Tensor]:
    """What one rank of one stage holds."""
    held: dict[str, Tensor] = {}
    for layer in layers:
        attention = ATTENTION.format(layer)
        mlp = MLP.format(layer)
        queries = shape.query_heads(rank)
        keys = [head for head, _ in shape.key_slots(rank)]
        q, k, v = (adapter[f"{attention}.{name}_proj.lora_B.weight"] for name in "qkv")
        if shape.grouped:
            base = f"{attention}.qkv_proj"
            held[f"{base}.lora_A.weight"] = adapter[f"{attention}.q_proj.lora_A.weight"].clone()
            pieces = {"q": rows(q, queries), "k": rows(k, keys), "v": rows(v, keys)}
            if shape.fuse_qkv:
                held[f"{base}.lora_B.weight_qkv"] = torch.cat(list(pieces.values()))
            else:
                held |= {f"{base}.lora_B.weight_{name}": piece for name, piece in pieces.items()}
        else:
            for name, b in zip("qkv", (q, k, v), strict=True):
                base = f"{attention}.{name}_proj"
                held[f"{base}.lora_A.weight"] = adapter[f"{base}.lora_A.weight"].clone()
                held[f"{base}.lora_B.weight"] = chunk(b, shape, rank, 0)
        after = adapter[f"{attention}.o_proj.lora_A.weight"]
        held[f"{attention}.o_proj.lora_A.weight"] = (
            rows(after.t(), queries).t().contiguous()
            if shape.grouped
            else chunk(after, shape, rank, 1)
        )
        held[f"{attention}.o_proj.lora_B.weight"] = adapter[
            f"{attention}.o_proj.lora_B.weight"
        ].clone()
        gate, up = (adapter[f"{mlp}.{name}_proj.lora_B.weight"] for name in ("gate", "up"))
        held[f"{mlp}.gate_up_proj.lora_A.weight"] = adapter[
            f"{mlp}.gate_proj.lora_A.weight"
        ].clone()
        held[f"{mlp}.gate_up_proj.lora_B.weight"] = torch.cat(
            [chunk(gate, shape, rank, 0), chunk(up, shape, rank, 0)]
        )
        held[f"{mlp}.down_proj.lora_A.weight"] = chunk(
            adapter[f"{mlp}.down_proj.lora_A.weight"], shape, rank, 1
        )
        held[f"{mlp}.down_proj.lora_B.weight"] = adapter[f"{mlp}.down_proj.lora_B.weight"].clone()
    if 0 in layers:
        held |= {
            name: tensor.clone() for name, tensor in adapter.items() if name.startswith(EMBEDDING)
        }
    return held


def metadata_of(
    held: Mapping[str, Tensor], shape: Shape, layers: range, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """What the library writes of one stage."""
    whole = {"tensor_model_parallel": False}
    parameters: dict[str, dict[str, Any]] = {}
    for name in held:
        cut = {"partition_stride": 1, "num_partitions": shape.tp, "tensor_model_parallel": True}
        dim = 1 if ".lora_A." in name else 0
        column = "o_proj" not in name and "down_proj" not in name
        row = "o_proj" in name or "down_proj" in name
        is_cut = (column and dim == 0) or (row and dim == 1)
        spelt = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        if ".lora_embedding_" in name:
            spelt = f"{name}.default"
            is_cut = False
        parameters[spelt] = {**cut, "partition_dim": dim} if is_cut else dict(whole)
        if name.endswith("weight_qkv"):
            parameters[spelt] = dict(whole)  # the library forgets to mark it
    specs = []
    for layer in layers:
        if shape.grouped:
            specs.append(
                {
                    "module_fully_qualified_name": ATTENTION.format(layer),
                    "specs": [["GQAQKVColumnParallelLinearSpec", _grouped(shape)]],
                }
            )
        fused = {
            "fused_linear_name": "gate_up_proj",
            "linear_names": ["gate_proj", "up_proj"],
            "bias": False,
            "fuse_axis": 0,
            "original_dims": [sizes["intermediate"]] * 2,
            "tp_size": shape.tp,
            "peft_type": "lora",
        }
        specs.append(
            {
                "module_fully_qualified_name": MLP.format(layer),
                "specs": [["FusedLinearsSpec", fused]],
            }
        )
    return {"parameters": parameters, "model_weight_transformation_specs": specs}


def _grouped(shape: Shape) -> dict[str, Any]:
    return {
        "gqa_qkv_projection_name": "qkv_proj",
        "query_projection_name": "q_proj",
        "key_projection_name": "k_proj",
        "value_projection_name": "v_proj",
        "output_projection_name": "o_proj",
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "kv_size_multiplier": shape.copies,
        "q_output_size_per_partition": shape.heads * HEAD_DIM // shape.tp,
        "kv_output_size_per_partition": shape.kv_heads * shape.copies * HEAD_DIM // shape.tp,
        "fuse_qkv": shape.fuse_qkv,
        "bias": False,
        "tp_size": shape.tp,
        "peft_type": "lora",
    }


def write_foreign(
    directory: Path,
    adapter: Mapping[str, Tensor],
    config: Mapping[str, Any],
    shape: Shape,
    *,
    stages: int = 1,
    references: bool = False,
) -> Path:
    """Write `adapter_default/` into `directory` and return it; `references`: every tensor in a
    file of its own.
    """
    root = directory / "adapter_default"
    shards = root / "adapter_shards"
    (shards / "model").mkdir(parents=True)
    (root / "adapter_config.json").write_text(json.dumps(config))
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1")
    intermediate = adapter[f"{MLP.format(0)}.up_proj.lora_B.weight"].shape[0]
    each = shape.layers // stages
    for stage in range(stages):
        layers = range(stage * each, (stage + 1) * each)
        for rank in range(shape.tp):
            held = of_rank(adapter, shape, rank, layers)
            file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt"
            (save_references if references else torch.save)(held, file)
        content = metadata_of(held, shape, layers, {"intermediate": intermediate})
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(content))
    return root


def save_references(held: Mapping[str, Tensor], file: Path) -> None:
    """Save each tensor by itself, and in the file references to them, of a class that is not
    installed here.
    """
    folder = file.with_name(f"{file.name}.tensors")
    folder.mkdir()
    names = ["torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"]
    modules = {name: types.ModuleType(name) for name in names}

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__ = names[-1]
    TensorReference.__qualname__ = "TensorReference"
    modules[names[-1]].TensorReference = TensorReference  # type: ignore[attr-defined]
    assert not sys.modules.keys() & modules.keys()
    sys.modules.update(modules)
    try:
        for number, tensor in enumerate(held.values()):
            torch.save(tensor, folder / f"tensor_{number}.pt")
        torch.save({name: TensorReference(number) for number, name in enumerate(held)}, file)
        about = {
            number: {"dtype": t.dtype, "shape": t.shape} for number, t in enumerate(held.values())
        }
        torch.save(about, file.with_name(f"{file.name}.info.pt"))
    finally:
        for name in names:
            del sys.modules[name]
