"""Adapters on disk: PEFT's two files, unchanged; and a reader of the older `adapter_model.bin`."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lema.config import CONFIG_NAME, LemaConfig
from lema.errors import AdapterError, ConfigError, DiskError

__all__ = ["WEIGHTS", "load_weights", "read_lora_config", "read_settings", "save_adapter"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"


def read_settings(directory: Path, **overrides: Any) -> tuple[LemaConfig, LoraConfig | None]:
    """Read the settings an adapter was trained with, and PEFT's config of it (None: the older format).

    Args:
        directory: with PEFT's files, and `lema_config.json` unless `overrides` say what it would.
        overrides: settings that replace those saved.

    Raises:
        AdapterError: there is no adapter.
        ConfigError: a setting is wrong, or an override contradicts the adapter.
    """
    saved = read_lora_config(directory)
    if (directory / CONFIG_NAME).is_file():
        config = LemaConfig.from_pretrained(directory, **overrides)
    elif saved is not None:
        config = LemaConfig(**{"model_name_or_path": saved.base_model_name_or_path, **overrides})
    else:
        raise AdapterError(
            f"there is neither {CONFIG_NAME} nor {CONFIG}",
            where=str(directory),
            how="name a directory that save_pretrained, save_checkpoint or `lema train` wrote",
        )
    if saved is not None:
        _agree(config, saved, overrides, directory)
    return config, saved


def _agree(config: LemaConfig, saved: LoraConfig, overrides: Mapping[str, Any], directory: Path) -> None:
    """Let the config say what the adapter is. Only its dropout may be changed, which is no part of the function."""
    targets = saved.target_modules
    facts: dict[str, Any] = {
        "lora_rank": saved.r,
        "lora_alpha": saved.lora_alpha,
        "lora_target_modules": targets if isinstance(targets, str) or targets is None else sorted(targets),
    }
    for name, fact in facts.items():
        given = overrides.get(name)
        if given is not None and (sorted(given) if isinstance(given, list | tuple | set) else given) != fact:
            raise ConfigError(
                f"{name} is {given!r}, and the adapter was made with {fact!r}",
                where=str(directory),
                how=f"leave {name} out, or begin a new adapter in another directory",
            )
        setattr(config, name, fact)
    if "lora_dropout" in overrides:
        saved.lora_dropout = config.lora_dropout
    config.lora_dropout = saved.lora_dropout


def read_lora_config(directory: Path) -> LoraConfig | None:
    """Read `adapter_config.json`; None: the directory has none (the older format).

    Raises:
        AdapterError: the file cannot be read, or is not of a LoRA adapter.
    """
    file = directory / CONFIG
    if not file.is_file():
        return None
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise AdapterError(f"PEFT cannot read this adapter config: {error}", where=str(file)) from error
    if not isinstance(config, LoraConfig):
        raise AdapterError(
            f"the adapter is of type {config.peft_type}", where=str(file), how="only LoRA adapters are supported"
        )
    unsupported = {
        "init_lora_weights": config.init_lora_weights not in (True, False, "gaussian"),
        "use_dora": config.use_dora,
        "modules_to_save": bool(config.modules_to_save),
        "target_parameters": bool(config.target_parameters),
        "bias": config.bias != "none",
    }
    if found := [name for name, present in unsupported.items() if present]:
        raise AdapterError(
            f"the adapter uses {', '.join(found)}, which cannot be streamed yet",
            where=str(file),
            how="use a plain LoRA adapter",
        )
    config.inference_mode = False  # PEFT saves every adapter as one that is not to be trained
    return config


def save_adapter(model: PeftModel, directory: Path, base: str) -> None:
    """Write PEFT's files, each whole or not at all, readable by whoever may read the directory.

    Args:
        model: with the adapter.
        directory: made where it does not exist.
        base: the base model as the user names it, written to `base_model_name_or_path`.

    Raises:
        DiskError: a file could not be written; what was there before is untouched.
    """
    model.peft_config["default"].base_model_name_or_path = base
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adapter-", dir=directory) as name:
            part = Path(name)
            model.save_pretrained(str(part), save_embedding_layers=False)
            for file in part.iterdir():
                _make_ordinary(file)
                file.replace(directory / file.name)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"the adapter could not be written: {error}", where=str(directory)) from error


def load_weights(model: PeftModel, directory: Path, layers_name: str) -> None:
    """Fill the adapter's parameters from a directory.

    Args:
        model: with the adapter attached; every one of its parameters must be in the file, and no other.
        directory: with `adapter_model.safetensors`, or the older `adapter_model.bin`.
        layers_name: dotted name of the decoder layers in the base model.

    Raises:
        AdapterError: there is no adapter, it is damaged, or it does not fit the model.
    """
    file = directory / WEIGHTS
    if file.is_file():
        tensors = _read_safetensors(file)
    elif (file := directory / OLD_WEIGHTS).is_file():
        tensors = _read_old(file, layers_name)
    else:
        raise AdapterError(
            f"there is no adapter here: neither {WEIGHTS} nor {OLD_WEIGHTS}",
            where=str(directory),
            how="name a directory that save_pretrained, save_checkpoint or `lema train` wrote",
        )
    try:
        outcome: Any = set_peft_model_state_dict(model, tensors)
    except RuntimeError as error:
        raise AdapterError(f"the adapter does not fit the model: {error}", where=str(file)) from error
    missing = [name for name in outcome.missing_keys if ".lora_" in name]
    if missing or outcome.unexpected_keys:
        raise AdapterError(
            "the adapter does not fit the model: "
            f"missing {', '.join(missing) or 'nothing'}; unexpected {', '.join(outcome.unexpected_keys) or 'nothing'}",
            where=str(file),
            how="load it with the rank, target modules and base model it was trained with",
        )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"the adapter file is damaged: {error}", where=str(file)) from error


def _read_old(file: Path, layers_name: str) -> dict[str, Tensor]:
    """Read `"<layer, from 1>.<module>.lora_A"` -> tensor, and name each as PEFT does."""
    try:
        old = torch.load(file, weights_only=True, map_location="cpu")
        named = {}
        for name, tensor in old.items():
            layer, _, rest = name.partition(".")
            named[f"base_model.model.{layers_name}.{int(layer) - 1}.{rest}.weight"] = tensor.float()
    except (pickle.UnpicklingError, ValueError, AttributeError, RuntimeError, EOFError) as error:
        raise AdapterError(
            f"this is not an adapter of the older format: {error}",
            where=str(file),
            how="only tensors are loaded from it",
        ) from error
    return named


def _make_ordinary(file: Path) -> None:
    """Flush a file to disk and give it the permissions any new file would have."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
