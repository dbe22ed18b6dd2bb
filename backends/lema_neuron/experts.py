"""The experts of a mixture over several ranks: each rank has a share of every expert's hidden
features.

Their weights are parameters of one module, `[experts, 2 * features, hidden]` and `[experts, hidden,
features]`. The module computes with its share, and the sum over the ranks is its output. If a
factor of an adapter has the features of the weight, it is cut in the same way; the other factor is
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from lema.backend.layout import Layout, axis_spans, fused, shard
from lema.errors import ConfigError, ModelError
from lema.model.state.hooks import part_of_model
from lema_neuron.boundary import SEQUENCE, enter
from lema_neuron.comm import Comm
from lema_neuron.mappings import reduce_from_group, reduce_scatter_sequence
from lema_neuron.shares import along, local_size, replicated_part, sharded_part

__all__ = ["EXPERTS", "shard_adapters", "shard_experts"]

EXPERTS = "moe_tp_experts"  # the style of the whole module in a plan


def shard_experts(
    module: nn.Module, styles: Mapping[str, str], path: str, comm: Comm, sequence_parallel: bool
) -> None:
    """Cut the parameters of a module of experts, and make it call `enter` on its inputs and sum its
    outputs.

    Raises:
        ModelError: one of its parameters is cut in a way that is not supported, or the weights are
            transposed.
        ConfigError: one cannot be cut for so many ranks.
    """
    layouts: dict[str, Layout] = {}
    for name, parameter in module.named_parameters():
        style = styles.get(f"{path}.{name}")
        if (
            style not in ("packed_colwise", "rowwise")
            or parameter.dim() != 3
            or getattr(module, "is_transposed", False)
        ):
            raise ModelError(
                (
                    f"the experts' parameter {name} has the style {style!r}, or a shape that "
                    "is not supported"
                ),
                where=f"{path}.{name} {list(parameter.shape)}",
                how=f"keep the experts whole on every rank (whole: {path})",
            )
        layouts[name] = _layout(style, parameter, comm)
    sizes = {
        name: parameter.shape[layouts[name].dim] for name, parameter in module.named_parameters()
    }
    for name, layout in layouts.items():
        full = module.get_parameter(name)
        setattr(
            module,
            name,
            nn.Parameter(_cut(full.detach(), layout, comm.rank), requires_grad=full.requires_grad),
        )
    parts = {name: sharded_part(layout, sizes[name], comm) for name, layout in layouts.items()}
    module.parts = lambda: parts  # type: ignore[assignment] # of this one module

    @part_of_model
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entered = {name: _enter(value, comm, sequence_parallel) for name, value in kwargs.items()}
        return tuple(_enter(value, comm, sequence_parallel) for value in args), entered

    @part_of_model
    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001 - a hook
        if sequence_parallel:
            return reduce_scatter_sequence(output, comm, SEQUENCE)
        return reduce_from_group(output, comm)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def shard_adapters(outer: ParamWrapper, name: str, comm: Comm) -> None:
    """Cut PEFT's adapters on the weights of experts that have been cut; `outer` is the outermost
    adapter.

    A weight is `[experts, outputs, inputs]`; A is `[experts * rank, inputs]` and B `[outputs, rank
    * experts]`, as in PEFT. The gradient of the whole factor is a sum over the ranks, because each
    has used its share of the features.

    Raises:
        ConfigError: the model's plan keeps the experts whole on every rank.
    """
    experts = outer.get_base_layer()
    list_parts: Any = getattr(experts, "parts", dict)
    wrapper: nn.Module = outer
    while isinstance(wrapper, ParamWrapper):
        if (part := list_parts().get(wrapper.parameter_name)) is None:
            what = (
                f"adapters on {name}.{wrapper.parameter_name}, which the model's "
                "tensor-parallel plan does not cut"
            )
            raise ConfigError(
                what,
                where="lora_target_parameters",
                how="leave it out, or train without dividing layers",
            )
        cut, replicated, axis = (
            ("lora_B", "lora_A", 0) if part.layout.dim == 1 else ("lora_A", "lora_B", 1)
        )
        parts = {}
        for adapter, linear in getattr(wrapper, cut).items():
            full = linear.weight
            mine = sharded_part(along(part.layout, axis), full.shape[axis], comm)
            local_shard = mine.shard(full.detach(), comm.rank)
            linear.weight = nn.Parameter(local_shard.clone(), requires_grad=full.requires_grad)
            parts[f"{cut}.{adapter}.weight"] = mine
            parts[f"{replicated}.{adapter}.weight"] = replicated_part(comm, partial=True)
        wrapper.parts = lambda parts=parts: parts  # type: ignore[assignment] # `gradients.parts` looks for a method
        wrapper = wrapper.base_layer


def _layout(style: str, parameter: nn.Parameter, comm: Comm) -> Layout:
    if style == "rowwise":
        layout = Layout("row", comm.size, 2)
    else:
        layout = fused([(parameter.shape[1] // 2, Layout("column", comm.size, 1))] * 2)
    axis_spans(layout, parameter.shape[layout.dim], 0)  # raises if it cannot be cut
    return layout


def _cut(full: Tensor, layout: Layout, rank: int) -> Tensor:
    if not full.is_meta:
        return shard(full, layout, rank)
    shape = list(full.shape)
    shape[layout.dim] = local_size(layout, shape[layout.dim])
    return torch.empty(shape, dtype=full.dtype, device="meta")


def _enter(value: Any, comm: Comm, sequence_parallel: bool) -> Any:
    """Enter hidden states and routing weights, whose gradients are partial; the experts' numbers
    have no gradient.
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return enter(value, comm, sequence_parallel)
    return comm.all_gather(value, SEQUENCE) if sequence_parallel else value
