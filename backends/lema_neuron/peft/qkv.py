"""PEFT's LoRA over query, key and value in one layer: a pair of factors for each of the three."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from lema_neuron.layers import ColumnParallelLinear
from lema_neuron.layers.partition import sequence_dim
from lema_neuron.layers.qkv import PROJECTIONS
from lema_neuron.mappings import copy_to_group, gather_sequence
from lema_neuron.peft.draw import draw_a, draw_b
from lema_neuron.peft.layer import NeuronLoraLayer, as_config, new_device
from lema_neuron.peft.refusals import refuse_mixed_batch
from lema_neuron.shares import Part, replicated_part

__all__ = ["GQAQKVColumnParallelLinear"]


class GQAQKVColumnParallelLinear(nn.Module, NeuronLoraLayer):
    """LoRA over a grouped projection: `lora_A.NAME.q`, `.k`, `.v` are whole, `lora_B.NAME.q` ...
    cut as the weights.

    The outputs of the three first factors are gathered together, or their gradients summed
    together.

    Args:
        base_layer: the parallel layer, LEMA's or neuronx-distributed's.
        adapter_name: the first adapter's name.
        r: the rank of each of the three pairs.
        lora_alpha: its output is scaled by `lora_alpha / r`.
        lora_dropout: the probability for its input, drawn separately for each of the three.
        fan_in_fan_out: without effect.
        is_target_conv_1d_layer: without effect.
        init_lora_weights: True, False or "gaussian".
        use_rslora: scale by `lora_alpha / sqrt(r)`.
        use_dora: refused.
        lora_bias: refused.
        config: PEFT's config, which replaces the five arguments before it.
        kwargs: PEFT's.

    Raises:
        ConfigError: an option is not exact under sharding.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        r: int = 0,
        lora_alpha: int = 1,
        lora_dropout: float = 0.0,
        fan_in_fan_out: bool = False,  # noqa: ARG002 - PEFT's signature
        is_target_conv_1d_layer: bool = False,  # noqa: ARG002 - PEFT's signature
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
        if config.lora_bias:
            raise ValueError(
                f"lora_bias={config.lora_bias} is not supported for {type(self).__name__}."
            )
        self._begin(adapter_name, r, lora_alpha, config)
        base = self.base
        first = nn.ModuleDict()
        second = nn.ModuleDict()
        for number, projection in enumerate(PROJECTIONS):
            size = base.sizes[min(number, 1) + 1]
            first[projection] = nn.Linear(base.sizes[0], r, bias=False, device="meta")
            second[projection] = ColumnParallelLinear(
                r,
                size,
                bias=False,
                gather_output=self._layer.gather_output,
                device="meta",
                tensor_model_parallel_group=base.comm,
                layout=base.layouts[number],
                boundary=True,  # the input was gathered or copied for all three
            )
        device = new_device()
        self.lora_A[adapter_name] = first.to_empty(device=device)
        self.lora_B[adapter_name] = second.to_empty(device=device)
        self._end(adapter_name, config, target_name)

    def draw(self, adapter_name: str, how: bool | str, seed: int, module_name: str) -> None:
        """Fill an adapter; see `NeuronLoraLayer.draw`."""
        base = self.base
        r = self.r[adapter_name]
        name = f"{module_name}.{adapter_name}"
        with torch.no_grad():
            for number, projection in enumerate(PROJECTIONS):
                size = base.sizes[min(number, 1) + 1]
                first, second = self._pair(adapter_name, projection)
                first.weight.copy_(draw_a((r, base.sizes[0]), how, seed, f"{name}.{projection}.A"))
                full = draw_b((size, r), how, seed, f"{name}.{projection}.B")
                second.weight.copy_(second.parts()["weight"].shard(full, base.comm.rank))

    def _pair(self, adapter_name: str, projection: str) -> tuple[Any, Any]:
        first: Any = self.lora_A[adapter_name]
        second: Any = self.lora_B[adapter_name]
        return first[projection], second[projection]

    def parts(self) -> dict[str, Part]:
        """Return how the first factors are divided: they are whole, with a partial gradient like
        a column layer's.
        """
        partial = self.base.sequence_parallel or self.base.boundary
        names = [
            f"lora_A.{name}.{projection}.weight"
            for name in self.lora_A
            for projection in PROJECTIONS
        ]
        return {name: replicated_part(self.base.comm, partial=partial) for name in names}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, with the outputs of the active adapters added."""
        refuse_mixed_batch(kwargs.get("adapter_names"))
        if self.disable_adapters and self.merged:
            self.unmerge()
        outputs = tuple(self.base_layer(x, *args, **kwargs))
        kinds = [output.dtype for output in outputs]
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                if name in self.lora_A:
                    added = self._added(name, x)
                    outputs = tuple(
                        output + more * self.scaling[name]
                        for output, more in zip(outputs, added, strict=True)
                    )
        q, k, v = (output.to(kind) for output, kind in zip(outputs, kinds, strict=True))
        return q, k, v

    def _added(self, name: str, x: Tensor) -> list[Tensor]:
        base = self.base
        pairs = [self._pair(name, projection) for projection in PROJECTIONS]
        x = self._cast_input_dtype(x, pairs[0][0].weight.dtype)
        inner = torch.cat([first(self.lora_dropout[name](x)) for first, _ in pairs], -1)
        if base.sequence_parallel:
            inner = gather_sequence(inner, base.comm, sequence_dim(base.sequence_dimension))
        elif not base.boundary:
            inner = copy_to_group(inner, base.comm)
        return [second(part) for (_, second), part in zip(pairs, inner.chunk(3, -1), strict=True)]

    def get_delta_weight(self, adapter: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the adapter's change of this rank's part of the three weights."""
        pairs = (self._pair(adapter, projection) for projection in PROJECTIONS)
        q, k, v = (second.weight @ first.weight * self.scaling[adapter] for first, second in pairs)
        return q, k, v

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to this rank's part of the weights.

        Raises:
            ValueError: with `safe_merge`, a merged weight would not be finite.
        """
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            merged = [
                (weight, weight + more.to(weight.dtype)) for weight, more in self._weights(name)
            ]
            if safe_merge and not all(bool(torch.isfinite(total).all()) for _, total in merged):
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken"
                )
            for weight, total in merged:
                weight.copy_(total)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take all merged adapters out of this rank's part of the weights again."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            for weight, more in self._weights(name) if name in self.lora_A else ():
                weight.sub_(more.to(weight.dtype))

    def _weights(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return each weight's data and the adapter's change; neuronx-distributed may fuse them,
        in rows q, k, v.
        """
        layer = self._layer
        added = [delta.detach() for delta in self.get_delta_weight(name)]
        if hasattr(layer, "weight_qkv"):
            weights = layer.weight_qkv.data.split([delta.shape[0] for delta in added])
        else:
            weights = [getattr(layer, f"weight_{projection}").data for projection in PROJECTIONS]
        return list(zip(weights, added, strict=True))
