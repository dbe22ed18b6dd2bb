"""Adapters: PEFT's own layers, attached to a model whose weights are not there."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.config import LemaConfig
from lema.errors import ModelError
from lema.skeleton import EmptyOnMeta, find_layers

__all__ = ["all_linear", "configured_lora", "count_lora_params", "inject_lora_params", "lora_config"]

ADAPTER = "default"  # PEFT's name for the only adapter


def all_linear(model: PreTrainedModel) -> list[str]:
    """Return the names of every linear module of the decoder layers, as PEFT's `target_modules` takes them."""
    _, layers = find_layers(model)
    names = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    return sorted(names)


def lora_config(
    model: PreTrainedModel, *, rank: int, alpha: float, dropout: float, targets: Collection[str] | str | None
) -> LoraConfig:
    """Return PEFT's config of an adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Args:
        model: the model without adapters.
        rank: of the two matrices.
        alpha: the adapter's output is scaled by `alpha / rank`.
        dropout: on the adapter's input.
        targets: module names, or a regular expression over full names; None: every linear of the decoder layers.
    """
    chosen = all_linear(model) if targets is None else targets if isinstance(targets, str) else sorted(targets)
    transposed = any(
        isinstance(module, Conv1D) and (isinstance(chosen, str) or name.rpartition(".")[2] in chosen)
        for name, module in model.named_modules()
    )
    return LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type] # a float is scaled by as well
        lora_dropout=dropout,
        target_modules=chosen,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )


def configured_lora(model: PreTrainedModel, config: LemaConfig) -> LoraConfig:
    """Return PEFT's config of the adapter that the settings ask for."""
    return lora_config(
        model,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=config.lora_target_modules,
    )


def inject_lora_params(model: PreTrainedModel, config: LoraConfig, device: torch.device, seed: int | None) -> PeftModel:
    """Attach an adapter: PEFT's modules, with only the adapter's parameters made real, in fp32.

    The numbers are those that `torch.manual_seed(seed); get_peft_model(model, config)` draws on the whole model.

    Args:
        model: decoder layers on `meta`.
        config: PEFT's.
        device: where adapters live.
        seed: of the initial values; the generator is left where it was. None: values are left unset, to be loaded.

    Raises:
        ModelError: no module matches, or one outside the decoder layers does.
    """
    layers_name, _ = find_layers(model)
    config.base_model_name_or_path = None  # PEFT warns where it differs, as a hub id does from its place in the cache
    try:
        with warnings.catch_warnings():
            # PEFT asks for a property that transformers has renamed; nobody here can act on that.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            with EmptyOnMeta():
                peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ModelError(
            f"the adapter does not fit this model: {error}",
            where=f"lora_target_modules: {_listed(config)}",
            how=f"linear modules of the decoder layers are: {', '.join(all_linear(model))}",
        ) from error
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if outside := [name for name in adapted if not name.startswith(f"{layers_name}.")]:
        peft_model.unload()  # the model is as it was, for another attempt
        raise ModelError(
            f"adapters outside the decoder layers are not supported: {', '.join(outside)}",
            where=f"lora_target_modules: {_listed(config)}",
            how=f"name modules under {layers_name} only",
        )
    if seed is not None:
        _warn_of_unmatched(config, adapted)
    state = torch.get_rng_state()
    if seed is not None:
        torch.manual_seed(seed)
    for module in adapted.values():
        _make_real(module, device, draw=seed is not None)
    torch.set_rng_state(state)
    assert isinstance(peft_model, PeftModel)
    return peft_model


def _warn_of_unmatched(config: LoraConfig, adapted: Collection[str]) -> None:
    targets = config.target_modules or ()
    names = () if isinstance(targets, str) else sorted(targets)
    unmatched = [name for name in names if not any(f".{module}".endswith(f".{name}") for module in adapted)]
    if unmatched:
        warnings.warn(f"lora_target_modules: no module is named {', '.join(unmatched)}", stacklevel=4)


def _listed(config: LoraConfig) -> str:
    targets = config.target_modules or ()
    return targets if isinstance(targets, str) else ", ".join(sorted(targets))


def count_lora_params(model: nn.Module) -> int:
    """Return how many adapter parameters train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _make_real(module: LoraLayer, device: torch.device, *, draw: bool) -> None:
    """Give a module's adapter memory, and the values PEFT would draw, in PEFT's order: A, B, then A again."""
    for matrices in (module.lora_A, module.lora_B):
        matrices.float().to_empty(device="cpu")  # cast first: on meta it costs nothing
        if draw:
            for matrix in matrices.values():
                cast(nn.Linear, matrix).reset_parameters()
    if draw:
        module.reset_lora_parameters(ADAPTER, True)
    stored = cast(nn.Linear, module.get_base_layer()).weight.dtype
    for matrices in (module.lora_A, module.lora_B):
        if draw:
            matrices.to(stored).float()  # as PEFT, which casts a fresh adapter to its module's dtype, then to fp32
        matrices.to(device)
