"""The part of each tensor that one process holds of a model divided among several, and the backend
that divides it.

A backend's `Parallel.shard` divides the decoder layers and records the layout of each parameter
(`lema.backend.layout`) in its attribute `parallel_layout`. A parameter without this attribute is
whole in every process.

The layouts come from the tensor-parallel plan that `transformers` gives a model: patterns of names,
each with a style such as `colwise`. The plan leaves open where heads begin, so attention is
recognised by the head size of its module, and its projections by their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend, BackendOptions, Parallel, SingleProcess, load
from lema.backend import layout as kinds
from lema.backend.layout import KvLayout, Layout, axis_spans
from lema.backend.registry import planned
from lema.config import LemaConfig
from lema.errors import ConfigError, ModelError
from lema.model.weight_names import WRAPPED
from lema.storage.quantized.formats import part_of_quantized
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import part_of


def layout_of(parameter: Tensor) -> Layout | None:
    """Return how a parameter lies over the processes; None: every one has the whole of it."""
    layout: Layout | None = getattr(parameter, "parallel_layout", None)
    return layout


def local_records(
    model: nn.Module, records: Mapping[str, Stored], parallel: Parallel
) -> dict[str, Stored]:
    """Return what one process reads of each stored tensor of a model whose layers have been
    divided. `ConfigError`: a tensor that is divided is put together from others in a way that
    cannot be cut."""
    parameters = model.named_parameters(remove_duplicate=False)
    named = ((WRAPPED.sub("", name), layout_of(parameter)) for name, parameter in parameters)
    layouts = {
        name: layout for name, layout in named if layout is not None and layout.kind != "replicated"
    }
    shards = dict(records)
    for name, layout in layouts.items():
        if (record := records.get(name)) is None:
            continue
        size = record.shape[layout.dim]
        ranges = [
            (start, start + length) for start, length in axis_spans(layout, size, parallel.rank)
        ]
        assert layout.kind == "embedding" or all(stop <= size for _, stop in ranges), (
            f"{record.name} would be padded"
        )
        real = [(start, min(stop, size)) for start, stop in ranges]
        if isinstance(record, QuantizedRecord):
            shards[name] = part_of_quantized(record, layout.dim, real)
        else:
            try:
                shards[name] = part_of(record, layout.dim, real)
            except ValueError as error:
                what = (
                    f"{record.name} is put together from stored tensors in a way that cannot "
                    f"be divided: {error}"
                )
                how = "convert the model once with `lema prepare MODEL OUT` and use OUT"
                raise ConfigError(what, where="tensor_parallel_size", how=how) from error
    return shards


def local_tensor(parallel: Parallel, full_tensor: Tensor, layout: Layout | None) -> Tensor:
    """Return this process's part of a tensor."""
    if layout is None or parallel.size == 1:
        return full_tensor
    return kinds.shard(full_tensor, layout, parallel.rank)


def whole_tensor(parallel: Parallel, part: Tensor, layout: Layout | None) -> Tensor:
    """Put a tensor together from the parts of all processes, each of which calls this; in host
    memory. `DataError`: what several processes hold alike is not the same in all of them."""
    if parallel.size == 1:
        return part.detach().cpu()
    parts = [shard.detach().cpu() for shard in parallel.gather(part.detach())]
    return kinds.consolidate(parts, layout or Layout("replicated", parallel.size))


def whole_adapter(model: PeftModel, parallel: Parallel) -> dict[str, Tensor] | None:
    """Put everything that trains together, by its name in PEFT's model; every process calls this.
    None: it is whole. `DataError`: what several processes hold alike is not the same in all of
    them."""
    if parallel.size == 1:
        return None
    return {
        name: whole_tensor(parallel, parameter, layout_of(parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def local_adapter(
    model: PeftModel, parallel: Parallel, saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return this process's parts of an adapter in PEFT's file, by the same names."""
    if parallel.size == 1:
        return dict(saved)
    layouts = {
        name.replace(".default", ""): layout_of(parameter)
        for name, parameter in model.named_parameters()
    }
    layouts |= {
        name.removesuffix(".weight"): layout
        for name, layout in layouts.items()
        if "magnitude" in name
    }
    return {
        name: local_tensor(parallel, tensor, layouts.get(name)) for name, tensor in saved.items()
    }


def planned_suffixes(model: PreTrainedModel, suffixes: Iterable[str]) -> list[str]:
    """Return those of some ends of parameters' names that the model's tensor-parallel plan has."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    return [
        end for end in suffixes if any(pattern.endswith(f".{_pattern(end)}") for pattern in plan)
    ]


def layouts_of(
    model: PreTrainedModel, tp: int, kv_layout: KvLayout = "tile", kv_multiplier: int | None = None
) -> dict[str, Layout]:
    """Return the layout over `tp` ranks of the weight of every linear module and embedding that the
    model's plan covers, by the module's name, `*` standing for every number where the layers are
    alike; `layout_at` looks one up. `ModelError`: the model has no plan; `ConfigError`: a module
    cannot be divided among so many ranks; it says which, and what would do. `kv_layout`: where
    replicas of keys and values lie, if there are fewer heads of these than ranks. `kv_multiplier`:
    how many replicas there are; None: as few as can be."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        what = "the model has no tensor-parallel plan"
        how = "train it on one device of each process, without tensor parallelism"
        raise ModelError(
            what, where=f"model_type {model.config.model_type!r}: base_model_tp_plan", how=how
        )
    styles = {
        name: plan[_pattern(name)] for name, _ in model.named_modules() if _pattern(name) in plan
    }
    layouts: dict[str, Layout] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        try:
            if isinstance(module, nn.Embedding):
                by_column = style == "embedding_colwise"
                size = module.embedding_dim if by_column else module.num_embeddings
                layout = kinds.replicated(tp) if style in _WHOLE else None
                if by_column or style == "embedding_rowwise":
                    layout = kinds.embedding(tp, size, dim=int(by_column))
            elif isinstance(module, nn.Linear):
                heads = _attention(model, name, styles)
                layout = _of_linear(
                    module, style, tp, heads, kv_layout=kv_layout, kv_multiplier=kv_multiplier
                )
            else:
                continue
            if layout is not None:
                axis_spans(layout, module.weight.shape[layout.dim], 0)
                layouts[name] = layout
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {error.what}", where=error.where or "tp", how=error.how
            ) from error
    alike: dict[str, set[Layout]] = {}
    for name, layout in layouts.items():
        alike.setdefault(_pattern(name), set()).add(layout)
    return {
        _pattern(name) if len(alike[_pattern(name)]) == 1 else name: layout
        for name, layout in layouts.items()
    }


def layout_at(name: str, layouts: Mapping[str, Layout]) -> Layout:
    """Find the layout of a module in what `layouts_of` returns. `ModelError`: the plan does not
    cover the module.
    """
    layout = layouts.get(name) or layouts.get(_pattern(name))
    if layout is None:
        what = f"the model's tensor-parallel plan does not define how {name} lies over ranks"
        how = (
            "adapt only linear modules and embeddings that the plan covers, or train without "
            "tensor parallelism"
        )
        raise ModelError(what, where=name, how=how)
    return layout


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _of_linear(
    module: nn.Linear, style: str, tp: int, heads: tuple[int, int, int] | None, **kv: Any
) -> Layout | None:
    if style not in ("colwise", "rowwise") or heads is None:
        return _of_style(module, style, tp)
    dim = 0 if style == "colwise" else 1
    size = module.out_features if dim == 0 else module.in_features
    queries, keys, width = heads
    if keys < queries and size == keys * width:
        layout = kinds.kv(tp, queries, keys, dim=dim, **kv)
        if dim == 0 or layout.kv_multiplier == 1:
            return layout
        what = f"it takes {keys} heads of keys, which would be counted {layout.kv_multiplier} times"
    elif size % queries == 0:
        return kinds.query(tp, queries, keys, dim=dim, **kv)
    else:
        what = (
            f"its {size} {'outputs' if dim == 0 else 'inputs'} are neither {queries} heads nor "
            f"{keys}"
        )
    raise ConfigError(
        f"this module of an attention cannot be divided: {what}",
        how="train without tensor parallelism",
    )


def _attention(
    model: nn.Module, name: str, styles: Mapping[str, str]
) -> tuple[int, int, int] | None:
    """Heads of queries, of keys, and their width, if the module is a projection of an attention;
    else None.
    """
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


# what modules of attention call the width of a head
_WIDTHS = ("v_head_dim", "head_dim", "head_size")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")


def _of_style(module: nn.Linear, style: str, tp: int) -> Layout | None:
    match style:
        case "colwise":
            return kinds.column(tp)
        case "colwise_gather_output" | "colwise_rep":
            return kinds.column(tp, module.out_features if module.out_features % tp else None)
        case "packed_colwise":
            return kinds.fused([(module.out_features // 2, kinds.column(tp))] * 2)
        case "rowwise" | "rowwise_split_input" | "rowwise_rep":
            return kinds.row(tp)
        case "packed_rowwise":
            return kinds.fused([(module.in_features // 2, replace(kinds.column(tp), dim=1))] * 2)
    return kinds.replicated(tp) if style in _WHOLE else None


def open_backend(config: LemaConfig) -> Backend:
    """Open the device of a run. `BackendUnavailable`: it is not installed, or cannot run here;
    `ConfigError`: it cannot do what the settings ask for."""
    return load(config.device, _options(config))


def planned_parallel(config: LemaConfig) -> Parallel:
    """Return how the layers of a run would lie over its processes, as one of them sees it; none has
    to be there. `BackendUnavailable`, `ConfigError`: as `open_backend`."""
    if config.tensor_parallel_size in (None, 1) and not config.sequence_parallel:
        return SingleProcess()
    return planned(config.device, _options(config))


def _options(config: LemaConfig) -> BackendOptions:
    return BackendOptions(
        config.page_locked,
        config.tensor_parallel_size,
        config.sequence_parallel,
        config.deterministic,
        config.backend_settings,
    )
