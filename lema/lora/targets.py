"""The default targets of an adapter: every linear of the decoder layers, except the routers, and
stacked experts.

A router is a linear whose outputs select experts. Training one moves tokens from expert to expert
under weights that stay as they are, so it is adapted only where it is named. Nothing here knows an
architecture: `transformers` marks the modules whose outputs it records as router logits, its
routers are called routers, and any other router is recognised because it has as many outputs as
there are experts next to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lema.compat import check_target
from lema.errors import ConfigError
from lema.lora.options import with_options
from lema.model.experts import stacked_weights
from lema.model.skeleton import find_layers

__all__ = [
    "OF_PEFT",
    "default_parameters",
    "default_targets",
    "linear_modules",
    "peft_targets",
    "router_modules",
    "warn_of_left_out",
]

ROUTER = "router"
OF_PEFT = "peft"
"""The value of `lora_target_modules` for the modules that PEFT adapts unless it is told others."""


def default_targets(model: PreTrainedModel) -> list[str]:
    """Return the linears of a model to adapt by default, as ends of names, each as short as tells
    it from all others. Routers are left out, and linears that PEFT refuses to adapt, or takes for
    the weights of experts by their names."""
    return [end for end in _adaptable(model) if _peft_adapts(model, end)]


def peft_targets(model: PreTrainedModel) -> list[str] | str:
    """Return the modules that PEFT adapts by default in models of this type, as it writes them:
    ends of names, or a regular expression over full names.

    Raises:
        ConfigError: PEFT has no default for the type, and refuses to guess.
    """
    kind = model.config.model_type
    if kind not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise ConfigError(
            f"PEFT has no modules that it adapts by default for models of type {kind}",
            where="lora_target_modules: peft",
            how=f"name them, such as {', '.join(default_targets(model)[:4])}, or leave it out",
        )
    targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[kind]
    return targets if isinstance(targets, str) else sorted(targets)


def default_parameters(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the stacked weights of experts to adapt by default with the linears, as ends of names.
    None where PEFT takes no parameters with what else `config` asks for; where that chooses among
    modules, of those it chooses."""
    refused = (
        config.lora_dropout
        or config.lora_bias
        or config.use_dora
        or config.init_lora_weights == "orthogonal"
    )
    targets = (
        [] if refused else [name for name, is_unmerged in _experts(model, config) if is_unmerged]
    )
    return _unique_endings(
        targets, [name for name, _ in model.named_parameters(remove_duplicate=False)], size=2
    )


def warn_of_left_out(model: PreTrainedModel, config: LoraConfig, *, experts: bool = True) -> None:
    """Warn of what a default adapter leaves out: linears that PEFT does not adapt in this model,
    and `experts`.
    """
    if left_out := ", ".join(end for end in _adaptable(model) if not _peft_adapts(model, end)):
        what = (
            f"PEFT does not adapt these linear modules of {type(model).__name__}, so they stay "
            "as they are"
        )
        warnings.warn(f"{what}: {left_out}", stacklevel=3)
    suffixes = tuple(f".{end}" for end in config.target_parameters or ())
    left = {
        ".".join(name.split(".")[-2:])
        for name, _ in _experts(model, config)
        if experts and not name.endswith(suffixes)
    }
    if left_out := ", ".join(sorted(left)):
        what = "weights of experts are not adapted by default, or not with these settings"
        warnings.warn(f"{what}, unless lora_target_parameters names them: {left_out}", stacklevel=3)


def _experts(model: PreTrainedModel, config: LoraConfig) -> Iterator[tuple[str, bool]]:
    """Yield stacked weights of experts that `config` does not exclude, and whether adapters are
    multiplied apart.
    """
    layers_name, _ = find_layers(model)
    numbers = set(_expert_numbers(model.config.to_dict()))
    for name, module in model.named_modules():
        named = with_options(config, target_modules=[name.rpartition(".")[2]])
        if not name.startswith(f"{layers_name}.") or isinstance(module, _ConvNd):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            is_unmerged = leaf in stacked_weights(module)
            if (
                is_unmerged or (parameter.ndim == 3 and parameter.shape[0] in numbers)
            ) and check_target_module_exists(named, name):
                yield f"{name}.{leaf}", is_unmerged


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Return the full names of the linear modules of the decoder layers, routers among them."""
    layers_name, _ = find_layers(model)
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers_name}.") and _is_linear(module)
    ]


def router_modules(model: PreTrainedModel) -> set[str]:
    """Return the full names of the routers, and of every module that is part of one."""
    numbers = set(_expert_numbers(model.config.to_dict()))
    roots = _recorded(model) | _expert_sized(model, numbers)
    if numbers:  # what is called a router may route other things in a model without experts
        roots |= {name for name, module in model.named_modules() if _called_router(name, module)}
    return {
        name for root in roots for name, _ in model.get_submodule(root).named_modules(prefix=root)
    }


def _adaptable(model: PreTrainedModel) -> list[str]:
    """Return the ends of names that match every linear that is no router, and no other module."""
    targets = set(linear_modules(model)) - router_modules(model)
    return _unique_endings(targets, [name for name, _ in model.named_modules()])


def _is_linear(module: nn.Module) -> bool:
    """Whether a module maps its last dimension as a linear does, which PEFT's layer around it
    takes for granted.
    """
    if not isinstance(module, nn.Linear | Conv1D) or module.weight.ndim != 2:
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    rows, columns = module.weight.shape
    size_in, size_out = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
    weights = {name: parameter.detach().to("meta") for name, parameter in module.named_parameters()}
    inputs = torch.empty(1, 3, size_in, dtype=module.weight.dtype, device="meta")
    try:
        out = torch.func.functional_call(module, weights, (inputs,))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it takes something of another shape
    return isinstance(out, Tensor) and out.shape == (1, 3, size_out)


def _called_router(name: str, module: nn.Module) -> bool:
    return ROUTER in name.rpartition(".")[2].lower() or ROUTER in type(module).__name__.lower()


def _recorded(model: nn.Module) -> set[str]:
    """Name the modules whose outputs `transformers` records as router logits, but for blocks
    with a router inside.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    marks = [part.can_record_outputs.get(f"{ROUTER}_logits") for part in parts]
    specs = [spec for mark in marks for spec in (mark if isinstance(mark, list) else [mark])]
    recorded = [
        (getattr(spec, "target_class", spec), getattr(spec, "layer_name", None)) for spec in specs
    ]
    kinds = {
        (kind, f".{part.strip('.')}." if part else "")
        for kind, part in recorded
        if isinstance(kind, type)
    }

    def is_recorded(name: str, module: nn.Module) -> bool:
        return any(isinstance(module, kind) and part in f"{name}." for kind, part in kinds)

    def is_block(module: nn.Module) -> bool:
        inside = [(name, part) for name, part in module.named_modules() if name]
        return any(
            is_recorded(name, part) or _called_router(name, part) for name, part in inside
        ) or any(parameter.ndim == 3 for parameter in module.parameters())

    return {
        name
        for name, module in model.named_modules()
        if is_recorded(name, module) and not is_block(module)
    }


def _expert_sized(model: nn.Module, numbers: set[int]) -> set[str]:
    """Name the linears with as many outputs as their layer has experts, if `numbers` has this
    number too.
    """
    routers = set()
    for name, block in model.named_modules():
        # How many experts a part may hold: one for each entry of a list, or of a weight's first
        # dimension.
        counts = {len(part) for part in block.children() if isinstance(part, nn.ModuleList)}
        plain_children = [
            part for part in block.children() if not isinstance(part, nn.ModuleList | _ConvNd)
        ]
        counts |= {
            parameter.shape[0]
            for part in plain_children
            for parameter in part.parameters(recurse=False)
            if parameter.ndim == 3
        }
        routers |= {
            f"{name}.{leaf}"
            for leaf, part in block.named_children()
            if isinstance(part, nn.Linear) and part.out_features in counts & numbers
        }
    return routers


def _expert_numbers(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield each whole number in a config, or in a config inside it, whose key has the word
    expert.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _expert_numbers(value)
        elif "expert" in str(key).lower() and type(value) is int and value > 0:
            yield value


def _unique_endings(targets: Collection[str], names: Collection[str], size: int = 1) -> list[str]:
    """Return ends of names that match every wanted one and no other, as PEFT does, of `size` parts
    or more. None begins with a number."""
    excluded = [name.split(".") for name in set(names) - set(targets)]
    left = [name.split(".") for name in targets]
    endings = set()
    while left:
        taken = {tuple(name[-size:]) for name in excluded}
        candidates = {tuple(name[-size:]): len(name) == size for name in left}
        alone = {
            end
            for end, is_full_name in candidates.items()
            if is_full_name or (end not in taken and not end[0].isdigit())
        }
        left = [name for name in left if tuple(name[-size:]) not in alone]
        endings |= alone
        size += 1
    return sorted(".".join(end) for end in endings)


def _peft_adapts(model: PreTrainedModel, target: str) -> bool:
    """Whether PEFT adapts the modules of that name, and as modules. It refuses some, which kernels
    read without calling them. Of some models it takes names of linears for those of experts that an
    earlier `transformers` kept one by one, and adapts the experts' weights in their place."""
    config = LoraConfig(target_modules=[target])
    try:
        check_target(model, config, target.rpartition(".")[2])
        convert_peft_config_for_transformers(config, model, conversions=None)
    except ValueError:
        return False
    return list(config.target_modules or ()) == [target]
