"""The two kinds of phases as a run drives them: weights that train themselves, and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lema.config import MemoryStrategy
from lema.errors import ConfigError
from lema.fulltraining import FullTraining
from lema.merge import merge_adapter
from lema.model import LemaModel
from lema.phaseplan import Phase
from lema.phaseplan.selection import layer_selection
from lema.skeleton import find_layers
from lema.trainedmodel import save_trained
from lema.trainer import LemaTrainer

__all__ = ["Adapters", "Weights", "chosen_by", "of_kind"]


class Weights:
    """A phase of weights: `lema.fulltraining` as a run drives it."""

    def __init__(self, model: LemaModel, phase: Phase) -> None:
        self._model = model
        model.skeleton.train()
        self._training = FullTraining(model.adapter, model.config, chosen_by(phase, model.skeleton))
        self.optimizer = self._training.optimizer

    def step(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        """Take one optimizer step; return its loss."""
        return float(self._training.step([micro_batches]))

    def save(self, directory: Path, about: dict[str, Any]) -> None:
        """Write a checkpoint."""
        self._training.save_checkpoint(directory, about)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint; return what was said about it."""
        return self._training.load_checkpoint(directory)

    def reset_optimizer(self) -> None:
        """Begin with empty moments."""
        raise AssertionError("weights that begin with an empty optimizer begin with a base of their own")

    def save_model(self, end: Path, out: Path) -> None:  # noqa: ARG002 - adapters are merged from there
        """Write the model that the next phase begins with; `end` is the last checkpoint."""
        save_trained(self._model, self._training, out)


class Adapters:
    """A phase of adapters: a `LemaTrainer` as a run drives it."""

    def __init__(self, model: LemaModel) -> None:
        model.initialize_lora()
        self._trainer: LemaTrainer = model.get_trainer()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Over the adapters."""
        return self._trainer.ready()

    def step(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        """Take one optimizer step; return its loss."""
        return self._trainer.accumulate(micro_batches).loss

    def save(self, directory: Path, about: dict[str, Any]) -> None:
        """Write a checkpoint."""
        self._trainer.save_checkpoint(directory, about)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint; return what was said about it."""
        return self._trainer.load_checkpoint(directory)

    def reset_optimizer(self) -> None:
        """Begin with empty moments."""
        self._trainer.optimizer = None

    def save_model(self, end: Path, out: Path) -> None:
        """Write the model that the next phase begins with; `end` is the last checkpoint."""
        merge_adapter(end, out)


def chosen_by(phase: Phase, model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a parameter's name whether it trains in a phase.

    Raises:
        ConfigError: nothing does; or `layers` are not those of the model.
    """
    layers_name, stack = find_layers(model)
    selection = None if phase.layers is None else layer_selection(phase.layers, len(stack))
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    found, unmatched = set(), set(phase.trainable or ())
    for name, parameter in model.named_parameters():
        inside = name.startswith(f"{layers_name}.")
        module = name.rpartition(".")[0]
        if phase.trains == "full":
            wanted = True
        elif inside:
            number = int(name.removeprefix(f"{layers_name}.").partition(".")[0])
            within = selection is None or number in selection.layers
            ends = {end for end in phase.trainable or () if f".{module}".endswith(f".{end}")}
            unmatched -= ends
            wanted = within and (phase.trainable is None or bool(ends))
        else:
            wanted = selection is not None and (selection.embeddings if id(parameter) in embeddings else selection.head)
        if wanted:
            found.add(name)
    if unmatched and found:
        raise ConfigError(
            f"no module of the layers ends with {min(unmatched)}", where="trainable", how="correct it, or leave it out"
        )
    if not found:
        raise ConfigError(
            f"no weight of the model is in what phase {phase.name} trains",
            where="trainable" if phase.trainable else "layers",
            how="name the ends of modules' names, such as those that `lema models DIRECTORY` prints",
        )
    return found.__contains__


def of_kind(phase: Phase) -> dict[str, Any]:
    """Return the settings that go with what a phase trains."""
    if (lora := phase.adapters) is None:
        # The weights change: they are kept where they can be written to.
        return {"strategy": MemoryStrategy.RESIDENT, "device_memory": None, "lora_target_modules": None}
    return {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_target_modules": lora.target_modules}
