"""PEFT's LoRA over an embedding that is cut along its vocabulary: A is cut in the same way, and
B is whole.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Embedding as LoraEmbedding
from torch import Tensor, nn
from torch.nn import functional

from lema_neuron.layers.embedding import embed_local, joined
from lema_neuron.mappings import copy_to_group, gather_from_group
from lema_neuron.peft.draw import draw_b, draw_vectors
from lema_neuron.peft.layer import NeuronLoraLayer, as_config, new_device
from lema_neuron.peft.refusals import refuse_mixed_batch
from lema_neuron.shares import Part, along, local_size, replicated_part, sharded_part

__all__ = ["ParallelEmbedding"]


class ParallelEmbedding(NeuronLoraLayer, LoraEmbedding):
    """LoRA over a `ParallelEmbedding`; `lora_embedding_A` is `[r, ids / ranks]`, `lora_embedding_B`
    `[features, r]`.

    If the embedding is cut along its features, A is whole and B is cut.

    Args:
        base_layer: the parallel layer.
        adapter_name: the first adapter's name.
        r: its rank; it is never cut.
        lora_alpha: its output is scaled by `lora_alpha / r`.
        lora_dropout: without effect, as in PEFT.
        fan_in_fan_out: without effect.
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

    @property
    def _across(self) -> bool:
        return bool(getattr(self.get_base_layer(), "shard_across_embedding", False))

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
        ids, features = self.base.sizes
        layout = self.base.layouts[0]
        device = new_device()
        across = self._across
        inner = (r, ids if across else local_size(layout, ids))
        outer = (local_size(layout, features) if across else features, r)
        self.lora_embedding_A[adapter_name] = nn.Parameter(torch.empty(inner, device=device))
        self.lora_embedding_B[adapter_name] = nn.Parameter(torch.empty(outer, device=device))
        self._end(adapter_name, config, target_name)

    def _factors(self, name: str) -> list[nn.Parameter]:
        return [self.lora_embedding_A[name], self.lora_embedding_B[name]]

    def draw(self, adapter_name: str, how: bool | str, seed: int, module_name: str) -> None:
        """Fill an adapter; see `NeuronLoraLayer.draw`. A begins as zeros, B is drawn, as in
        PEFT.
        """
        ids, features = self.base.sizes
        r = self.r[adapter_name]
        rank = self.base.comm.rank
        part_by_name = self.parts()
        name = f"{module_name}.{adapter_name}"
        with torch.no_grad():
            first = draw_b((r, ids), how, seed, f"{name}.A")
            self.lora_embedding_A[adapter_name].copy_(
                part_by_name[f"lora_embedding_A.{adapter_name}"].shard(first, rank)
            )
            second = draw_vectors((features, r), seed, f"{name}.B")
            self.lora_embedding_B[adapter_name].copy_(
                part_by_name[f"lora_embedding_B.{adapter_name}"].shard(second, rank)
            )

    def parts(self) -> dict[str, Part]:
        """Return how both factors are divided; under sequence parallelism a whole B is for this
        rank's tokens only.
        """
        ids, features = self.base.sizes
        comm = self.base.comm
        layout = self.base.layouts[0]
        first: Part = (
            sharded_part(along(layout, 1 - layout.dim), ids, comm)
            if not self._across
            else replicated_part(comm, partial=False)
        )
        second = replicated_part(comm, partial=self.base.sequence_parallel)
        if self._across:
            second = sharded_part(along(layout, 1 - layout.dim), features, comm)
        part_by_name = {}
        for name in self.lora_embedding_A:
            part_by_name[f"lora_embedding_A.{name}"] = first
            part_by_name[f"lora_embedding_B.{name}"] = second
        return part_by_name

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embedding's vectors with those of the active adapters added."""
        refuse_mixed_batch(kwargs.get("adapter_names"))
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        kind = result.dtype
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                if name in self.lora_embedding_A:
                    result = result + self._added(name, x) * self.scaling[name]
        return result.to(kind)

    def _added(self, name: str, ids: Tensor) -> Tensor:
        base = self.base
        layer = self._layer
        first: Tensor = self.lora_embedding_A[name].T
        second: Tensor = self.lora_embedding_B[name].T
        if self._across:
            inner = copy_to_group(functional.embedding(ids, first, layer.padding_idx), base.comm)
            return gather_from_group(inner @ second, base.comm)
        partial = embed_local(ids, first, base.comm, layer.padding_idx)
        inner = joined(partial, base.comm, base.sequence_parallel, base.sequence_dimension)
        return inner @ second
