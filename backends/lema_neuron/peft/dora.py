"""DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353) over column and row layers: a magnitude
for each row of W.

The weight is `m / |W + s B A| (W + s B A)`, with the norm of each row. As in PEFT, no gradient goes
through the norm. If outputs are cut, a rank has whole rows and their magnitudes. If inputs are cut,
each rank has a part of every row: the squares are summed over the ranks, and all ranks have all
magnitudes.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor

from lema_neuron.peft.base import Base
from lema_neuron.shares import Part, replicated_part, sharded_part

__all__ = ["ShardedDora", "magnitude_part"]


class ShardedMagnitude(DoraLinearLayer):
    """PEFT's module of one adapter's magnitudes, `[outputs]`, or of this rank's part of them.

    Args:
        base: the parallel layer that is adapted.
    """

    def __init__(self, base: Base) -> None:
        super().__init__(fan_in_fan_out=False)  # type: ignore[no-untyped-call] # PEFT's is
        self.base = base

    def get_weight_norm(
        self,
        weight: Tensor,
        lora_weight: Tensor,
        scaling: float,
        adapter_name: str | None = None,  # noqa: ARG002 - PEFT's signature
    ) -> Tensor:
        """Return the norms of whole rows, from this rank's part of the weight and of `B A`."""
        merged = (weight + scaling * lora_weight).detach()
        if self.base.kind == "column":
            norms: Tensor = torch.linalg.vector_norm(merged, dim=1)
            return norms
        squares = merged.float().square().sum(1)
        return self.base.comm.all_reduce(squares).sqrt().to(merged.dtype)

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,  # noqa: N803 - as in PEFT
        lora_B: Any,  # noqa: N803 - PEFT's signature
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",  # noqa: ARG002 - PEFT's signature
    ) -> Tensor:
        """Return the tensor to add to the layer's output, which is `base_result` unless `x` went
        through dropout.
        """
        added = (lora_B.weight @ lora_A.weight).to(x.dtype)
        scale = self.weight / self.get_weight_norm(base_layer.weight.to(x.dtype), added, scaling)
        if base_result is None:
            base_result = base_layer(x.to(base_layer.weight.dtype))
        if base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        delta: Tensor = (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
        return delta


class ShardedDora(DoraLinearVariant):
    """PEFT's DoRA variant of a linear, for a parallel layer."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:  # noqa: ARG004 - PEFT's signature
        """Initialise the magnitudes with the norms."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        magnitude = ShardedMagnitude(module.base)
        factors = {
            name: getattr(module, name)[adapter_name].weight for name in ("lora_A", "lora_B")
        }
        magnitude.update_layer(
            base_layer=module.get_base_layer(), scaling=module.scaling[adapter_name], **factors
        )
        module.lora_magnitude_vector[adapter_name] = magnitude


def magnitude_part(base: Base) -> Part:
    """Return how magnitudes are divided: like cut outputs; or whole, with the gradient of this
    rank's tokens.
    """
    if base.kind == "row":
        return replicated_part(base.comm, partial=base.sequence_parallel)
    return sharded_part(base.layouts[0], base.sizes[1], base.comm)
