"""Begins to train with an adapter that was made elsewhere, by PEFT or by an earlier run."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from lema.adapter import load_weights, read_lora_config
from lema.adapterbase import check_named_base
from lema.errors import AdapterError
from lema.model import LemaModel

__all__ = ["begin_with_adapter"]


def begin_with_adapter(model: LemaModel, directory: str | PathLike[str]) -> None:
    """Attach an adapter to a model in place of a fresh one: its own rank, targets and options, and its values.

    Args:
        model: without an adapter.
        directory: with PEFT's `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        AdapterError: there is no adapter, it is damaged, it belongs to another model, or does not fit this one.
        ConfigError: the model has an adapter already.
    """
    path = Path(directory)
    if (saved := read_lora_config(path)) is None:
        raise AdapterError(
            "there is no adapter in PEFT's format here",
            where=str(path),
            how="name a directory with adapter_config.json and adapter_model.safetensors",
        )
    check_named_base(path, saved, model.config.model_name_or_path, model.gbi)
    model.attach_lora(saved)
    assert model.lora_manager is not None
    load_weights(model.lora_manager, path, model.split.layers_name, model.backend.parallel)
