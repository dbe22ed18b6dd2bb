"""Divides a transformers model's decoder layers over several ranks, by the model's own
tensor-parallel plan.

In each block of a layer (attention, the network after it) the first linears are cut by columns, the
last by rows. The block's hidden state enters once. Embeddings, norms and the head stay whole. A
module outside the plan is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.backend.layout import KvLayout, Layout
from lema.errors import ModelError
from lema.model.partition import layout_at, layouts_of
from lema.model.skeleton import find_layers
from lema_neuron.boundary import SEQUENCE, gather_at_end, scatter_at_start, wrap_block
from lema_neuron.comm import Comm
from lema_neuron.experts import EXPERTS, shard_experts
from lema_neuron.layers import ColumnParallelLinear, RowParallelLinear
from lema_neuron.shares import replicated_part

__all__ = ["TensorParallel", "parallelize"]

# whether the output is gathered
COLUMNS = {
    "colwise": False,
    "colwise_gather_output": True,
    "packed_colwise": False,
}
ROWS = {"rowwise": True, "rowwise_split_input": False}  # whether its input is cut already
WHOLE = ("replicate", "replicated_with_grad_allreduce")
# in attention modules
COUNTS = (
    ("num_heads", "num_attention_heads"),
    ("num_kv_heads", "num_key_value_heads"),
)


@dataclass(frozen=True)
class TensorParallel:
    """How the layers of a model are divided over a group.

    Attributes:
        model: the whole model, with parameters on `meta` or real.
        comm: the group.
        styles: the model's plan, by patterns of names.
        layouts: those of the modules' weights, by patterns of names.
        sequence_parallel: between blocks each rank has its share of the tokens.
        replicated: names of modules in a layer that stay whole although the plan does not cover
            them.
    """

    model: PreTrainedModel
    comm: Comm
    styles: Mapping[str, str]
    layouts: Mapping[str, Layout]
    sequence_parallel: bool
    replicated: frozenset[str] = frozenset()

    def shard(self, layer: nn.Module) -> None:
        """Replace one decoder layer's modules by this rank's share of them.

        Raises:
            ModelError: the plan does not cover one of them, or its style is not supported; the
                message names it.
            ConfigError: one cannot be cut for so many ranks.
        """
        name = next((name for name, module in self.model.named_modules() if module is layer), None)
        if name is None:
            raise ModelError("this layer is none of the model's", where=type(layer).__name__)
        styles = {
            path: style
            for path in _paths(layer)
            if (style := self.styles.get(_pattern(f"{name}.{path}")))
        }
        experts = [
            path
            for path, style in styles.items()
            if style == EXPERTS and path not in self.replicated
        ]
        for path in experts:
            shard_experts(
                layer.get_submodule(path), styles, path, self.comm, self.sequence_parallel
            )
        self._check(name, layer, styles, experts)
        layer.whole_part = replicated_part(self.comm, partial=self.sequence_parallel)  # type: ignore[assignment] # of this one module
        blocks: dict[str, list[str]] = {}
        for path, style in styles.items():
            if (style in COLUMNS or style in ROWS) and isinstance(_at(layer, path), nn.Linear):
                blocks.setdefault(path.rpartition(".")[0], []).append(path)
        for block, paths in blocks.items():
            self._shard_block(name, layer, block, {path: styles[path] for path in paths})
        for path, style in styles.items():
            if style == "replicated_with_grad_allreduce":
                _at(layer, path).whole_part = replicated_part(self.comm, partial=True)  # type: ignore[assignment] # of this one module

    def _check(
        self, name: str, layer: nn.Module, styles: Mapping[str, str], experts: Iterable[str]
    ) -> None:
        supported = (*COLUMNS, *ROWS, *WHOLE)
        for path, style in styles.items():
            inside = any(
                f"{path}.".startswith(f"{prefix}.") for prefix in (*experts, *self.replicated)
            )
            if not inside and (
                style not in supported or not isinstance(_at(layer, path), nn.Module)
            ):
                raise _refusal(
                    f"the plan's style {style!r} is not supported", f"{name}.{path}", path
                )
        for path, module in layer.named_modules():
            inside = any(f"{path}.".startswith(f"{prefix}.") for prefix in self.replicated)
            if isinstance(module, nn.Linear | Conv1D) and path not in styles and not inside:
                raise _refusal(
                    "the model's tensor-parallel plan does not cover this module",
                    f"{name}.{path}",
                    path,
                )

    def _shard_block(
        self, name: str, layer: nn.Module, path: str, styles: Mapping[str, str]
    ) -> None:
        block = layer.get_submodule(path)
        columns = [linear_path for linear_path, style in styles.items() if style in COLUMNS]
        rows = [linear_path for linear_path in styles if linear_path not in columns]
        cut = {linear_path for linear_path in columns if not COLUMNS[styles[linear_path]]}
        if (
            not columns
            or not rows
            or (not cut) == any(ROWS[styles[linear_path]] for linear_path in rows)
        ):
            raise ModelError(
                (
                    "columns and rows of this block do not fit each other in the model's "
                    "tensor-parallel plan"
                ),
                where=f"{name}.{path}: {dict(styles)}",
                how="train it without tensor parallelism",
            )
        owned = [parameter_name for parameter_name, _ in block.named_parameters(recurse=False)]
        if owned and cut:
            raise _refusal(
                "this block has parameters of its own, which no plan cuts",
                f"{name}.{path}: {owned}",
                path,
            )
        layouts = {
            linear_path: layout_at(f"{name}.{linear_path}", self.layouts) for linear_path in styles
        }
        for linear_path, style in styles.items():
            linear = layer.get_submodule(linear_path)
            assert isinstance(linear, nn.Linear)
            cut_one = (
                self._column(linear, layouts[linear_path], style)
                if style in COLUMNS
                else self._row(linear, layouts[linear_path], style)
            )
            setattr(block, linear_path.rpartition(".")[2], cut_one)
        for layout in layouts.values():
            if layout.kind == "query" and cut:
                _count_heads(block, layout)
        block.whole_part = None  # type: ignore[assignment]  # its own gradients may be partial or complete
        wrap_block(block, self.comm, self.sequence_parallel)

    def _column(self, linear: nn.Linear, layout: Layout, style: str) -> nn.Module:
        parallel_linear = ColumnParallelLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            gather_output=COLUMNS[style],
            dtype=linear.weight.dtype,
            device="meta",
            tensor_model_parallel_group=self.comm,
            layout=layout,
            boundary=True,
        )
        return self._filled(parallel_linear, linear)

    def _row(self, linear: nn.Linear, layout: Layout, style: str) -> nn.Module:
        parallel_linear = RowParallelLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            input_is_parallel=ROWS[style],
            dtype=linear.weight.dtype,
            device="meta",
            tensor_model_parallel_group=self.comm,
            layout=layout,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=SEQUENCE,
        )
        return self._filled(parallel_linear, linear)

    def _filled(
        self, parallel_linear: ColumnParallelLinear | RowParallelLinear, linear: nn.Linear
    ) -> nn.Module:
        parts = parallel_linear.parts()
        for name, part in parts.items():
            full = getattr(linear, name)
            mine = (
                part.shard(full.detach(), self.comm.rank)
                if not full.is_meta
                else getattr(parallel_linear, name).detach()
            )
            setattr(parallel_linear, name, nn.Parameter(mine, requires_grad=full.requires_grad))
        return parallel_linear.train(linear.training)


def parallelize(
    model: PreTrainedModel,
    comm: Comm,
    *,
    sequence_parallel: bool = False,
    kv_layout: KvLayout = "tile",
    replicated: Collection[str] = (),
) -> None:
    """Divide all decoder layers of a model over a group, in place; then attach adapters with
    `lema_neuron.peft`.

    Args:
        model: without adapters; its parameters may be on `meta`, and real ones are cut.
        comm: the group; every rank calls this.
        sequence_parallel: between blocks each rank has its share of the tokens; sequences must
            divide evenly.
        kv_layout: where copies of key/value heads lie, if there are fewer of them than ranks.
        replicated: names of modules in a layer (`mlp.experts`) that stay whole on every rank.

    Raises:
        ModelError: the model has no plan, or the plan does not cover a module; it is named.
        ConfigError: something cannot be cut for so many ranks.
    """
    sequence = sequence_parallel and comm.size > 1
    layouts = layouts_of(model, comm.size, kv_layout)
    tensor_parallel = TensorParallel(
        model, comm, dict(model.tp_plan), layouts, sequence, frozenset(replicated)
    )
    _, layers = find_layers(model)
    for layer in layers:
        tensor_parallel.shard(layer)
    if sequence:
        scatter_at_start(layers[0], comm)
        gather_at_end(layers[-1], comm)


def _count_heads(block: nn.Module, layout: Layout) -> None:
    """Set the numbers of heads of an attention to those of this rank."""
    keys = layout.kv_heads * layout.kv_multiplier
    block.num_key_value_groups = layout.heads // keys  # type: ignore[assignment] # of this one module
    for names, count in zip(COUNTS, (layout.heads, keys), strict=True):
        for name in names:
            if isinstance(getattr(block, name, None), int):
                setattr(block, name, count // layout.tp)


def _paths(layer: nn.Module) -> list[str]:
    modules = [name for name, _ in layer.named_modules() if name]
    return modules + [name for name, _ in layer.named_parameters()]


def _at(layer: nn.Module, path: str) -> nn.Module:
    owner, _, name = path.rpartition(".")
    module: nn.Module = getattr(layer.get_submodule(owner), name)
    return module


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _refusal(what: str, where: str, path: str) -> ModelError:
    return ModelError(
        what, where=where, how=f"keep it whole on every rank (whole: {path}), or use one rank"
    )
