"""PEFT's `LoraModel`, extended to parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraModel
from torch import nn

from lema.compat import adapted_module
from lema.errors import ConfigError
from lema_neuron.peft.base import Kind, kind_of
from lema_neuron.peft.embedding import ParallelEmbedding
from lema_neuron.peft.layer import ParallelLinear
from lema_neuron.peft.qkv import GQAQKVColumnParallelLinear
from lema_neuron.peft.refusals import check_config

__all__ = ["NEURON_LORA_MODULES", "NeuronLoraModel"]

NEURON_LORA_MODULES: Mapping[Kind, Callable[..., nn.Module]] = {
    "column": ParallelLinear,
    "row": ParallelLinear,
    "embedding": ParallelEmbedding,
    "grouped": GQAQKVColumnParallelLinear,
}
EXACT = ("linear", "cat")  # ways to combine adapters that treat each number or rank separately


class NeuronLoraModel(LoraModel):
    """LoRA over a model with parallel layers; other linears, whole on every rank, get PEFT's own
    layers.

    Args:
        model: one with parallel layers, LEMA's or neuronx-distributed's.
        config: PEFT's, or one for each adapter's name.
        adapter_name: the first adapter's name.
        low_cpu_mem_usage: leave the factors on `meta`.

    Raises:
        ConfigError: an option is not exact under sharding; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        low_cpu_mem_usage: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, config, adapter_name, low_cpu_mem_usage=low_cpu_mem_usage, **kwargs)

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Check an adapter's config, and attach the adapter."""
        config: Any = self.peft_config[adapter_name]
        check_config(config)
        if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
            config.target_modules = _all_linear(model)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    @staticmethod
    def _create_new_module(
        lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any
    ) -> nn.Module:
        kind = kind_of(target)
        if kind is None:
            return adapted_module(lora_config, adapter_name, target, **kwargs)
        options = {
            name: kwargs[name] for name in ("r", "lora_alpha", "target_name") if name in kwargs
        }
        return NEURON_LORA_MODULES[kind](target, adapter_name, config=lora_config, **options)

    def add_weighted_adapter(  # type: ignore[override] # fewer ways to combine
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: Any = "svd",
        **kwargs: Any,
    ) -> None:
        """Combine adapters into a new one, in a way that is exact on shards.

        Raises:
            ConfigError: the way to combine them is not exact.
        """
        if combination_type not in EXACT:
            raise ConfigError(
                f"combination_type={combination_type!r} is not exact under tensor parallelism",
                where="add_weighted_adapter",
                how=f"use one of {', '.join(EXACT)}, or combine the adapters on one device",
            )
        super().add_weighted_adapter(adapters, weights, adapter_name, combination_type, **kwargs)


def _all_linear(model: nn.Module) -> set[str]:
    """Return the full names of all linears except the head, including parallel ones.

    Raises:
        ConfigError: there are experts whose weights are in one parameter, which PEFT would adapt
            too.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv1d) and any(
            parameter.dim() == 3 for parameter in module.parameters(recurse=False)
        ):
            raise ConfigError(
                (
                    "all-linear includes experts, but several ranks do not support adapters of "
                    "parameters"
                ),
                where=f"target_modules: {name}",
                how="name the linears to adapt in target_modules",
            )
    untyped: Any = model
    head = untyped.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if module is not head
        and ".lora_" not in f".{name}"
        and (isinstance(module, nn.Linear) or kind_of(module) in ("column", "row", "grouped"))
    }
