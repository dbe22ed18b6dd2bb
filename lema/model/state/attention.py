"""Attention that runs with values alone, and operations that a device does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from lema.errors import ConfigError, is_out_of_memory

__all__ = ["attention_without_values", "supported_only"]

# `transformers` compiles it in its first call, which ends the process on fake tensors
COMPILED = "flex_attention"
STAND_IN = "sdpa"  # keeps no scores of each pair of tokens either
EVERYWHERE = "eager"


@contextmanager
def attention_without_values(model: nn.Module) -> Iterator[None]:
    """Compute attention in a `with` block by what runs on tensors without values, whose result
    has the same shape.
    """
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    chosen = {
        id(owner.config): owner.config
        for owner in owners
        if owner.config._attn_implementation == COMPILED
    }
    plain = [owner.config for owner in owners if not owner._supports_sdpa]
    try:
        for config in chosen.values():
            # Not by its property, which would set the configs of its parts too.
            config._attn_implementation_internal = (
                EVERYWHERE if any(eager_config is config for eager_config in plain) else STAND_IN
            )
        yield
    finally:
        for config in chosen.values():
            config._attn_implementation_internal = COMPILED


@contextmanager
def supported_only(location: str) -> Iterator[None]:
    """Say of an operation in a `with` block that this device does not have it.

    Args:
        location: where in the run the block is, as "in the forward of layer 3".

    Raises:
        ConfigError: torch, or a library of the device, has refused an operation.
    """
    try:
        yield
    except NotImplementedError as error:
        if is_out_of_memory(error):
            raise
        message = str(error).partition("\n")[0].strip() or type(error).__name__
        how = "choose another attn_implementation, or another device"
        raise ConfigError(
            f"this device cannot compute what the model asks for: {message}",
            where=location,
            how=how,
        ) from error
