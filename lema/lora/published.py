"""An adapter's files in the names of the class that `config.json` of its model names, and of the
one that trains.

Programs open an adapter on either class. PEFT finds nothing to load where the names of the tensors
are of the other, and only warns; its own translation of names, in 0.21, takes
`language_model.layers` for `model.layers` with something before it, and undoes itself. So where the
classes differ, an adapter's file has its tensors under the names of each, and is read with the
names of either. Programs that refuse names which they do not know are given those of one class. The
config says which modules are adapted by ends of names or by expressions, which may match others in
another class: where they do, it leaves those out, or names the modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lema.errors import AdapterError
from lema.lora.class_names import class_names
from lema.lora.merge import OWN, WRAPPED
from lema.lora.options import pattern_value, with_options, without_modules
from lema.lora.shards import PREFIX
from lema.storage.verify import load_tensors

__all__ = [
    "ClassForm",
    "config_in_files",
    "config_in_own",
    "publish_files",
    "tensors_in_files",
    "tensors_in_own",
]

ClassForm = Literal["both", "published", "text"]
"""Under the names of which class an adapter's file has its tensors: of the one that `config.json`
names, of the one for text, which trains, or of both."""
Rename = Callable[[str], str]


def tensors_in_files(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], form: ClassForm = "both"
) -> dict[str, Tensor]:
    """Return an adapter's tensors, which have PEFT's names for this model, under those of each
    class, or of one.
    """
    file_tensors = {} if form == "published" else dict(tensors)
    for name, tensor in tensors.items() if form != "text" else ():
        if (there := _renamed(name, class_names(model).in_published)) not in file_tensors:
            file_tensors[there] = tensor.clone()  # safetensors writes no memory twice
    return file_tensors


def tensors_in_own(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], where: Path
) -> dict[str, Tensor]:
    """Name an adapter's tensors, which have PEFT's names for either class, as PEFT does for this
    model. `AdapterError`: a tensor is there under both names, with different values; `where` is its
    file."""
    model_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        previous = model_tensors.setdefault(
            model_name := _renamed(name, class_names(model).in_own), tensor
        )
        if previous is not tensor and not torch.equal(previous, tensor):
            what = (
                f"the adapter has two tensors for {model_name.removeprefix(PREFIX)}, and they "
                "differ"
            )
            raise AdapterError(
                what, where=str(where), how="save the adapter again; one of its forms was changed"
            )
    return model_tensors


def config_in_own(
    model: PreTrainedModel, config: LoraConfig, names: Iterable[str], where: Path
) -> LoraConfig:
    """Return the config of an adapter of either class for this model. `names`: of the adapter's
    tensors. `AdapterError`: it adapts modules that this class does not have; `where` is where it
    lies."""
    classes = class_names(model)
    if classes.published is None:
        return config
    there = _bare(name for name, _ in model.named_modules())
    adapted = {classes.in_own(_module(name)) for name in names if ".lora_" in name}
    if absent := sorted(adapted - there.keys()):
        what = (
            f"the adapter adapts modules that the class that trains, {type(model).__name__}, "
            "does not have: "
        )
        how = (
            "`lema merge` writes it into the model; to train it, use one that adapts the "
            "language model alone"
        )
        raise AdapterError(what + ", ".join(absent[:3]), where=str(where), how=how)
    return _fitted(config, names, classes.in_own, model)


def config_in_files(model: PreTrainedModel, config: LoraConfig, names: Iterable[str]) -> LoraConfig:
    """Return the config that is written of an adapter of this model; `names`: of the adapter's
    tensors.
    """
    classes = class_names(model)
    if classes.published is None or classes.num_forms == 1:
        return config
    return _fitted(config, names, classes.in_published, classes.published)


def publish_files(
    model: PreTrainedModel,
    directory: Path,
    config_name: str,
    weights_name: str,
    form: ClassForm = "both",
) -> None:
    """Rewrite the files that PEFT wrote of an adapter of this model such that they fit the
    published class, too. The config fits each class, whatever the `form`."""
    if class_names(model).num_forms == 1:
        return
    tensors = load_tensors(directory / weights_name)
    config = LoraConfig.from_pretrained(str(directory))
    fitted = config_in_files(model, config, tensors)
    save_file(
        tensors_in_files(model, tensors, form), directory / weights_name, metadata={"format": "pt"}
    )
    written = json.loads((directory / config_name).read_text(encoding="utf-8"))
    changed = {
        name: _plain(getattr(fitted, name))
        for name in CHANGED
        if getattr(fitted, name) != getattr(config, name)
    }
    if changed:
        text = json.dumps(written | changed, indent=2, sort_keys=True)
        (directory / config_name).write_text(text, encoding="utf-8", newline="\n")


CHANGED = (
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
    ),
    *("target_parameters", "modules_to_save", "trainable_token_indices"),
)


def _fitted(
    config: LoraConfig, names: Iterable[str], rename: Rename, model: PreTrainedModel
) -> LoraConfig:
    """Return a config with which PEFT adapts in `model` the modules that the adapter's tensors
    are of.
    """
    fitted = deepcopy(config)
    modules = _bare(name for name, _ in model.named_modules())
    parameters = _bare(name for name, _ in model.named_parameters(remove_duplicate=False))
    before, experts = _adapted(config, names, rename, parameters)
    targets = {rename(name) for name in before}
    adapted = before.union(*(_ending(end, experts) for end in config.target_parameters or ()))
    full_names = [*modules, *parameters]
    if config.target_parameters:
        there = {rename(name) for name in experts}
        target_parameters = _parameters(config.target_parameters, parameters, experts, there)
        fitted = with_options(fitted, target_parameters=target_parameters)
    if config.modules_to_save:
        to_save = [_end(name, full_names, rename) for name in config.modules_to_save]
        fitted = with_options(fitted, modules_to_save=to_save)
    if isinstance(rows := config.trainable_token_indices, dict):
        token_indices = {_end(name, full_names, rename): indices for name, indices in rows.items()}
        fitted = with_options(fitted, trainable_token_indices=token_indices)
    fitted = _narrowed(fitted, modules, targets)
    if _selected(fitted, modules) != targets:
        fitted = with_options(
            fitted,
            target_modules=sorted({*before, *targets}),  # so that it fits both classes
            exclude_modules=None,
            layers_to_transform=None,
            layers_pattern=None,
        )
        # names of one class may end those of other modules in the other
        fitted = _narrowed(fitted, modules, targets)
    for option, usual in (("rank_pattern", config.r), ("alpha_pattern", config.lora_alpha)):
        patterns: dict[str, int] = getattr(config, option) or {}
        values = {name: pattern_value(patterns, name, usual) for name in adapted}
        exact = values | {rename(name): value for name, value in values.items()}
        if any(pattern_value(patterns, name, usual) != value for name, value in exact.items()):
            unusual = {name: value for name, value in sorted(exact.items()) if value != usual}
            fitted = with_options(fitted, **{option: unusual})
    return fitted


def _bare(names: Iterable[str]) -> dict[str, None]:
    """Return the names that those of a model with adapters have without them."""
    return {WRAPPED.sub("", name): None for name in names if not OWN.search(name)}


def _adapted(
    config: LoraConfig, names: Iterable[str], rename: Rename, parameters: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return the modules that tensors of an adapter are of: those that are adapted, and those of
    which parameters are. `parameters`: the names of those in a model, where a module has the name
    that `rename` gives it."""
    modules = {_module(name) for name in names if ".lora_" in name}
    suffixes = tuple(f".{name}" for name in config.target_parameters or ())
    matched = {name.rpartition(".")[0] for name in parameters if f".{name}".endswith(suffixes)}
    # An end may be the whole name in the other class, which no parameter here has.
    around = tuple(end.rpartition(".")[0] for end in suffixes if end.count(".") > 1)
    experts = {name for name in modules if rename(name) in matched or f".{name}".endswith(around)}
    return modules - experts, experts


def _module(name: str) -> str:
    """Return the module that a tensor of LoRA is of."""
    return name.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "")


def _parameters(
    listed: Iterable[str], names: Iterable[str], before: set[str], targets: set[str]
) -> list[str]:
    """Return ends of names with which PEFT adapts parameters of the `targets` modules, of those
    that a model has. Where ends match others as well, as in an image tower, they are the names in
    this class and the one `before`."""
    suffixes: dict[str, None] = {}
    for end in listed:
        matched = {name.rpartition(".")[0] for name in names if f".{name}".endswith(f".{end}")}
        fits = matched and matched <= targets
        suffixes |= {end: None} if fits else dict.fromkeys(_ending(end, {*before, *targets}))
    return list(suffixes)


def _ending(end: str, modules: Iterable[str]) -> list[str]:
    """Return the names of parameters of modules that have an end."""
    leaf = end.rpartition(".")[2]
    return [f"{name}.{leaf}" for name in sorted(modules) if f".{name}.{leaf}".endswith(f".{end}")]


def _selected(config: LoraConfig, modules: Iterable[str]) -> set[str]:
    """Return the modules that PEFT adapts by a config."""
    return {name for name in modules if name and bool(check_target_module_exists(config, name))}


def _narrowed(config: LoraConfig, modules: Iterable[str], targets: set[str]) -> LoraConfig:
    """Return a config without what it selects beside all that it should."""
    if (selected := _selected(config, modules)) > targets:
        return without_modules(config, _outermost(selected - targets, targets))
    return config


def _outermost(modules: Iterable[str], retained: Iterable[str]) -> list[str]:
    """Return the outermost modules around some that have none of others in them."""
    around = {
        ".".join(name.split(".")[:n]) for name in retained for n in range(1, name.count(".") + 2)
    }
    outermost: dict[str, None] = {}
    for name in sorted(modules):
        parts = name.split(".")
        begins = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        outermost[next(prefix for prefix in begins if prefix not in around)] = None
    return list(outermost)


def _end(name: str, full_names: Iterable[str], rename: Rename) -> str:
    """Return an end of names as it is, where the model has a name with it; else as the name of a
    module.
    """
    return (
        name
        if any(f".{full_name}".endswith(f".{name}") for full_name in full_names)
        else rename(name)
    )


def _renamed(name: str, rename: Rename) -> str:
    return PREFIX + rename(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else value
