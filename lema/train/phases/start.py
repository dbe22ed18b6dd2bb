"""Where a run of phases begins: at its own newest sound checkpoint, or at a checkpoint or model that lies anywhere.

A checkpoint records its kind, its phase and its steps; nothing is guessed. Where none of a phase is sound, it begins
again at the end of the phase before, and a line says so; a run without any is refused. A model that a phase has left is
compared with its manifest, and a missing one written again from the phase's last checkpoint. The base of a checkpoint
from elsewhere is linked into the new run's directory, so that the run is like any other from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema.backend import Replicas
from lema.backend.group import first_alone
from lema.errors import AdapterError, ConfigError, DiskError
from lema.train.checkpoint.format import STATE, read_state
from lema.train.checkpoint.resume import Say, check_sound, newest_sound, tell_warning
from lema.train.metrics import METRICS_NAME, cut_metrics
from lema.train.phases.places import MODEL, Places

__all__ = ["Start", "begin_at", "find_point", "find_start", "go_on"]


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    index: int  # of the phase it begins in
    checkpoint: Path | None = None  # what the phase goes on from; None: it begins
    models: Mapping[int, Path] = field(default_factory=dict)  # what earlier phases have left, by their index
    here: bool = False  # the checkpoint is the run's own
    ended: bool = False  # with that checkpoint the phase has ended, and what it leaves is there
    rebuilt: int | None = None  # an earlier phase of the run whose model is written again first; None: none is


def find_start(path: str | Path, places: Places) -> Start:
    """Find out where in a plan a path is: a checkpoint of a phase, or a model with which the first adapters begin; else
    `ConfigError`, of another plan and a model that is gone, too, or `AdapterError`.
    """
    given = Path(path).absolute()
    if (given / STATE).is_file():
        return _from_checkpoint(given, places)
    if (given / "config.json").is_file():
        return _from_model(given, places)
    how = "name a directory with state.json (a checkpoint), or with config.json (a model)"
    if given.is_dir() and (inside := sorted(given.glob("checkpoint-*"))):
        how = f"name one of the checkpoints in it, such as {inside[-1].name}"
    what = "a run begins from a checkpoint of phases or a model's directory, and this is neither"
    raise ConfigError(what, where=str(given), how=how)


def begin_at(start: Start, places: Places) -> None:
    """Put into the run's directory what its first phase stands on, or raise `DiskError`."""
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
    index = next((number for number, phase in enumerate(places.plan.phases) if phase.trains == "lora"), None)
    if index:
        return Start(index, None, {index - 1: model})
    what = "this is a model, and the plan's first phase is the one to begin with it"
    how = "set model_name_or_path to it instead"
    if index is None:
        what = "this is a model, and no phase of the plan trains adapters on one"
        how = "name a checkpoint to go on from, or set model_name_or_path to the model"
    raise ConfigError(what, where=str(model), how=how)


def _from_checkpoint(checkpoint: Path, places: Places) -> Start:
    about, plan = check_sound(checkpoint)["extra"], places.plan
    if not {"plan", "phase", "step"} <= about.keys():
        what = "this checkpoint is of a run without phases"
        how = "name one that a run of phases wrote; an adapter is merged with `lema merge`, and named as a model"
        raise ConfigError(what, where=str(checkpoint), how=how)
    names = [phase.name for phase in plan.phases]
    if about["phase"] not in names:
        what = f"this is a checkpoint of phase {about['phase']}, and the plan has no such phase"
        how = f"its phases are {', '.join(str(name) for name in names)}; give the plan the run was begun with"
        raise ConfigError(what, where=str(checkpoint), how=how)
    index = names.index(about["phase"])
    plan.check_same(about["plan"], str(checkpoint), index + 1)
    if not 0 <= about["step"] <= plan.steps(index).steps:
        what = f"the checkpoint says that {about['step']} steps were taken, of {plan.steps(index).steps}"
        raise AdapterError(what, where=str(checkpoint / STATE), how="name another checkpoint")
    models = {}
    if under := places.based(index):
        tried = [checkpoint.parent.parent / str(names[under - 1]) / MODEL]
        tried += [] if about.get("base") is None else [Path(about["base"])]
        if (model := next((one for one in tried if (one / "config.json").is_file()), None)) is None:
            what = f"the model that phase {names[under - 1]} left, on which this checkpoint stands, is not there"
            raise ConfigError(what, where=" or ".join(map(str, tried)), how="copy it to the first of these places")
        models[under - 1] = model.absolute()
    beside = checkpoint.parent / MODEL
    ended = about["step"] == plan.steps(index).steps
    if ended and places.leaves_model(index) and not places.carries_moments(index + 1) and beside.is_dir():
        models[index] = beside.absolute()
    return Start(index, checkpoint, models)


def go_on(replicas: Replicas, places: Places, say: Say) -> Start | None:
    """Return where a run goes on that is in its directory, all processes alike; cut the metrics of what comes after."""
    say = say if replicas.first else lambda _: None
    point = first_alone(replicas, lambda: find_point(places, say))
    if point is None:
        say(f"there is no checkpoint in {places.directory}: the run begins at its beginning")
        return None
    done = 0
    if point.checkpoint is not None:
        done, name = int(read_state(point.checkpoint)["extra"]["step"]), places.plan.phases[point.index].name
        say(f"resuming from {point.checkpoint} (step {done} of {places.plan.steps(point.index).steps} of {name})")

    def keep(row: Mapping[str, Any]) -> bool:
        stage, step = row.get("stage", 0), row.get("step_in_phase", 0)
        return bool(stage < point.index or (stage == point.index and point.checkpoint and step <= done))

    first_alone(replicas, lambda: cut_metrics(places.directory / METRICS_NAME, keep))
    return point


def find_point(places: Places, say: Say) -> Start | None:
    """Return where a run goes on; None: it has no checkpoint at all. What is passed over, or done again, is said.
    Raises `AdapterError` where nothing is sound that it could go on with; `ConfigError` where the plan is another.
    """
    faults: list[str] = []
    for index in reversed(range(len(places.plan.phases))):
        if not (found := places.saved(index)):
            continue
        name = places.plan.phases[index].name
        try:
            checkpoint = newest_sound(found, say)
        except AdapterError as error:
            faults += [f"\n  - {name}/{line.removeprefix('  - ')}" for line in error.what.splitlines()[1:]]
        else:
            return _at(places, index, checkpoint, say)
        if index and _stands(places, index):
            tell_warning(f"phase {name} begins again: none of its checkpoints is sound", say)
            return _at(places, index, None, say)
    if faults:
        what = f"no checkpoint of the run is sound:{''.join(faults)}"
        how = "copy one back from where it is whole, or begin a new run in another output_dir"
        raise AdapterError(what, where=str(places.directory), how=how)
    return None


def _at(places: Places, index: int, checkpoint: Path | None, say: Say) -> Start:
    """Return the point at a checkpoint of a phase, or at its beginning, once what lies below it is seen to be there."""
    _check_plan(places, index, checkpoint)
    ended = checkpoint == places.end_of(index) and places.is_done(index, alone=True)
    return Start(index, checkpoint, here=True, ended=ended, rebuilt=_to_rebuild(places, index, say))


def _check_plan(places: Places, index: int, checkpoint: Path | None) -> None:
    """Refuse another plan than that of the checkpoint that is gone on from, or of the end of the phase before."""
    if checkpoint is None:
        if index == 0 or not _is_sound(places.end_of(index - 1)):
            return  # nothing says what was trained
        index, checkpoint = index - 1, places.end_of(index - 1)
    about, how = read_state(checkpoint)["extra"], "begin a new run in another output_dir"
    if "plan" not in about:
        raise AdapterError("this checkpoint is of no run of phases", where=str(checkpoint), how=how)
    places.plan.check_same(about["plan"], str(checkpoint), index + 1)


def _is_sound(checkpoint: Path) -> bool:
    with suppress(AdapterError):  # it is passed over, and that is said, where its own phase is looked at
        return bool(check_sound(checkpoint))
    return False


def _stands(places: Places, index: int) -> bool:
    if places.begins_anew(index) and not places.has_model(index - 1):
        return False
    needs_end = places.carries_moments(index) or not places.begins_anew(index)
    return not needs_end or _is_sound(places.end_of(index - 1))


def _to_rebuild(places: Places, index: int, say: Say) -> int | None:
    """Return the phase whose model is below this one and gone, but can be written again; None: it is there."""
    below = places.based(index) - 1
    if below < 0 or places.has_model(below):
        return None
    end, name = places.end_of(below), places.plan.phases[below].name
    try:
        check_sound(end)
    except AdapterError as error:
        what = f"the model that phase {name} left is gone, and cannot be written again: {error.what}"
        how = "copy the model back, or begin again in another output_dir"
        raise AdapterError(what, where=f"{places.model_of(below)}, from {error.where}", how=how) from error
    tell_warning(f"the model that phase {name} left is not there: it is written again from {end}", say)
    return below
