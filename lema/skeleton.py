"""The model without its weights: built from its config, parameters on `meta`, buffers real, decoder layers found.

Nothing here knows an architecture. `transformers` builds the modules; the stack of decoder layers is the one that the
config's own pipeline plan names, or else the only list of modules as long as the config says the stack is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lema.errors import ModelError

__all__ = ["EmptyOnMeta", "find_layers", "meta_model", "read_config"]


def read_config(directory: Path) -> PreTrainedConfig:
    """Read `config.json` of a model directory.

    Raises:
        ModelError: no config, or one that this `transformers` cannot read.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(
            "the model directory has no config.json",
            where=str(directory),
            how="point model_name_or_path at a directory written by save_pretrained, or at a hub id",
        )
    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"transformers cannot read this config: {error}",
            where=str(directory / "config.json"),
            how="check the file, or upgrade transformers if the model is newer than it",
        ) from error
    assert isinstance(config, PreTrainedConfig)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "the model adds a loss of its routers' outputs, which cannot be streamed",
            where=f"{directory / 'config.json'}: output_router_logits",
            how="set output_router_logits to false there; frozen routers learn nothing from it",
        )
    return config


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Build the causal language model of `config` with every parameter on `meta` and every buffer real.

    Buffers (rotary tables, for one) are computed by the modules themselves: they are in no checkpoint.

    Args:
        config: the model's own config.
        dtype: of the parameters; None: the one the config names, else float32.
        attn_implementation: as in `from_pretrained`; None: transformers' choice.

    Raises:
        ModelError: `transformers` has no causal language model for this config.
    """
    if dtype is None:
        dtype = getattr(config, "dtype", None) or torch.float32
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        model = _build(config, {"dtype": dtype, **options}, EmptyOnMeta())
        if any(buffer.is_meta for buffer in model.buffers()):  # one was made of an empty tensor
            model = _build(config, {"dtype": dtype, **options}, nullcontext())
    except (ValueError, ImportError) as error:
        raise ModelError(
            f"transformers cannot build this model as a causal language model: {error}",
            where=f"model_type {config.model_type!r}",
            how="`lema models` lists what streams; check attn_implementation if it was set",
        ) from error
    model.tie_weights()  # building on `meta` made a parameter of its own for every name
    model.config.use_cache = False  # a captured cache would grow again on recomputation
    return model


class EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, which weights begin as, take no memory: not even an address, of which a large model would
    take so many that the heap is left full of holes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return func(*args, **({**given, "device": "meta"} if func is torch.empty else given))


def _build(config: PreTrainedConfig, options: dict[str, Any], mode: AbstractContextManager[Any]) -> PreTrainedModel:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), no_init_weights(), mode:
        model = AutoModelForCausalLM.from_config(config, **options)
    assert isinstance(model, PreTrainedModel)
    return model


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the stack of decoder layers: its dotted name in `model`, and the list itself.

    Raises:
        ModelError: there is no such list, or more than one.
    """
    config = model.config
    plan = tuple(f".{name}" for name in getattr(config, "base_model_pp_plan", None) or {})
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    planned = [name for name in lists if f".{name}".endswith(plan)] if plan else []
    length = getattr(config, "num_hidden_layers", None)
    found = planned or [name for name, module in lists.items() if len(module) == length]
    if len(found) != 1:
        raise ModelError(
            f"{'no' if not found else 'more than one'} stack of decoder layers was found",
            where=f"model_type {getattr(config, 'model_type', '?')!r}, candidates: {found or sorted(lists)}",
            how="only models with one stack of decoder layers stream",
        )
    assert isinstance(found[0], str)
    return found[0], lists[found[0]]
