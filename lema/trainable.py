"""How many parameters a phase trains, counted on a model without weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lema.config import LemaConfig
from lema.hub import resolve_model
from lema.lora import configured_lora, count_lora_params, inject_lora_params
from lema.phasekinds import chosen_by, of_kind
from lema.phaseplan import Phase
from lema.skeleton import meta_model, read_config

__all__ = ["Trainable", "trainable_in"]


@dataclass(frozen=True)
class Trainable:
    """Numbers of parameters, tied ones counted once.

    Attributes:
        num_trained: those that train.
        num_model: those of the model without adapters.
    """

    num_trained: int
    num_model: int


def trainable_in(config: LemaConfig, phase: Phase, *, trust_remote_code: bool = False) -> Trainable:
    """Return how many parameters train in a phase; no weights are read.

    Args:
        config: the run's settings, which name the model.
        phase: the phase.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: no module matches the targets of the adapters; names those that could be.
        ConfigError: no weight matches what the phase trains, or a setting does not fit the model.
    """
    directory = resolve_model(config.model_name_or_path, revision=config.revision, trust_remote_code=trust_remote_code)
    hf_config = read_config(directory, trust_remote_code=trust_remote_code)
    model = meta_model(hf_config, torch.float32, trust_remote_code=trust_remote_code)
    whole = sum(parameter.numel() for parameter in model.parameters())
    if phase.trains != "lora":
        chosen = chosen_by(phase, model)
        return Trainable(sum(weight.numel() for name, weight in model.named_parameters() if chosen(name)), whole)
    settings = LemaConfig(**{**config.to_dict(), **of_kind(phase)})
    lora = configured_lora(model, settings)
    return Trainable(count_lora_params(inject_lora_params(model, lora, torch.device("cpu"), seed=None)), whole)
