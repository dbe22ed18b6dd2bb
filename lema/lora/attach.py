"""LoRA adapters attached to a model whose weights are on `meta`; the adapter layers are PEFT's own.

`param_filter` says what would be adapted, `inject_lora_params` attaches the adapter.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from copy import copy, deepcopy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND as ALL_LINEAR
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.config import LemaConfig
from lema.config.peft import SETTING_OF
from lema.config.problems import meant
from lema.errors import ConfigError, ModelError
from lema.lora.checks import check_patterns
from lema.lora.materialize import Read, check_attached, check_saved_modules, make_real, take_off
from lema.lora.merge import WRAPPED
from lema.lora.options import as_integer, with_options, without_modules
from lema.lora.targets import OF_PEFT, default_parameters, default_targets, peft_targets
from lema.model.partition import planned_suffixes
from lema.model.skeleton import EmptyOnMeta, find_layers, find_towers, is_in

__all__ = [
    "configured_lora",
    "count_lora_params",
    "inject_lora_params",
    "lora_config",
    "param_filter",
]
__all__ += ["unmatched_names"]

BASE_LAYER = ".base_layer"  # where PEFT keeps the module it wraps

# Warnings of PEFT's that a user of LEMA cannot act on, or that LEMA gives itself by the names of
# its settings.
SILENCED = (
    ".*is_gradient_checkpointing.*",  # a property that transformers has renamed
    "fan_in_fan_out is set to",  # PEFT sets it for each module as that module needs it
    "The following (rank|alpha)_pattern keys",
    "You have passed exclude_modules=",
    "target_(modules|parameters)=.* were set",
)


def lora_config(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Collection[str] | str | None,
    opens_towers: bool = False,
    **options: Any,
) -> LoraConfig:
    """Return PEFT's config of an adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685) of a
    model without adapters. `ConfigError`: PEFT refuses the options. `alpha`: the adapter's output
    is scaled by `alpha / rank`. `targets`: module names, or a regular expression over full names;
    None: `default_targets`, and experts; "peft": `peft_targets`. `opens_towers`: images are
    read, so that targets which the user names are adapted in towers too, as PEFT does."""
    if targets is None:
        chosen: list[str] | str = default_targets(model)
    elif targets == OF_PEFT:
        chosen = peft_targets(model)
    else:
        chosen = targets if isinstance(targets, str) else sorted(targets)
    try:
        options |= {
            "r": rank,
            "lora_alpha": as_integer(alpha),
            "lora_dropout": dropout,
            "target_modules": chosen,
        }
        config = LoraConfig(task_type="CAUSAL_LM", **options)
    except ValueError as error:
        raise ConfigError(f"PEFT refuses these settings of the adapter: {error}") from error
    # Modules that text does not reach, where the targets are among their names as well, are
    # excluded by PEFT's own setting, unless images reach them and the user has named the targets.
    every = isinstance(chosen, str) and chosen.lower() == ALL_LINEAR
    towers = find_towers(model)
    target_parameters = config.target_parameters
    if targets is None and target_parameters is None:
        target_parameters = default_parameters(model, config)
    config = with_options(config, target_parameters=target_parameters or None)
    inside = [
        name
        for name, module in model.named_modules()
        if is_in(name, towers) and not [*module.children()]
    ]
    is_named = opens_towers and targets is not None
    if not is_named and any(every or check_target_module_exists(config, name) for name in inside):
        config = without_modules(config, towers)
    check_patterns(config, [name for name, _ in model.named_modules()])
    config.fan_in_fan_out = any(
        isinstance(module, Conv1D) and (every or bool(check_target_module_exists(config, name)))
        for name, module in model.named_modules()
    )
    return config


def configured_lora(model: PreTrainedModel, config: LemaConfig, parts: int = 1) -> LoraConfig:
    """Return PEFT's config of the adapter that the settings ask for, of a model that `parts`
    processes hold together; `ConfigError`: they do not fit the model."""
    name, layers = find_layers(model)
    chosen = config.lora_layers_to_transform
    patterns = config.lora_layers_pattern
    indices = [] if chosen is None else [chosen] if isinstance(chosen, int) else chosen
    patterns = [patterns] if isinstance(patterns, str) else patterns
    beyond = sorted(index for index in indices if index >= len(layers))
    # else they count in another list
    if beyond and (patterns is None or name.rpartition(".")[2] in patterns):
        what = f"there is no layer {', '.join(map(str, beyond))}: {name} has {len(layers)} of them"
        how = f"layers are counted from 0, to {len(layers) - 1}"
        raise ConfigError(what, where="lora_layers_to_transform", how=how)
    options = {option: deepcopy(getattr(config, setting)) for option, setting in SETTING_OF.items()}
    if config.torch_compile:  # because compilers break at them
        options["target_parameters"] = options["target_parameters"] or []
    options["alpha_pattern"] = {
        name: as_integer(alpha) for name, alpha in config.lora_alpha_pattern.items()
    }
    peft_config = lora_config(
        model,
        rank=options.pop("r"),
        alpha=options.pop("lora_alpha"),
        dropout=options.pop("lora_dropout"),
        targets=options.pop("target_modules"),
        opens_towers=config.modalities == "all",
        **options,
    )
    if parts > 1 and config.lora_target_parameters is None and peft_config.target_parameters:
        suffixes = planned_suffixes(model, peft_config.target_parameters) or None
        peft_config = with_options(peft_config, target_parameters=suffixes)
    return peft_config


def param_filter(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the parameters that an adapter would adapt, in the order of the model;
    change nothing. The model has no adapters, and its weights may be on `meta`. `ModelError`: none;
    it names those that could be."""
    empty: dict[int, Tensor] = {
        id(buffer): buffer.detach().to("meta") for buffer in model.buffers()
    }
    empty |= {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    bare: PreTrainedModel = deepcopy(model, empty)
    with torch.random.fork_rng(devices=()):
        _attach(bare, deepcopy(config))
    adapted = {
        WRAPPED.sub(
            "", f"{name}.{part.parameter_name if isinstance(part, ParamWrapper) else 'weight'}"
        )
        for name, part in bare.named_modules()
        if isinstance(part, LoraLayer)
    }
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name in adapted]


def inject_lora_params(
    model: PreTrainedModel,
    config: LoraConfig,
    device: torch.device,
    seed: int | Tensor | None,
    read: Read | None = None,
) -> PeftModel:
    """Attach an adapter: PEFT's modules, with only what trains made real, LoRA's matrices in fp32.
    The numbers are those that `torch.manual_seed(seed); get_peft_model(model, config)` gives on the
    whole model. `ModelError`: no module matches, or one is to be trained in a way that cannot be
    streamed. `seed`: of the initial values, or the generator's state that they are drawn from; the
    generator is left where it was. None: values are left unset, to be loaded. `read`: reads the
    stored tensors that biases, modules that train whole and DoRA's magnitudes begin with."""
    layers_name, _ = find_layers(model)
    # PEFT warns where it differs, as a hub id does from its place in the cache
    config = with_options(config, base_model_name_or_path=None)
    check_saved_modules(model, config, layers_name)
    _check_token_indices(model, config)
    asked = copy(config)
    with torch.random.fork_rng(devices=()):
        peft_model = _attach(model, config)
        try:
            check_attached(model, config)
        except ModelError:
            take_off(model)  # for another attempt
            raise
        if seed is not None:
            for message in unmatched_names(model, asked):
                warnings.warn(message, stacklevel=3)
            torch.set_rng_state(seed) if isinstance(seed, Tensor) else torch.manual_seed(seed)
        make_real(model, config, device, layers_name, draw=seed is not None, read=read)
    return peft_model


def _check_token_indices(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuse, with `ModelError`, tokens that are to train and that a vocabulary does not have."""
    token_indices = config.trainable_token_indices or {}
    for name, indices in (
        token_indices if isinstance(token_indices, dict) else {"": token_indices}
    ).items():
        tables = [module for path, module in model.named_modules() if path.endswith(name)]
        for table in tables if name else (model.get_input_embeddings(),):
            weight = getattr(table, "weight", None)
            if isinstance(weight, Tensor) and indices and max(indices) >= len(weight):
                what = f"token {max(indices)} is to train, and there are {len(weight)} tokens"
                raise ModelError(
                    what, where="lora_trainable_token_indices", how="number them from 0"
                )


def _attach(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    check_patterns(config, [name for name, _ in model.named_modules()])
    try:
        with warnings.catch_warnings():
            for message in SILENCED:
                warnings.filterwarnings("ignore", message=message)
            with EmptyOnMeta():
                peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        take_off(model)
        targets = config.target_modules or ()
        hint = ""
        if isinstance(targets, str):
            hint = "a regular expression must match whole names; a list has endings of names. "
        what = f"the adapter does not fit this model: {error}"
        how = f"{hint}linear modules of the decoder layers are: {', '.join(default_targets(model))}"
        listed = targets if isinstance(targets, str) else ", ".join(sorted(targets))
        raise ModelError(what, where=f"lora_target_modules: {listed}", how=how) from error
    assert isinstance(peft_model, PeftModel)
    return peft_model


def unmatched_names(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return a sentence for each setting of an adapter that has names which no module bears, most
    likely slips. The adapter is attached; `config` is as it was before, because PEFT adds names of
    heads that the model may not have."""
    parts = [(name.replace(BASE_LAYER, ""), part) for name, part in model.named_modules()]
    modules = {name for name, _ in parts}
    parameters = {
        f"{name}.{part.parameter_name}" for name, part in parts if isinstance(part, ParamWrapper)
    }
    adapted = parameters | {name for name, part in parts if isinstance(part, LoraLayer)}
    unmatched = {
        "lora_target_modules": _unmatched(config.target_modules, modules),
        "lora_target_parameters": _unmatched(config.target_parameters, parameters),
        "lora_exclude_modules": _unmatched(config.exclude_modules, modules),
        # PEFT compares ends of names, whether or not they begin at a dot.
        "lora_modules_to_save": [
            end
            for end in config.modules_to_save or ()
            if not any(name.endswith(end) for name in modules)
        ],
        "lora_rank_pattern": [
            key for key in config.rank_pattern or () if not _matches(key, adapted)
        ],
        "lora_alpha_pattern": [
            key for key in config.alpha_pattern or () if not _matches(key, adapted)
        ],
    }
    messages = []
    for setting, names in unmatched.items():
        if names:
            what, there = (
                ("parameter", parameters)
                if setting == "lora_target_parameters"
                else ("module", modules)
            )
            near = meant(names[0].rpartition(".")[2], {name.rpartition(".")[2] for name in there})
            messages.append(
                f"{setting}: no {what} is named {', '.join(names)}" + (f"; {near}" if near else "")
            )
    return messages


def _unmatched(patterns: Collection[str] | str | None, names: Collection[str]) -> list[str]:
    """Return the wanted ends that no name has; or the wanted expression, if no name matches it."""
    if isinstance(patterns, str):
        return (
            []
            if patterns.lower() == ALL_LINEAR or any(re.fullmatch(patterns, name) for name in names)
            else [patterns]
        )
    return sorted(
        pattern
        for pattern in patterns or ()
        if not any(f".{name}".endswith(f".{pattern}") for name in names)
    )


def _matches(key: str, names: Collection[str]) -> bool:
    return any(re.match(rf"(.*\.)?({key})$", name) for name in names)  # as PEFT has it


def count_lora_params(model: nn.Module) -> int:
    """Return how many adapter parameters train."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
