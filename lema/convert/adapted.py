"""A saved adapter on the model that it was trained on, of which no weight is in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from lema.config import LemaConfig
from lema.config.acting import ACTING
from lema.convert.hubformat import StoredModel, open_stored
from lema.convert.quantized_base import with_quantized_base
from lema.errors import named_in
from lema.lora import inject_lora_params
from lema.lora.attach import configured_lora
from lema.lora.base import check_base
from lema.lora.files import adapter_config, load_weights, read_settings, settings_file
from lema.model.files import ModelFiles
from lema.model.skeleton import find_layers

__all__ = ["SavedAdapter", "open_adapter"]


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that is not attached yet, and its base."""

    directory: Path
    settings: LemaConfig
    base: StoredModel
    lora: LoraConfig

    def attach(self) -> PeftModel:
        """Attach it to the skeleton of its base, and load its weights. `AdapterError`: it does
        not fit the model, or the model has changed since it was trained."""
        device = torch.device("cpu")
        model = inject_lora_params(self.base.skeleton, self.lora, device, seed=None)
        load_weights(model, self.directory, find_layers(self.base.skeleton)[0])
        check_base(self.directory, self.base.index)
        return model


def open_adapter(
    adapter_dir: str | os.PathLike[str],
    base_dir: str | os.PathLike[str] | None,
    *,
    trust_remote_code: bool,
    note: Callable[[str], object],
) -> SavedAdapter:
    """Open the base of a saved adapter, of the class that its `config.json` names.

    Args:
        adapter_dir: a saved adapter; it names its base model.
        base_dir: where that is by now; None: where the adapter says.
        trust_remote_code: whether code beside the base may run.
        note: takes a sentence on which weights are the base's.

    Returns:
        The adapter and its base.

    Raises:
        AdapterError: there is no adapter.
        WeightsError: the base model is damaged, or does not fit its config.
    """
    adapter = Path(adapter_dir)
    overrides: dict[str, Any] = (
        {}
        if base_dir is None
        else {
            "model_name_or_path": base_dir,
            "revision": None,
            "gbi_path": None,
            "quantize_base": None,
        }
    )
    settings, saved = read_settings(adapter, unread=ACTING.keys() - {"gbi_path"}, **overrides)
    with named_in(settings_file(adapter) if base_dir is None else None):
        quantized = None
        if settings.quantize_base is not None:
            files = ModelFiles(settings, trust_remote_code=trust_remote_code)
            quantized = with_quantized_base(files, settings).quantized
        base = open_stored(
            settings.model_name_or_path,
            revision=settings.revision,
            weights=settings.gbi_path,
            dtype=settings.dtype,
            trust_remote_code=trust_remote_code,
            quantized=None if quantized is None else quantized.path,
            rope_parameters=settings.rope_parameters,
        )
    if quantized is not None:
        note(
            f"the base's weights are those of {quantized.kind}, with which the adapter was "
            "trained; --base DIR takes those of a model as it is stored"
        )
    lora = (
        configured_lora(base.skeleton, settings)
        if saved is None
        else adapter_config(base.skeleton, saved, adapter)
    )
    return SavedAdapter(adapter, settings, base, lora)
