"""PEFT's LoRA layers over column and row layers: factors are cut like the weight, and the rank
is never cut.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lema.backend.layout import column
from lema_neuron.layers import ColumnParallelLinear, RowParallelLinear
from lema_neuron.layers.partition import sequence_dim
from lema_neuron.peft.base import Base, describe
from lema_neuron.peft.dora import ShardedDora, magnitude_part
from lema_neuron.peft.draw import common_seed, draw_a, draw_b
from lema_neuron.peft.dropout import ShardedDropout
from lema_neuron.peft.refusals import check_config, check_dora, refuse_mixed_batch
from lema_neuron.shares import Part, along, replicated_part

__all__ = ["NeuronLoraLayer", "ParallelLinear", "as_config"]


def as_config(config: LoraConfig | None, **options: Any) -> LoraConfig:
    """Return PEFT's config, or make one of the arguments that layers had before PEFT passed a
    config.

    Raises:
        ConfigError: one of its options is not exact under sharding.
    """
    kind = options.pop("init_lora_weights", True)
    lora_config = config or LoraConfig(init_lora_weights=kind, **options)
    check_config(lora_config)
    return lora_config


class NeuronLoraLayer(LoraLayer):
    """Common code of the adapted parallel layers; `base` describes the layer.

    Args:
        base_layer: a parallel layer, LEMA's or neuronx-distributed's.
        ephemeral_gpu_offload: PEFT's; without effect.
        kwargs: PEFT's.

    Raises:
        ModelError: it is no parallel layer.
    """

    base: Base

    def __init__(
        self, base_layer: nn.Module, ephemeral_gpu_offload: bool = False, **kwargs: Any
    ) -> None:
        LoraLayer.__init__(self, base_layer, ephemeral_gpu_offload, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
        self.base = describe(module)
        first, *outputs = self.base.sizes
        return first, outputs[0] if len(outputs) == 1 else outputs

    @property
    def _layer(self) -> Any:
        return self.get_base_layer()

    @property
    def lora_variants(self) -> dict[Any, Any]:
        """Return none: PEFT's own variants are not exact under sharding."""
        return {(): None}

    def _begin(self, name: str, r: int, alpha: float, config: LoraConfig) -> None:
        """Store the options of a new adapter, like PEFT."""
        check_config(config)
        check_dora(config, self.base, self._layer)
        if r <= 0:
            raise ValueError(f"`r` should be a positive integer value but the value passed is {r}")
        self.r[name] = r
        self.lora_alpha[name] = alpha
        self.scaling[name] = alpha / math.sqrt(r) if config.use_rslora else alpha / r
        self.use_rslora[name] = config.use_rslora
        self.use_dora[name] = config.use_dora
        self.lora_bias[name] = config.lora_bias
        self.lora_dropout[name] = self._dropout(config.lora_dropout)

    def _dropout(self, p: float) -> nn.Module:
        return nn.Dropout(p) if p else nn.Identity()

    def _end(self, name: str, config: LoraConfig, target_name: str) -> None:
        """Draw the new adapter's values, unless it is on `meta`, and make it active."""
        if not any(factor.is_meta for factor in self._factors(name)):
            base = self.base
            device = next(self.get_base_layer().parameters()).device
            seed = common_seed(base.comm, "cpu" if device.type in ("cpu", "meta") else device)
            self.draw(name, config.init_lora_weights, seed, target_name)
        self._move_adapter_to_device_of_base_layer(name)
        if config.use_dora:
            self.lora_variant[name] = ShardedDora()
            self.lora_variant[name].init(self, name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _factors(self, name: str) -> list[nn.Parameter]:
        return [*self.lora_A[name].parameters(), *self.lora_B[name].parameters()]

    def draw(self, adapter_name: str, how: bool | str, seed: int, module_name: str) -> None:
        """Fill an adapter: draw both factors in full, from the seed and the names, and cut them.

        Args:
            adapter_name: its name.
            how: `init_lora_weights`.
            seed: the same on every rank.
            module_name: the adapted module's name in the model.
        """
        raise NotImplementedError

    def parts(self) -> dict[str, Part]:
        """Return how those parameters of the factors are divided whose own modules do not say
        it.
        """
        raise NotImplementedError


class ParallelLinear(NeuronLoraLayer, LoraLinear):
    """LoRA over a `ColumnParallelLinear` (A whole, B cut by rows) or a `RowParallelLinear` (A cut
    by columns, B whole).

    Merging adds the product of a rank's shares of the factors to the rank's weight.

    Args:
        base_layer: the parallel layer.
        adapter_name: of the first adapter.
        r: its rank; it is never cut.
        lora_alpha: its output is scaled by `lora_alpha / r`.
        lora_dropout: the probability for its input; the mask is that of the whole input.
        fan_in_fan_out: without effect: parallel weights are `[output, input]`.
        is_target_conv_1d_layer: PEFT's.
        init_lora_weights: True, False or "gaussian".
        use_rslora: scale by `lora_alpha / sqrt(r)`.
        use_dora: train a magnitude for each row; see `lema_neuron.peft.dora`.
        lora_bias: B has a bias.
        config: PEFT's, in the place of the five before.
        kwargs: PEFT's.

    Raises:
        ConfigError: what is asked for is not exact under sharding.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        r: int = 0,
        lora_alpha: int = 1,
        lora_dropout: float = 0.0,
        fan_in_fan_out: bool = False,  # noqa: ARG002 - PEFT's signature
        is_target_conv_1d_layer: bool = False,
        init_lora_weights: bool | str = True,
        use_rslora: bool = False,
        use_dora: bool = False,
        lora_bias: bool = False,
        *,
        config: LoraConfig | None = None,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        NeuronLoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = False
        self.is_target_conv_1d_layer = is_target_conv_1d_layer
        self._active_adapter = adapter_name
        lora_config = as_config(
            config,
            lora_dropout=lora_dropout,
            init_lora_weights=init_lora_weights,
            use_rslora=use_rslora,
            use_dora=use_dora,
            lora_bias=lora_bias,
        )
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=lora_config, **kwargs)

    def update_layer(
        self,
        adapter_name: str,
        r: int,
        lora_alpha: int,
        config: LoraConfig,
        target_name: str = "",
        **_: Any,
    ) -> None:
        """Add an adapter, or replace it."""
        self._begin(adapter_name, r, lora_alpha, config)
        base = self.base
        layer = self._layer
        over: dict[str, Any] = {
            "sequence_parallel_enabled": base.sequence_parallel,
            "sequence_dimension": base.sequence_dimension,
            "tensor_model_parallel_group": base.comm,
            "device": "meta",
        }
        inputs, outputs = base.sizes
        first: nn.Module
        second: nn.Module
        if base.kind == "row":
            cut = layer.input_is_parallel
            first = RowParallelLinear(
                inputs, r, bias=False, input_is_parallel=cut, layout=base.layouts[0], **over
            )
            second = nn.Linear(r, outputs, bias=config.lora_bias, device="meta")
        else:
            first = nn.Linear(inputs, r, bias=False, device="meta")
            second = ColumnParallelLinear(
                r,
                outputs,
                bias=config.lora_bias,
                gather_output=layer.gather_output,
                layout=base.layouts[0],
                boundary=base.boundary,
                **over,
            )
        device = new_device()
        self.lora_A[adapter_name] = first.to_empty(device=device)
        self.lora_B[adapter_name] = second.to_empty(device=device)
        self._end(adapter_name, config, target_name)

    def _dropout(self, p: float) -> nn.Module:
        base = self.base
        if p and base.comm.size > 1:
            if base.kind == "row" and self._layer.input_is_parallel:
                return ShardedDropout(p, along(base.layouts[0], -1), base.sizes[0], base.comm)
            if base.kind == "column" and base.sequence_parallel:
                layout = along(column(base.comm.size), sequence_dim(base.sequence_dimension))
                return ShardedDropout(p, layout, None, base.comm)
        return super()._dropout(p)

    def draw(self, adapter_name: str, how: bool | str, seed: int, module_name: str) -> None:
        """Fill an adapter; see `NeuronLoraLayer.draw`."""
        inputs, outputs = self.base.sizes
        r = self.r[adapter_name]
        rank = self.base.comm.rank
        part_by_name = self.parts()
        first: Any = self.lora_A[adapter_name]
        second: Any = self.lora_B[adapter_name]
        name = f"{module_name}.{adapter_name}"
        with torch.no_grad():
            full = draw_a((r, inputs), how, seed, f"{name}.A")
            part = part_by_name.get(f"lora_A.{adapter_name}.weight") or first.parts()["weight"]
            first.weight.copy_(part.shard(full, rank))
            full = draw_b((outputs, r), how, seed, f"{name}.B")
            part = part_by_name.get(f"lora_B.{adapter_name}.weight") or second.parts()["weight"]
            second.weight.copy_(part.shard(full, rank))
            if second.bias is not None:
                second.bias.zero_()

    def parts(self) -> dict[str, Part]:
        """Return how the whole factors are divided.

        The gradient of a column layer's A covers this rank's tokens only, or this rank's rows of B
        only. That of a row layer's B covers this rank's tokens only.
        """
        base = self.base
        part_by_name = {}
        partial = base.sequence_parallel or (base.kind == "column" and base.boundary)
        for name in self.lora_A:
            replicated = self.lora_B[name] if base.kind == "row" else self.lora_A[name]
            prefix = "lora_B" if base.kind == "row" else "lora_A"
            for leaf, _ in replicated.named_parameters():
                part_by_name[f"{prefix}.{name}.{leaf}"] = replicated_part(
                    base.comm, partial=partial
                )
        for name in self.lora_magnitude_vector:
            part_by_name[f"lora_magnitude_vector.{name}.weight"] = magnitude_part(base)
        return part_by_name

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output with that of the active adapters added."""
        refuse_mixed_batch(kwargs.get("adapter_names"))
        result: Tensor = LoraLinear.forward(self, x, *args, **kwargs)
        return result


def new_device() -> torch.device:
    """Return the device of new parameters: `meta` if PEFT will load their values."""
    probe = nn.Module()
    probe.register_parameter("empty", nn.Parameter(torch.empty(0)))
    return probe.get_parameter("empty").device
