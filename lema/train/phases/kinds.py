"""The two kinds of phases as a run drives them: weights that train themselves, and adapters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lema.backend.collectives import first_alone
from lema.config import MemoryStrategy
from lema.convert import merge_adapter
from lema.engine.loss import attended_tokens, trained_tokens
from lema.errors import AdapterError, ConfigError
from lema.lora.merge import Rounding
from lema.model.skeleton import find_layers
from lema.storage.atomic import commit
from lema.storage.diskspace import check_room, disk_error
from lema.storage.verify import base_fingerprint
from lema.train.checkpoint.format import read_state
from lema.train.full import FullTraining, save_delta, save_trained
from lema.train.model import LemaModel
from lema.train.phases.phase import Phase
from lema.train.phases.selection import layer_selection
from lema.train.trainer import LemaTrainer, StepResult

__all__ = ["Adapters", "Weights", "chosen_by", "of_kind"]


class Weights:
    """A phase of weights: `lema.train.full.training` as a run drives it."""

    def __init__(self, model: LemaModel, phase: Phase) -> None:
        self._model = model
        model.skeleton.train()
        self._training = FullTraining(model.adapter, model.config, chosen_by(phase, model.skeleton))
        self._save = save_delta if phase.save == "delta" else save_trained
        self.optimizer = self._training.optimizer

    @property
    def module(self) -> torch.nn.Module:
        """What callbacks see as the model."""
        return self._model.skeleton

    def step(
        self,
        micro_batches: list[dict[str, torch.Tensor]],
        on_event: Callable[[str], None],  # noqa: ARG002 - there is no moment at which all gradients exist
        where: str = "",
    ) -> StepResult:
        """Take one optimizer step; `where` says which rows these are, for an error."""
        counted = self._model.backend.replicas.exchange((trained_tokens(micro_batches), attended_tokens(micro_batches)))
        trained, tokens = (sum(column) for column in zip(*counted, strict=True))
        loss = float(self._training.step([micro_batches], trained, where=where))
        return StepResult(loss, trained, tokens, self._training.grad_norm, self._training.dropped)

    @property
    def skipped_steps(self) -> int:
        """Steps of the phase that were dropped."""
        return self._training.skipped_steps

    def require_room(self, count: int) -> None:
        """Make sure that the disk has room for so many checkpoints."""
        place, nbytes = Path(self._model.config.output_dir), count * self._training.checkpoint_bytes
        first_alone(self._model.backend.replicas, lambda: check_room(place, nbytes, f"{count} of its checkpoints"))

    def save(self, directory: Path, about: dict[str, Any], write_more: Callable[[Path], None] | None = None) -> None:
        """Write a checkpoint; `write_more` writes further files into it."""
        self._training.save_checkpoint(directory, about, write_more, base=self._base)

    @cached_property
    def _base(self) -> str:
        return base_fingerprint(self._model.gbi)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint; return what was said about it.

        Raises:
            AdapterError: it is of another model, of another kind of training, or damaged.
        """
        if (then := read_state(directory).get("base")) not in (None, self._base):
            raise AdapterError(
                f"the model has changed since it was trained: its fingerprint is {self._base}, and it was {then}",
                where=f"{directory}, on {self._model.gbi.path}",
                how="give the model as it was, or begin a new run in another output_dir",
            )
        return self._training.load_checkpoint(directory)

    def carry(self, directory: Path) -> None:
        """Begin with the moments that a checkpoint of other weights of the model has of these."""
        self._training.load_checkpoint(directory, carry=True)

    def reset_optimizer(self) -> None:
        """Begin with empty moments."""
        raise AssertionError("weights that begin with an empty optimizer begin with a base of their own")

    def close(self) -> None:
        """Give back what only training needs."""
        self._training.close()

    def save_model(self, end: Path, out: Path, after: Phase | None) -> None:  # noqa: ARG002 - as the others
        """Write the model that the next phase begins with, or what the last one says; `end` is the last checkpoint."""
        first_alone(self._model.backend.replicas, lambda: self._saved(out))

    def _saved(self, out: Path) -> None:
        def save(part: Path) -> None:
            self._save(self._model, self._training, part)

        _written(out, save)


class Adapters:
    """A phase of adapters: a `LemaTrainer` as a run drives it."""

    def __init__(self, model: LemaModel, *, trust_remote_code: bool = False) -> None:
        self._replicas, self._trust, self._seed = model.backend.replicas, trust_remote_code, model.config.seed
        model.initialize_lora()
        self._trainer: LemaTrainer = model.get_trainer()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Over the adapters."""
        return self._trainer.ready()

    @property
    def module(self) -> torch.nn.Module | None:
        """What callbacks see as the model."""
        return self._trainer.peft_model

    def step(
        self, micro_batches: list[dict[str, torch.Tensor]], on_event: Callable[[str], None], where: str = ""
    ) -> StepResult:
        """Take one optimizer step; `where` says which rows these are, for an error."""
        return self._trainer.accumulate(micro_batches, on_event=on_event, where=where)

    @property
    def skipped_steps(self) -> int:
        """Steps of the phase that were dropped."""
        return self._trainer.skipped_steps

    def require_room(self, count: int) -> None:
        """Make sure that the disk has room for so many checkpoints."""
        self._trainer.require_room(count)

    def save(self, directory: Path, about: dict[str, Any], write_more: Callable[[Path], None] | None = None) -> None:
        """Write a checkpoint; `write_more` writes further files into it."""
        self._trainer.save_checkpoint(directory, about, write_more)

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore a checkpoint; return what was said about it."""
        return self._trainer.restore(directory)

    def carry(self, directory: Path) -> None:  # noqa: ARG002 - as weights
        """Begin with the moments of a checkpoint of others."""
        raise AssertionError("new adapters begin with an empty optimizer")

    def reset_optimizer(self) -> None:
        """Begin with empty moments."""
        self._trainer.optimizer = None

    def close(self) -> None:
        """Nothing but the model is held."""

    def save_model(self, end: Path, out: Path, after: Phase | None) -> None:
        """Write the model that the next phase, `after`, begins with; `end` is the last checkpoint."""
        rounding = (after.rounding if after else None) or "nearest"
        first_alone(self._replicas, lambda: self._merged(end, out, rounding))

    def _merged(self, end: Path, out: Path, rounding: Rounding) -> None:
        def merge(part: Path) -> None:
            merge_adapter(end, part, rounding=rounding, seed=self._seed, trust_remote_code=self._trust)

        _written(out, merge)


def _written(out: Path, write: Callable[[Path], None]) -> None:
    """Have a model appear under its name, with a manifest; `write` writes it into the directory it is given.

    Raises:
        DiskError: it could not be written; nothing is left behind.
    """
    for left in out.parent.glob(f"..{out.name}.*.partial"):  # of a run that was killed at it
        shutil.rmtree(left, ignore_errors=True)
    try:
        commit(out, write)
    except OSError as error:
        raise disk_error(error, out) from error


def chosen_by(phase: Phase, model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a parameter's name whether it trains in a phase.

    Raises:
        ConfigError: nothing does; or `layers` are not those of the model.
    """
    layers_name, stack = find_layers(model)
    selection = None if phase.layers is None else layer_selection(phase.layers, len(stack))
    embeddings = set() if selection is None else _embeddings(model)
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


def _embeddings(model: PreTrainedModel) -> set[int]:
    """Return the identities of the parameters of a model's input embeddings."""
    try:
        return {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    except NotImplementedError as error:  # of a model whose code does not say
        raise ConfigError(
            f"the model does not say what its embeddings are: {error}",
            where="layers",
            how="leave layers out, and name modules with `trainable`",
        ) from error


def of_kind(phase: Phase) -> dict[str, Any]:
    """Return the settings that go with what a phase trains."""
    if (lora := phase.adapters) is None:
        # The weights change: they are kept where they can be written to.
        return {"strategy": MemoryStrategy.RESIDENT, "device_memory": None, "lora_target_modules": None}
    return lora.adapter_settings()
