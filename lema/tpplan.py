"""How a model's modules lie over ranks: read from the tensor-parallel plan that comes with the model itself.

`transformers` gives a model a plan: patterns of names, each with a style such as `colwise`. What the plan leaves open
is where heads begin: attention is known by the head size its module has, and its projections by their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lema.errors import ConfigError, ModelError
from lema.layout import KvLayout, Layout, column, embedding, fused, kv, places, query, replicated, row
from lema.skeleton import meta_model

__all__ = ["layout_at", "layouts_of", "layouts_of_model"]

Make = Callable[[nn.Linear, int], Layout]


def layouts_of(
    config: PreTrainedConfig,
    tp: int,
    kv_layout: KvLayout = "tile",
    kv_multiplier: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Layout]:
    """Return the layout of the weight of every linear module and embedding that the model's plan covers.

    Args:
        config: the model's.
        tp: how many ranks.
        kv_layout: where replicas of keys and values lie, if there are fewer heads of these than ranks.
        kv_multiplier: how many replicas there are; None: as few as can be.
        trust_remote_code: as in `lema.skeleton.meta_model`.

    Returns:
        Names of modules in the causal language model, `*` standing for every number where the layers are alike. Look
        one up with `layout_at`.

    Raises:
        ModelError: the model has no plan.
        ConfigError: a module cannot be divided among so many ranks; it says which, and what would do.
    """
    return layouts_of_model(meta_model(config, trust_remote_code=trust_remote_code), tp, kv_layout, kv_multiplier)


def layouts_of_model(
    model: PreTrainedModel, tp: int, kv_layout: KvLayout = "tile", kv_multiplier: int | None = None
) -> dict[str, Layout]:
    """Return what `layouts_of` does for a model, whose parameters may be on `meta`; raises what that raises."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ModelError(
            "the model has no tensor-parallel plan",
            where=f"model_type {model.config.model_type!r}: base_model_tp_plan",
            how="train it on one device of each process, without tensor parallelism",
        )
    styles = {name: plan[_pattern(name)] for name, _ in model.named_modules() if _pattern(name) in plan}
    found: dict[str, Layout] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        try:
            if isinstance(module, nn.Embedding):
                layout = _of_embedding(module, style, tp)
            elif isinstance(module, nn.Linear):
                layout = _of_linear(module, style, tp, _attention(model, name, styles), kv_layout, kv_multiplier)
            else:
                continue
            if layout is not None:
                places(layout, module.weight.shape[layout.dim], 0)
                found[name] = layout
        except ConfigError as error:
            raise ConfigError(f"{name}: {error.what}", where=error.where or "tp", how=error.how) from error
    return _by_pattern(found)


def layout_at(name: str, layouts: Mapping[str, Layout]) -> Layout:
    """Find the layout of a module in what `layouts_of` returns.

    Raises:
        ModelError: the plan does not cover the module.
    """
    found = layouts.get(name) or layouts.get(_pattern(name))
    if found is None:
        raise ModelError(
            f"the model's tensor-parallel plan does not say how {name} lies over ranks",
            where=name,
            how="adapt only linear modules and embeddings that the plan covers, or train without tensor parallelism",
        )
    return found


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _by_pattern(found: Mapping[str, Layout]) -> dict[str, Layout]:
    alike: dict[str, set[Layout]] = {}
    for name, layout in found.items():
        alike.setdefault(_pattern(name), set()).add(layout)
    return {_pattern(name) if len(alike[_pattern(name)]) == 1 else name: layout for name, layout in found.items()}


def _of_embedding(module: nn.Embedding, style: str, tp: int) -> Layout | None:
    if style == "embedding_rowwise":
        return embedding(tp, module.num_embeddings)
    if style == "embedding_colwise":
        return embedding(tp, module.embedding_dim, dim=1)
    return replicated(tp) if style in _WHOLE else None


def _of_linear(
    module: nn.Linear,
    style: str,
    tp: int,
    heads: tuple[int, int, int] | None,
    kv_layout: KvLayout,
    kv_multiplier: int | None,
) -> Layout | None:
    if style not in ("colwise", "rowwise") or heads is None:
        make = _STYLES.get(style)
        return None if make is None else make(module, tp)
    dim = 0 if style == "colwise" else 1
    size, (queries, keys, width) = (module.out_features if dim == 0 else module.in_features), heads
    options: Any = {"kv_layout": kv_layout, "kv_multiplier": kv_multiplier, "dim": dim}
    if keys < queries and size == keys * width:
        layout = kv(tp, queries, keys, **options)
        if dim == 0 or layout.kv_multiplier == 1:
            return layout
        what = f"it takes {keys} heads of keys, which would be counted {layout.kv_multiplier} times"
    elif size % queries == 0:
        return query(tp, queries, keys, **options)
    else:
        what = f"its {size} {'outputs' if dim == 0 else 'inputs'} are neither {queries} heads nor {keys}"
    raise ConfigError(f"this module of an attention cannot be divided: {what}", how="train without tensor parallelism")


def _attention(model: nn.Module, name: str, styles: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Heads of queries, of keys, and their width, if the module is a projection of an attention; else None."""
    owner = name.rpartition(".")[0]
    parent = model.get_submodule(owner)
    width = next((w for w in (getattr(parent, name, None) for name in _WIDTHS) if w), None)
    after = [
        module.in_features
        for child, module in parent.named_children()
        if isinstance(module, nn.Linear) and styles.get(f"{owner}.{child}") == "rowwise"
    ]
    if not isinstance(width, int) or not after or max(after) % width:
        return None
    heads = max(after) // width
    return heads, heads // int(getattr(parent, "num_key_value_groups", None) or 1), width


def _padded_column(module: nn.Linear, tp: int) -> Layout:
    return column(tp, module.out_features if module.out_features % tp else None)


def _packed_column(module: nn.Linear, tp: int) -> Layout:
    return fused([(module.out_features // 2, column(tp))] * 2)


def _packed_row(module: nn.Linear, tp: int) -> Layout:
    return fused([(module.in_features // 2, replace(column(tp), dim=1))] * 2)


def _row(_: nn.Linear, tp: int) -> Layout:
    return row(tp)


def _whole(_: nn.Linear, tp: int) -> Layout:
    return replicated(tp)


_WIDTHS = ("v_head_dim", "head_dim", "head_size")  # what modules of attention call the width of a head
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_STYLES: Mapping[str, Make] = {
    "colwise": lambda _, tp: column(tp),
    "colwise_gather_output": _padded_column,
    "colwise_rep": _padded_column,
    "packed_colwise": _packed_column,
    "rowwise": _row,
    "rowwise_split_input": _row,
    "rowwise_rep": _row,
    "packed_rowwise": _packed_row,
    **dict.fromkeys(_WHOLE, _whole),
}
