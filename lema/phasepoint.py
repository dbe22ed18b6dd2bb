"""Where a run of phases goes on: at its newest checkpoint that is sound, of whatever phase.

Where none of a phase is sound, the end of the phase before is the newest point there is: the phase begins again, and a
line says so. A run of which nothing is sound is not begun afresh. What a phase has left to the next one (a model) is
compared with its manifest where it is gone on with; one that is gone is written again from the phase's last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lema.checkpoint import read_state
from lema.errors import AdapterError
from lema.phaseplaces import Places
from lema.phasestart import Start
from lema.replicas import Replicas
from lema.replicate import first_alone
from lema.resuming import check_sound, newest_sound, tell_warning

__all__ = ["agreed_point", "find_point"]

Say = Callable[[str], None]


def agreed_point(replicas: Replicas, places: Places, say: Say) -> Start | None:
    """Return where the run goes on, which the first process looks for; all processes call this.

    Raises:
        LemaError: as `find_point`; in every process.
    """
    found: list[Start | None] = []
    first_alone(replicas, lambda: found.append(find_point(places, say)))
    mine = found[0] if found else None
    told = None if mine is None else (mine.index, mine.checkpoint and str(mine.checkpoint), mine.ended, mine.rebuilt)
    first, *_ = replicas.everyone(told)
    if first is None:
        return None
    index, checkpoint, ended, rebuilt = first
    return Start(index, checkpoint and Path(checkpoint), {}, here=True, ended=ended, rebuilt=rebuilt)


def find_point(places: Places, say: Say) -> Start | None:
    """Return where a run goes on; None: it has no checkpoint at all.

    Args:
        places: where its phases are.
        say: called with a line for each checkpoint that is passed over, and for each thing that is done again.

    Raises:
        AdapterError: it has checkpoints and none is sound, or a model that is gone on with is damaged.
        ConfigError: the plan is another.
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
        raise AdapterError(
            f"no checkpoint of the run is sound:{''.join(faults)}",
            where=str(places.directory),
            how="copy one back from where it is whole, or begin a new run in another output_dir",
        )
    return None


def _at(places: Places, index: int, checkpoint: Path | None, say: Say) -> Start:
    """Return the point at a checkpoint of a phase, or at its beginning, once what lies below it is seen to be there."""
    _check_plan(places, index, checkpoint)
    ended = checkpoint == places.end_of(index) and places.is_done(index, alone=True)
    return Start(index, checkpoint, {}, here=True, ended=ended, rebuilt=_to_rebuild(places, index, say))


def _check_plan(places: Places, index: int, checkpoint: Path | None) -> None:
    """Refuse another plan than that of the checkpoint that is gone on from, or of the end of the phase before."""
    if checkpoint is None:
        if index == 0 or not _is_sound(places.end_of(index - 1)):
            return  # nothing says what was trained
        index, checkpoint = index - 1, places.end_of(index - 1)
    about = read_state(checkpoint)["extra"]
    if "plan" not in about:
        raise AdapterError(
            "this checkpoint is of no run of phases",
            where=str(checkpoint),
            how="begin a new run in another output_dir",
        )
    places.plan.check_same(about["plan"], str(checkpoint), index + 1)


def _is_sound(checkpoint: Path) -> bool:
    try:
        check_sound(checkpoint)
    except AdapterError:  # it is passed over, and that is said, where its own phase is looked at
        return False
    return True


def _stands(places: Places, index: int) -> bool:
    """Whether all is there and sound that a phase begins with."""
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
        raise AdapterError(
            f"the model that phase {name} left is gone, and cannot be written again: {error.what}",
            where=f"{places.model_of(below)}, from {error.where}",
            how="copy the model back, or begin again in another output_dir",
        ) from error
    tell_warning(f"the model that phase {name} left is not there: it is written again from {end}", say)
    return below
