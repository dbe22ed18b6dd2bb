"""An adapter's files in the names of the class that `config.json` of its model names, and of the one that trains.

Programs open an adapter on either class. PEFT finds nothing to load where the names of the tensors are of the other,
and only warns; its own translation of names, in 0.21, takes `language_model.layers` for `model.layers` with something
before it, and undoes itself. So where the classes differ, an adapter's file has its tensors under the names of each,
and is read with the names of either. The config says which modules are adapted by ends of names or by expressions,
which may match others in another class: where they do, it leaves those out, or names the modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.errors import AdapterError
from lema.lora.class_names import class_names
from lema.lora.shards import PREFIX

__all__ = ["config_in_files", "config_in_own", "publish_files", "tensors_in_files", "tensors_in_own"]

Rename = Callable[[str], str]


def tensors_in_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors, which have PEFT's names for this model, under those of each class."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if (there := _renamed(name, class_names(model).in_published)) not in found:
            found[there] = tensor.clone()  # safetensors writes no memory twice
    return found


def tensors_in_own(model: PreTrainedModel, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Name an adapter's tensors, which have PEFT's names for either class, as PEFT does for this model. `AdapterError`:
    a tensor is there under both names, with different values; `where` is its file."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        other = found.setdefault(own := _renamed(name, class_names(model).in_own), tensor)
        if other is not tensor and not torch.equal(other, tensor):
            what = f"the adapter has two tensors for {own.removeprefix(PREFIX)}, and they differ"
            raise AdapterError(what, where=str(where), how="save the adapter again; one of its forms was changed")
    return found


def config_in_own(model: PreTrainedModel, config: LoraConfig, names: Iterable[str], where: Path) -> LoraConfig:
    """Return the config of an adapter of either class for this model, which has no adapters. `names`: of the adapter's
    tensors. `AdapterError`: it adapts modules that this class does not have; `where` is where it lies."""
    classes = class_names(model)
    if classes.published is None:
        return config
    there = {name for name, _ in model.named_modules()}
    if absent := sorted(one for one in map(classes.in_own, _adapted(config, names)) if one not in there):
        what = f"the adapter adapts modules that the class that trains, {type(model).__name__}, does not have: "
        how = "`lema merge` writes it into the model; to train it, use one that adapts the language model alone"
        raise AdapterError(what + ", ".join(absent[:3]), where=str(where), how=how)
    return _fitted(config, names, classes.in_own, model)


def config_in_files(model: PreTrainedModel, config: LoraConfig, names: Iterable[str]) -> LoraConfig:
    """Return the config that is written of an adapter of this model; `names`: of the adapter's tensors."""
    classes = class_names(model)
    if classes.published is None or classes.own_published:
        return config
    return _fitted(config, names, classes.in_published, classes.published)


def publish_files(model: PreTrainedModel, directory: Path, config_name: str, weights_name: str) -> None:
    """Rewrite the files that PEFT wrote of an adapter of this model such that they fit the published class, too."""
    classes = class_names(model)
    if classes.published is None or classes.own_published:
        return
    tensors = load_file(directory / weights_name)
    config = LoraConfig.from_pretrained(str(directory))
    fitted = config_in_files(model, config, tensors)
    save_file(tensors_in_files(model, tensors), directory / weights_name, metadata={"format": "pt"})
    written = json.loads((directory / config_name).read_text(encoding="utf-8"))
    changed = {
        name: _plain(getattr(fitted, name)) for name in CHANGED if getattr(fitted, name) != getattr(config, name)
    }
    if changed:
        text = json.dumps(written | changed, indent=2, sort_keys=True)
        (directory / config_name).write_text(text, encoding="utf-8")


CHANGED = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("target_parameters", "modules_to_save", "trainable_token_indices"),
)


def _fitted(config: LoraConfig, names: Iterable[str], rename: Rename, model: PreTrainedModel) -> LoraConfig:
    """Return a config with which PEFT adapts in `model` the modules that the adapter's tensors are of."""
    before = _adapted(config, names)
    wanted = {rename(name) for name in before}
    fitted = deepcopy(config)
    modules = dict(model.named_modules())
    ends = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    for option in ("target_parameters", "modules_to_save"):
        if listed := getattr(config, option):
            setattr(fitted, option, [_end(one, ends, rename) for one in listed])
    if isinstance(rows := config.trainable_token_indices, dict):
        fitted.trainable_token_indices = {_end(name, ends, rename): one for name, one in rows.items()}
    if (selected := _selected(fitted, modules)) > wanted:
        _exclude(fitted, _apart(selected - wanted, wanted))
        selected = _selected(fitted, modules)
    if selected != wanted:
        fitted.target_modules = sorted({*before, *wanted})  # so that it fits both classes
        fitted.exclude_modules = fitted.layers_to_transform = fitted.layers_pattern = None
    for option, usual in (("rank_pattern", config.r), ("alpha_pattern", config.lora_alpha)):
        patterns: dict[str, int] = getattr(config, option) or {}
        values = {name: _value(patterns, name, usual) for name in before}
        exact = values | {rename(name): one for name, one in values.items()}
        if any(_value(patterns, name, usual) != one for name, one in exact.items()):
            setattr(fitted, option, {name: one for name, one in sorted(exact.items()) if one != usual})
    return fitted


def _value(patterns: Mapping[str, int], name: str, usual: int) -> int:
    """Return what PEFT takes from patterns for a module."""
    return patterns.get(get_pattern_key(list(patterns), name), usual)


def _adapted(config: LoraConfig, names: Iterable[str]) -> set[str]:
    """Return the modules that tensors of an adapter are of, but for those of which parameters are adapted."""
    modules = {
        name.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "")
        for name in names
        if ".lora_" in name
    }
    experts = tuple(one.rpartition(".")[0] for one in config.target_parameters or ())
    return {one for one in modules if not any(f".{one}".endswith(f".{expert}") for expert in experts)}


def _selected(config: LoraConfig, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the modules that PEFT adapts by a config."""
    return {name for name in modules if name and bool(check_target_module_exists(config, name))}


def _exclude(config: LoraConfig, modules: Iterable[str]) -> None:
    """Leave out modules of a config's targets, with what it leaves out already."""
    before = config.exclude_modules or ()
    ends = [before] if isinstance(before, str) else [rf"(.*\.)?{re.escape(end)}" for end in sorted(before)]
    config.exclude_modules = "|".join([*(rf"{re.escape(one)}(\..*)?" for one in modules), *ends])


def _apart(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the outermost modules around some that have none of others in them."""
    around = {".".join(name.split(".")[:n]) for name in others for n in range(1, name.count(".") + 2)}
    found: dict[str, None] = {}
    for name in sorted(modules):
        parts = name.split(".")
        begins = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        found[next(one for one in begins if one not in around)] = None
    return list(found)


def _end(name: str, ends: Iterable[str], rename: Rename) -> str:
    """Return an end of names as it is, where the model has a name with it; else as the name of a module."""
    return name if any(f".{one}".endswith(f".{name}") for one in ends) else rename(name)


def _renamed(name: str, rename: Rename) -> str:
    return PREFIX + rename(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
