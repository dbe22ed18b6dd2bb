"""Makes the metadata of optimum-neuron's shards: how each parameter of its model is divided over
ranks.

Its decoder layers are those of the base model with two changes. Gate and up are one module.
Queries, keys and values are one module if heads of keys must be replicated, because ranks do not
divide them. The metadata list all parameters, frozen ones too, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend.layout import KvLayout, Layout, embedding
from lema.errors import AdapterError, ModelError
from lema.lora.shards import PREFIX, layout_of_tensor, module_of
from lema.model.partition import layout_at, layouts_of
from lema_neuron.shards.metadata import FUSED, GROUPED

__all__ = ["describe"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LEAVES = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
HOW = "leave the format out, because LEMA's own format holds all tensors"


@dataclass(frozen=True)
class _Module:
    """A module of optimum-neuron's model, which replaces one or several of the base model's."""

    path: str  # the path of the first of these
    module: nn.Module
    name: str  # its name in optimum-neuron's model
    suffixes: tuple[str, ...]  # those of its weights: one each for queries, keys and values
    stride: int  # the number of projections that are joined in one weight
    layout: Layout | None  # that of the weight of a linear module or embedding


def describe(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    model: PreTrainedModel,
    tp: int,
    kv_layout: KvLayout,
) -> dict[str, Any]:
    """Return the metadata of an adapter's shards. `AdapterError`: this format cannot hold one of
    its tensors, or it adapts only some of the modules that are fused there; `ModelError`: layers
    have other modules than optimum-neuron's models; `ConfigError`: they cannot be divided among so
    many ranks."""
    if model.config.is_heterogeneous:
        what = (
            "layers have settings of their own: "
            f"{', '.join(sorted(model.config.per_layer_attributes or ()))}"
        )
        raise ModelError(what, where=model.config.model_type, how=HOW)
    keys: int = getattr(model.config, "num_key_value_heads", None) or 1
    copies = max(1, tp // keys) if keys % tp else 1
    adapted = _adapted(tensors, config)
    parameters: dict[str, dict[str, Any]] = {}
    seen = set[int]()
    for entry in _modules(
        model, adapted, layouts_of(model, tp, kv_layout, copies), tp, grouped=keys % tp != 0
    ):
        base = ".base_layer" if entry.path in adapted else ""
        for name, parameter in entry.module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a tied head is the embeddings
                at = {
                    f"{PREFIX}{entry.name}{base}.{name}{end}": _partition(
                        entry.layout, tp, entry.stride
                    )
                    for end in entry.suffixes
                }
                parameters |= at
            seen.add(id(parameter))
        for leaf in sorted(adapted.get(entry.path, ())):
            assert entry.layout is not None
            kind, dot, suffix = leaf.partition(".")
            for end in entry.suffixes if leaf == "lora_B.weight" else ("",):
                lies = layout_of_tensor(leaf, entry.layout, 2)
                parameters[f"{PREFIX}{entry.name}.{kind}.default{dot}{suffix}{end}"] = _partition(
                    lies, tp
                )
    specs = [
        {"module_fully_qualified_name": f"{PREFIX}{path}", "specs": module_specs}
        for path, module in model.named_modules()
        if (module_specs := _specs(module, model.config, tp, keys, copies)) is not None
    ]
    order = {"kv_layout": kv_layout} if copies > 1 and kv_layout != "tile" else {}
    return {"parameters": parameters, "model_weight_transformation_specs": specs, **order}


def _adapted(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the tensors that an adapter has for each module of the base model."""
    for option in ("rank_pattern", "alpha_pattern"):
        if config.get(option):
            what = f"{option} names modules that may be fused in this format"
            raise AdapterError(what, where=option, how=HOW)
    leaves_by_path: dict[str, set[str]] = {}
    for name in tensors:
        path, leaf = module_of(name)
        if leaf not in LEAVES:
            raise AdapterError("this format cannot hold such a tensor", where=name, how=HOW)
        leaves_by_path.setdefault(path, set()).add(leaf)
    return leaves_by_path


def _modules(
    model: PreTrainedModel,
    adapted: Mapping[str, set[str]],
    plan: Mapping[str, Layout],
    tp: int,
    *,
    grouped: bool,
) -> Iterator[_Module]:
    for path, module in model.named_modules():
        if not (parameters := dict(module.named_parameters(recurse=False))):
            continue
        layout = None
        owner, _, last = path.rpartition(".")
        if isinstance(module, nn.Embedding):
            layout = embedding(tp, module.num_embeddings)
        elif isinstance(module, nn.Linear):
            layout = layout_at(path, plan)
        is_supported = last in (*ATTENTION, *MLP) or module in (
            model.get_input_embeddings(),
            model.get_output_embeddings(),
        )
        odd = (
            max(parameter.dim() for parameter in parameters.values()) > 1
            if layout is None
            else not is_supported or "bias" in parameters
        )
        if odd:
            what = (
                f"{path} is no module of the models that this format is "
                f"for{', or has a bias' if is_supported else ''}"
            )
            raise ModelError(what, where=path, how=HOW)
        siblings = (
            {name for name, _ in model.get_submodule(owner).named_children()} if owner else set()
        )
        fused: tuple[str, ...] = MLP[:2] if siblings.issuperset(MLP) else ()
        if grouped and siblings.issuperset(ATTENTION):
            fused = ATTENTION[:3]
        if last not in fused:
            yield _Module(path, module, path, ("",), 1, layout)
        elif last == ATTENTION[0] or last == MLP[0]:
            paths = [f"{owner}.{name}" for name in fused]
            if any(adapted.get(fused_path) != adapted.get(path) for fused_path in paths):
                what = (
                    f"{', '.join(fused)} are one module in this format, and the adapter has "
                    "only some of them"
                )
                raise AdapterError(what, where=path, how=HOW)
            attention = fused == ATTENTION[:3]
            name = f"{owner}.{'qkv_proj' if attention else 'gate_up_proj'}"
            suffixes = ("_q", "_k", "_v") if attention else ("",)
            yield _Module(path, module, name, suffixes, 1 if attention else len(fused), layout)


def _partition(layout: Layout | None, tp: int, stride: int = 1) -> dict[str, Any]:
    if layout is None or layout.kind == "replicated":
        return {"tensor_model_parallel": False}
    cut = {"partition_dim": layout.dim, "partition_stride": stride, "num_partitions": tp}
    return {"tensor_model_parallel": True, **cut}


def _specs(
    module: nn.Module, config: Any, tp: int, keys: int, copies: int
) -> list[list[Any]] | None:
    """Return the fused modules of an attention or an MLP; None: the module is neither."""
    linears: dict[str, Any] = dict(module.named_children())
    about = {"tp_size": tp, "peft_type": "lora"}
    if linears.keys() >= set(MLP):
        fused = {
            "fused_linear_name": "gate_up_proj",
            "linear_names": list(MLP[:2]),
            "bias": False,
            "fuse_axis": 0,
        }
        return [
            [
                FUSED,
                {
                    **fused,
                    "original_dims": [linears[name].out_features for name in MLP[:2]],
                    **about,
                },
            ]
        ]
    if not linears.keys() >= set(ATTENTION):
        return None
    if keys % tp == 0:
        return []
    names = (
        "query_projection_name",
        "key_projection_name",
        "value_projection_name",
        "output_projection_name",
    )
    heads = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": keys,
        "kv_size_multiplier": copies,
    }
    sizes = {"q_output_size_per_partition": linears["q_proj"].out_features // tp}
    sizes["kv_output_size_per_partition"] = linears["k_proj"].out_features * copies // tp
    projections = {
        "gqa_qkv_projection_name": "qkv_proj",
        **dict(zip(names, ATTENTION, strict=True)),
    }
    return [[GROUPED, {**projections, **heads, **sizes, "fuse_qkv": False, "bias": False, **about}]]
