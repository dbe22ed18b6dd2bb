"""The two kinds of phases, weights that train and adapters: what trains in one, and the model that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lema.backend.group import first_alone
from lema.config import LemaConfig, MemoryStrategy
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert import merge_adapter
from lema.errors import ConfigError, DiskError
from lema.model.skeleton import find_layers, find_towers, is_in
from lema.storage.atomic import commit, replacing
from lema.storage.diskspace import disk_errors
from lema.train.full.export import save_delta, save_trained
from lema.train.full.training import FullTraining
from lema.train.model import LemaModel
from lema.train.phases.phase import Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.selection import layer_selection
from lema.train.trainer import LemaTrainer

__all__ = ["chosen_by", "copy_adapter", "leave_model", "of_kind", "settings_of_phase", "trainer_of"]


def trainer_of(model: LemaModel, phase: Phase) -> LemaTrainer | FullTraining:
    """Return what takes the steps of a phase on an opened model, which has no adapters yet."""
    if phase.trains == "lora":
        model.initialize_lora()
        return model.get_trainer()
    model.skeleton.train()
    chosen = chosen_by(phase, model.skeleton)
    model.keep_whole(chosen, "weights of the model train")
    return FullTraining(model.adapter, model.config, chosen, model.gbi)


def leave_model(
    model: LemaModel, trainer: LemaTrainer | FullTraining, phase: Phase, end: Path, out: Path, after: Phase | None
) -> None:
    """Write to `out` the model that a phase leaves, for the phase `after` it: what was trained, or adapters of `end`
    merged.

    Raises `DiskError`, with nothing left behind, where it cannot be written.
    """
    write: Callable[[Path], object]
    if isinstance(trainer, FullTraining):
        write = partial(save_delta if phase.save == "delta" else save_trained, model, trainer)
    else:
        rounding = (after.rounding if after else None) or "nearest"
        options: dict[str, Any] = {"seed": model.config.seed, "trust_remote_code": model.trusted}
        write = partial(merge_adapter, end, rounding=rounding, **options)

    def written() -> None:
        for left in out.parent.glob(f"..{out.name}.*.part"):  # of a run that was killed while it wrote a model
            shutil.rmtree(left, ignore_errors=True)
        with disk_errors(out):
            commit(out, write)

    first_alone(model.backend.replicas, written)


def copy_adapter(end: Path, out: Path) -> None:
    """Copy the adapter that a run ends with to where every run has it; `DiskError` where it cannot be copied."""
    try:
        for file in (*end.glob("adapter_*"), end / CONFIG_NAME):
            with file.open("rb") as source, replacing(out / file.name) as copy:
                shutil.copyfileobj(source, copy)
    except OSError as error:
        raise DiskError(f"the adapter cannot be copied: {error.strerror}", where=str(out)) from error


def chosen_by(phase: Phase, model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a parameter's name whether it trains in a phase; `ConfigError` where none does."""
    layers_name, stack = find_layers(model)
    selection = None if phase.layers is None else layer_selection(phase.layers, len(stack))
    embeddings, head = (set(), set()) if selection is None else (_embeddings(model), _head(model))
    found, unmatched, towers = set(), set(phase.trainable or ()), find_towers(model)
    for name, parameter in model.named_parameters():
        inside = name.startswith(f"{layers_name}.")
        module = name.rpartition(".")[0]
        if is_in(module, towers):
            wanted = False
        elif phase.trains == "full":
            wanted = True
        elif inside:
            number = int(name.removeprefix(f"{layers_name}.").partition(".")[0])
            within = selection is None or number in selection.layers
            ends = {end for end in phase.trainable or () if f".{module}".endswith(f".{end}")}
            unmatched -= ends
            wanted = within and (phase.trainable is None or bool(ends))
        else:
            # A tied head is the embeddings' weight, which trains with either, as it does in the whole model.
            wanted = selection is not None and (
                (selection.embeddings and id(parameter) in embeddings)
                or (selection.head and (id(parameter) in head or id(parameter) not in embeddings))
            )
        if wanted:
            found.add(name)
    if unmatched and found:
        what = f"no module of the layers ends with {min(unmatched)}"
        raise ConfigError(what, where="trainable", how="correct it, or leave it out")
    if not found:
        what = f"no weight of the model is in what phase {phase.name} trains"
        how = "name the ends of modules' names, such as those that `lema models DIRECTORY` prints"
        raise ConfigError(what, where="trainable" if phase.trainable else "layers", how=how)
    return found.__contains__


def tied_note(phase: Phase, model: PreTrainedModel) -> str:
    """Say that embeddings and head are one weight, where a phase selects one of them by name; empty: they are not."""
    named = {"embeddings", "head"} & set(phase.layers or ())
    if len(named) != 1 or not _embeddings(model) & _head(model):
        return ""
    (name,) = named
    other = "the embeddings" if name == "head" else "the head"
    return f"phase {phase.name}: {name} trains {other} too, because the model has one weight for both (they are tied)"


def _head(model: PreTrainedModel) -> set[int]:
    """Return the identities of the parameters of a model's output embeddings; none where it does not say."""
    head = model.get_output_embeddings()
    return set() if head is None else {id(parameter) for parameter in head.parameters()}


def _embeddings(model: PreTrainedModel) -> set[int]:
    """Return the identities of the parameters of a model's input embeddings."""
    try:
        return {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    except NotImplementedError as error:  # of a model whose code does not say
        what = f"the model does not say what its embeddings are: {error}"
        raise ConfigError(what, where="layers", how="leave layers out, and name modules with `trainable`") from error


def settings_of_phase(config: LemaConfig, plan: PhasePlan, phase: Phase, **more: Any) -> LemaConfig:
    """Return the settings of a phase: the run's, but for what the plan and the phase say, and for `more`."""
    said = {"seed": plan.seed, "learning_rate": phase.learning_rate, **phase.overrides, **of_kind(phase)}
    return LemaConfig(**{**config.to_dict(), **said, **more})


def of_kind(phase: Phase) -> dict[str, Any]:
    """Return the settings that go with what a phase trains."""
    if (lora := phase.adapters) is None:
        # The weights change: they are kept where they can be written to.
        return {"strategy": MemoryStrategy.RESIDENT, "device_memory": None, "lora_target_modules": None}
    return lora.adapter_settings()
