"""The options of PEFT's LoRA that are not exact when weights are divided over ranks; they are
refused by name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from peft import LoraConfig

from lema.errors import ConfigError
from lema_neuron.peft.base import Base

__all__ = ["check_config", "check_dora", "refuse_mixed_batch"]

WHY = {
    "layer_replication": "it copies layers, which are identified by their names",
    "target_parameters": "it adapts parameters of modules that have been cut",
    "trainable_token_indices": "it trains rows of a weight that is cut",
    "megatron_config": "the parallel layers differ",
}
HOW = "leave it out, or train without tensor parallelism"


def check_config(config: Any, *, parameters: bool = False) -> None:
    """Refuse options that are not exact under sharding.

    Args:
        config: PEFT's.
        parameters: the caller itself cuts adapters on the weights of experts, so they are allowed.

    Raises:
        ConfigError: an option is not exact; the message names it.
    """
    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"{type(config).__name__} is not supported over several ranks", how="use LoraConfig"
        )
    variants = [field.name for field in fields(config) if field.metadata.get("is_lora_variant")]
    variants.remove("use_dora")  # it depends on the layer: `check_dora`
    for name in dict.fromkeys([*WHY, *variants]):
        if getattr(config, name, None) and not (parameters and name == "target_parameters"):
            why = WHY.get(name, "it is computed from whole weights or activations")
            raise ConfigError(
                f"{name} is not exact under tensor parallelism: {why}", where=name, how=HOW
            )
    initial = config.init_lora_weights
    if not isinstance(initial, bool) and str(initial).lower() != "gaussian":
        raise ConfigError(
            (
                f"init_lora_weights={initial!r} is not exact under tensor parallelism: it "
                "decomposes whole weights or data"
            ),
            where="init_lora_weights",
            how=(
                "use True, False or gaussian; or start from an adapter that was initialised on "
                "one device"
            ),
        )


def check_dora(config: LoraConfig, base: Base, layer: Any) -> None:
    """Refuse DoRA if magnitudes are not divided like the outputs of their rows.

    Raises:
        ConfigError: the layer is of such a kind.
    """
    if not config.use_dora:
        return
    if base.kind not in ("column", "row"):
        what = "magnitudes of embeddings, and of queries, keys and values that are one layer"
    elif base.kind == "column" and getattr(layer, "gather_output", False) and base.comm.size > 1:
        what = "magnitudes of a layer whose output every rank gets whole"
    else:
        return
    raise ConfigError(
        f"use_dora is not supported under tensor parallelism: {what}", where="use_dora", how=HOW
    )


def refuse_mixed_batch(adapter_names: Any) -> None:
    """Refuse batches whose rows use different adapters.

    Raises:
        ConfigError: there are some.
    """
    if adapter_names is not None:
        raise ConfigError(
            "batches of several adapters are not supported over several ranks",
            where="adapter_names",
            how="give each adapter a batch of its own",
        )
