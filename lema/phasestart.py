"""Where a run of phases begins that goes on from a checkpoint, or a model, which lies anywhere.

What kind of checkpoint it is, of which phase and after how many of its steps is recorded in it; nothing is guessed.
The base of its phase is linked into the new run's directory, so that the run is like any other from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lema.checkpoint import STATE
from lema.errors import AdapterError, ConfigError, DiskError
from lema.phaseplaces import MODEL, Places
from lema.resuming import check_sound

__all__ = ["Start", "begin_at", "find_start"]


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        index: of the phase it begins in.
        checkpoint: what the phase goes on from; None: it begins.
        models: what earlier phases have left, by their index.
        here: the checkpoint is the run's own.
        ended: with that checkpoint the phase has ended, and what it leaves is there.
        rebuilt: an earlier phase of the run whose model is written again first; None: none is.
    """

    index: int
    checkpoint: Path | None
    models: dict[int, Path]
    here: bool = False
    ended: bool = False
    rebuilt: int | None = None


def find_start(path: str | Path, places: Places) -> Start:
    """Find out what a path is, and where that is in a plan.

    Args:
        path: a checkpoint of one of the plan's phases, or a model's directory, with which its first adapters begin.
        places: of the run that begins.

    Raises:
        ConfigError: it is neither, of another plan, or the model below it is not to be found.
        AdapterError: the checkpoint is damaged.
    """
    given = Path(path).absolute()
    if (given / STATE).is_file():
        return _from_checkpoint(given, places)
    if (given / "config.json").is_file():
        return _from_model(given, places)
    inside = sorted(given.glob("checkpoint-*")) if given.is_dir() else []
    raise ConfigError(
        "a run begins from a checkpoint of phases or a model's directory, and this is neither",
        where=str(given),
        how=f"name one of the checkpoints in it, such as {inside[-1].name}"
        if inside
        else "name a directory with state.json (a checkpoint), or with config.json (a model)",
    )


def begin_at(start: Start, places: Places) -> None:
    """Put into the run's directory what its first phase stands on.

    Raises:
        DiskError: that cannot be done.
    """
    for index, model in start.models.items():
        link = places.model_of(index)
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():  # of a beginning that came to nothing
                link.unlink()
            link.symlink_to(model, target_is_directory=True)
        except OSError as error:
            raise DiskError(f"the model cannot be linked: {error.strerror}", where=f"{link} -> {model}") from error


def _from_model(model: Path, places: Places) -> Start:
    phases = places.plan.phases
    index = next((number for number, phase in enumerate(phases) if phase.trains == "lora"), None)
    if index is None:
        raise ConfigError(
            "this is a model, and no phase of the plan trains adapters on one",
            where=str(model),
            how="name a checkpoint to go on from, or set model_name_or_path to the model",
        )
    if index == 0:
        raise ConfigError(
            "this is a model, and the plan's first phase is the one to begin with it",
            where=str(model),
            how="set model_name_or_path to it instead",
        )
    return Start(index, None, {index - 1: model})


def _from_checkpoint(checkpoint: Path, places: Places) -> Start:
    about, plan = check_sound(checkpoint)["extra"], places.plan
    if not {"plan", "phase", "step"} <= about.keys():
        raise ConfigError(
            "this checkpoint is of a run without phases",
            where=str(checkpoint),
            how="name one that a run of phases wrote; an adapter is merged with `lema merge`, and named as a model",
        )
    names = [phase.name for phase in plan.phases]
    if about["phase"] not in names:
        raise ConfigError(
            f"this is a checkpoint of phase {about['phase']}, and the plan has no such phase",
            where=str(checkpoint),
            how=f"its phases are {', '.join(str(name) for name in names)}; give the plan the run was begun with",
        )
    index = names.index(about["phase"])
    plan.check_same(about["plan"], str(checkpoint), index + 1)
    if not 0 <= about["step"] <= plan.steps(index).steps:
        what = f"the checkpoint says that {about['step']} steps were taken, of {plan.steps(index).steps}"
        raise AdapterError(what, where=str(checkpoint / STATE), how="name another checkpoint")
    models = {}
    if under := places.based(index):
        models[under - 1] = _model_below(checkpoint, about.get("base"), str(names[under - 1]))
    beside = checkpoint.parent / MODEL
    ended = about["step"] == plan.steps(index).steps
    if ended and places.leaves_model(index) and not places.carries_moments(index + 1) and beside.is_dir():
        models[index] = beside.absolute()
    return Start(index, checkpoint, models)


def _model_below(checkpoint: Path, recorded: str | None, phase: str) -> Path:
    tried = [checkpoint.parent.parent / phase / MODEL, *([] if recorded is None else [Path(recorded)])]
    for model in tried:
        if (model / "config.json").is_file():
            return model.absolute()
    raise ConfigError(
        f"the model that phase {phase} left, on which this checkpoint stands, is not there",
        where=" or ".join(str(model) for model in tried),
        how="copy it to the first of these places",
    )
