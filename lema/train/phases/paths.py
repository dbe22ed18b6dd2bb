"""The directories of the phases of a run, which phases have ended, and where a run begins.

`output_dir/NAME/checkpoint-<step>` holds a phase's steps, `output_dir/NAME/model` the model it
leaves to the next one. `output_dir/latest.json` names the last checkpoint of the run,
`output_dir/NAME/best.json` that of a phase with the lowest validation loss. The notes are for
people and programs; a resumed run looks for the checkpoints themselves.

A run begins at its own newest sound checkpoint, or at a checkpoint or model that lies anywhere.
Where none of a phase is sound, it begins again at the end of the phase before, and a line says so.
A model that a phase has left is compared with its manifest, and a missing one written again from
the phase's last checkpoint. The base of a checkpoint from elsewhere is linked into the new run's
directory, so that the run is like any other from then on.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lema.backend import Replicas
from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.errors import AdapterError, ConfigError, DiskError, listed
from lema.storage.atomic import appearing, replace_file
from lema.storage.manifest import MANIFEST, check_manifest, write_manifest
from lema.storage.regular import read_regular
from lema.train.checkpoint.format import (
    STATE,
    checkpoints,
    delete_checkpoint,
    forget_old_checkpoints,
    read_state,
)
from lema.train.checkpoint.resume import Reporter, check_sound, newest_sound, report_warning
from lema.train.metrics import METRICS_NAME, check_unused, cut_metrics
from lema.train.phases.plan import PhasePlan

__all__ = [
    "BEST",
    "LATEST",
    "MODEL",
    "PhasePaths",
    "Start",
    "begin_at",
    "find_point",
    "find_start",
    "go_on",
]

BEST = "best.json"
LATEST = "latest.json"
MODEL = "model"
DELTA = "delta"


@dataclass(frozen=True)
class PhasePaths:
    """Where a run's phases are."""

    directory: Path  # where the run writes
    plan: PhasePlan  # its phases

    def phase_directory(self, index: int) -> Path:
        """Where a phase writes."""
        return self.directory / str(self.plan.phases[index].name)

    def checkpoint(self, index: int, step: int) -> Path:
        """The checkpoint of a phase after so many of its steps."""
        return self.phase_directory(index) / f"checkpoint-{step}"

    def end_of(self, index: int) -> Path:
        """The checkpoint that a phase ends with; the directory is there when the phase has
        ended.
        """
        return self.checkpoint(index, self.plan.steps(index).steps)

    def model_of(self, index: int) -> Path:
        """The model that a phase writes, or its changes of one, if it writes either."""
        return self.phase_directory(index) / (
            DELTA if self.plan.phases[index].save == "delta" else MODEL
        )

    def saved(self, index: int) -> list[Path]:
        """The checkpoints of a phase, the oldest first."""
        return checkpoints(self.phase_directory(index))

    def is_begun(self, index: int) -> bool:
        """Whether a phase has left anything from which the run goes on."""
        model = self.model_of(index)
        return bool(self.saved(index)) or model.is_symlink() or model.exists()

    def is_done(self, index: int, *, alone: bool = False) -> bool:
        """Whether a phase has ended, with all that the next one needs; `alone`: whatever is
        there of later ones.
        """
        if not alone and any(
            self.is_begun(later) for later in range(index + 1, len(self.plan.phases))
        ):
            return True  # a phase begins when the one before has ended
        if not self.leaves_model(index):
            return self._has_ended(index)
        # It is written when the phase has ended.
        return self.has_model(index) and (
            self._has_ended(index) or not self.carries_moments(index + 1)
        )

    def has_model(self, index: int) -> bool:
        """Whether the model that a phase leaves is there; `AdapterError` if it has changed since
        it was written.
        """
        model = self.model_of(index)
        name = self.plan.phases[index].name
        if model.is_symlink() and not model.is_dir():
            what = f"the model that phase {name} wrote is missing"
            how = "restore it, or begin again in another output_dir"
            raise ConfigError(what, where=f"{model} -> {model.readlink()}", how=how)
        if not model.is_dir():
            return False
        if model.is_symlink() and not (model / MANIFEST).is_file():
            return True
        try:
            check_manifest(model)
        except AdapterError as error:
            how = "restore it from a good copy, or begin again in another output_dir"
            if (end := self.end_of(index)).is_dir():
                how = (
                    f"delete {model}, and resume: LEMA writes it again from {end.name}, bit for bit"
                )
            what = f"the model that phase {name} left is damaged: {error.what}"
            raise AdapterError(what, where=error.where, how=how) from error
        return True

    def _has_ended(self, index: int) -> bool:
        """Whether the last step of a phase was taken, and nothing is left that comes after it."""
        return self.end_of(index).is_dir() and not read_state(self.end_of(index))["extra"].get(
            "left"
        )

    def check_new(self) -> None:
        """Refuse, with `ConfigError`, a directory in which a phase has been begun."""
        for index in range(len(self.plan.phases)):
            if self.is_begun(index):
                what = f"phase {self.plan.phases[index].name} has already begun there"
                raise ConfigError(
                    what,
                    where=str(self.phase_directory(index)),
                    how="resume, or choose another output_dir",
                )

    def has_own_base(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, rather than in the midst of the one
        before.
        """
        if index == 0:
            return True
        before = self.plan.phases[index - 1]
        phase = self.plan.phases[index]
        if phase.merge or (before.trains == "lora") != (phase.trains == "lora"):
            return True
        selected = [
            (neighbor.trains, neighbor.trainable, neighbor.layers) for neighbor in (before, phase)
        ]
        return phase.trains != "lora" and (phase.optimizer == "reset" or selected[0] != selected[1])

    def carries_moments(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, and yet with the optimizer of the one
        before.
        """
        phases = self.plan.phases
        if not 0 < index < len(phases) or phases[index].trains == "lora":
            return False
        return self.has_own_base(index) and phases[index].optimizer == "carry"

    def leaves_model(self, index: int) -> bool:
        """Whether a phase ends with a model: weights do at the last, and before a phase that
        begins with them.
        """
        if index == len(self.plan.phases) - 1:
            return self.plan.phases[index].trains != "lora"
        return self.has_own_base(index + 1)

    def based(self, index: int) -> int:
        """How many phases are under the base of a phase."""
        while not self.has_own_base(index):
            index -= 1
        return index

    def cut_record(self, index: int = 0, done: int = -1, size: int | None = None) -> None:
        """Drop the lines of metrics that come after so many steps of a phase (-1: all of the
        phase) or `size` bytes.
        """

        def keep(row: Mapping[str, Any]) -> bool:
            stage = row.get("stage", index + 1)  # a plain run's has none
            return bool(stage < index or (stage == index and row.get("step_in_phase", 0) <= done))

        cut_metrics(self.directory / METRICS_NAME, keep, size)

    def note(
        self,
        index: int,
        step: int,
        best: Mapping[str, Any] | None,
        keep: int | None,
        sound: int | None = None,
    ) -> None:
        """Say which checkpoints are the latest and the `best`, and forget all but the newest
        `keep`, that one, and that of the `sound` step."""
        self.note_latest(index, step)
        self.note_best(index, best)
        self.forget_old(
            index, step, keep, () if sound is None else (self.checkpoint(index, sound),)
        )

    def note_latest(self, index: int, step: int) -> None:
        """Say which checkpoint is the run's last, or raise `DiskError`."""
        steps = self.plan.boundaries()[index].first_step + step
        name = self.checkpoint(index, step).relative_to(self.directory).as_posix()
        note = {
            "phase": self.plan.phases[index].name,
            "checkpoint": name,
            "step": steps,
            "step_in_phase": step,
        }
        _write(self.directory / LATEST, note)

    def note_best(self, index: int, best: Mapping[str, Any] | None) -> None:
        """Note which checkpoint of a phase is `best` (`step`, `eval_loss`, `only`), and delete
        the one before.
        """
        name = f"checkpoint-{(best or {}).get('step')}"
        before = self.best(index)
        if best is None or (before is not None and before["checkpoint"] == name):
            return
        # First, because after a kill nothing would know of a checkpoint that is noted nowhere; this
        # note is made again.
        if (
            before is not None
            and before["only"]
            and (old := self.phase_directory(index) / str(before["checkpoint"])).is_dir()
        ):
            delete_checkpoint(old, "a checkpoint that is no longer the best")
        _write(
            self.phase_directory(index) / BEST,
            {"checkpoint": name, **{key: best[key] for key in ("eval_loss", "only")}},
        )

    def best(self, index: int) -> dict[str, Any] | None:
        """What `note_best` has written of a phase, None where it has nothing; or `AdapterError`."""
        file = self.phase_directory(index) / BEST
        if not file.is_file():
            return None
        try:
            note = json.loads(read_regular(file, inside=True))
            return {key: note[key] for key in ("checkpoint", "eval_loss", "only")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            how = "delete it; the next best evaluation writes it again"
            raise AdapterError(
                f"this does not name a checkpoint: {error!r}", where=str(file), how=how
            ) from error

    def forget_old(
        self, index: int, step: int, keep: int | None, sound: Sequence[Path] = ()
    ) -> None:
        """Delete checkpoints of a phase up to `step`, but for the newest `keep`, the best, and
        those that are `sound`; or raise `DiskError`."""
        best = self.best(index)
        spared = () if best is None else (self.phase_directory(index) / str(best["checkpoint"]),)
        forget_old_checkpoints(
            self.phase_directory(index), self.checkpoint(index, step), keep, [*spared, *sound]
        )


def _write(file: Path, note: Mapping[str, Any]) -> None:
    replace_file(file, (json.dumps(note, indent=2) + "\n").encode())


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    index: int  # of the phase it begins in
    checkpoint: Path | None = None  # what the phase goes on from; None: it begins
    # what earlier phases have left, by their index
    models: Mapping[int, Path] = field(default_factory=dict)
    here: bool = False  # the checkpoint is the run's own
    ended: bool = False  # the phase has ended with that checkpoint, and its results are there
    # an earlier phase of the run whose model is written again first; None: none is
    rebuilt: int | None = None


def find_start(path: str | Path, paths: PhasePaths) -> Start:
    """Find out where in a plan a path is: a checkpoint of a phase, or a model with which the first
    adapters begin; else `ConfigError`, of another plan and a model that is gone, too, or
    `AdapterError`."""
    directory = Path(path).absolute()
    if (directory / STATE).is_file():
        return _from_checkpoint(directory, paths)
    if (directory / "config.json").is_file():
        return _from_model(directory, paths)
    how = "name a directory with state.json (a checkpoint), or with config.json (a model)"
    if directory.is_dir() and (inside := sorted(directory.glob("checkpoint-*"))):
        how = f"name one of the checkpoints in it, such as {inside[-1].name}"
    what = "a run starts from a checkpoint of phases or a model's directory, and this is neither"
    raise ConfigError(what, where=str(directory), how=how)


def begin_at(start: Start, paths: PhasePaths) -> None:
    """Put into the run's directory what its first phase stands on, or raise `DiskError`."""
    for index, model in start.models.items():
        link = paths.model_of(index)
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():  # of a beginning that came to nothing
                link.unlink()
            _link(model, link)
        except OSError as error:
            raise DiskError(
                f"the model cannot be linked: {error.strerror}", where=f"{link} -> {model}"
            ) from error


def _link(model: Path, link: Path) -> None:
    """Have a model's directory be found under another name, too. Windows wants a privilege for
    links, and some file systems have none: there the directory is a new one, with the same files,
    or copies of them, and a manifest, as every directory of a model has that is no link."""
    with suppress(OSError):
        link.symlink_to(model, target_is_directory=True)
        return
    if link.exists():
        if _sizes(link) == _sizes(model):  # of a beginning that came to nothing
            return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(link))
    with appearing(link) as part:
        shutil.copytree(model, part, copy_function=_same_file, dirs_exist_ok=True)
        if not (part / MANIFEST).is_file():
            write_manifest(part)


def _sizes(directory: Path) -> dict[Path, int]:
    files = (
        path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST
    )
    return {path.relative_to(directory): path.stat().st_size for path in files}


def _same_file(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(Path(source).resolve())
    except OSError:
        shutil.copyfile(source, target)


def _from_model(model: Path, paths: PhasePaths) -> Start:
    index = next(
        (number for number, phase in enumerate(paths.plan.phases) if phase.trains == "lora"), None
    )
    if index:
        return Start(index, None, {index - 1: model})
    what = "this is a model, and the first phase of the plan would start from it"
    how = "set model_name_or_path to it instead"
    if index is None:
        what = "this is a model, but no phase of the plan trains adapters"
        how = "choose a checkpoint, or set model_name_or_path to the model"
    raise ConfigError(what, where=str(model), how=how)


def _from_checkpoint(checkpoint: Path, paths: PhasePaths) -> Start:
    about = check_sound(checkpoint)["extra"]
    plan = paths.plan
    if not {"plan", "phase", "step"} <= about.keys():
        what = "this checkpoint belongs to a run without phases"
        how = (
            "choose a checkpoint of a run of phases; merge an adapter with `lema merge` and "
            "use the model"
        )
        raise ConfigError(what, where=str(checkpoint), how=how)
    names = [phase.name for phase in plan.phases]
    if about["phase"] not in names:
        what = f"this is a checkpoint of phase {about['phase']}, but the plan has no such phase"
        how = (
            f"its phases are {', '.join(str(name) for name in names)}; use the plan with which "
            "the run began"
        )
        raise ConfigError(what, where=str(checkpoint), how=how)
    index = names.index(about["phase"])
    plan.check_same(about["plan"], str(checkpoint), index + 1)
    if not 0 <= about["step"] <= plan.steps(index).steps:
        what = (
            f"the checkpoint says that {about['step']} steps were taken, of "
            f"{plan.steps(index).steps}"
        )
        raise AdapterError(what, where=str(checkpoint / STATE), how="name another checkpoint")
    models = {}
    if under := paths.based(index):
        tried = [checkpoint.parent.parent / str(names[under - 1]) / MODEL]
        tried += [] if about.get("base") is None else [Path(about["base"])]
        if (
            model := next(
                (candidate for candidate in tried if (candidate / "config.json").is_file()), None
            )
        ) is None:
            what = (
                f"the model that phase {names[under - 1]} wrote, which this checkpoint needs, "
                "is missing"
            )
            raise ConfigError(
                what, where=" or ".join(map(str, tried)), how="copy it to the first of these places"
            )
        models[under - 1] = model.absolute()
    model_directory = checkpoint.parent / MODEL
    ended = about["step"] == plan.steps(index).steps
    if (
        ended
        and paths.leaves_model(index)
        and not paths.carries_moments(index + 1)
        and model_directory.is_dir()
    ):
        models[index] = model_directory.absolute()
    return Start(index, checkpoint, models)


def go_on(
    replicas: Replicas, paths: PhasePaths, config: LemaConfig, report: Reporter
) -> Start | None:
    """Return where a run goes on that is in its directory, all processes alike; cut the metrics
    of what comes after.
    """
    report = report if replicas.first else lambda _: None
    point = first_alone(replicas, lambda: find_point(paths, report))
    where: tuple[Any, ...] = () if point is None else (point.index,)
    if point is None:
        check_unused(config)
        report(f"there is no checkpoint in {paths.directory}: the run starts from the beginning")
    elif point.checkpoint is not None:
        about = read_state(point.checkpoint)["extra"]
        name = paths.plan.phases[point.index].name
        where = (point.index, done := int(about["step"]), about.get("record"))
        report(
            f"resuming from {point.checkpoint} (step {done} of "
            f"{paths.plan.steps(point.index).steps} of {name})"
        )
    first_alone(replicas, lambda: paths.cut_record(*where))
    return point


def find_point(paths: PhasePaths, report: Reporter) -> Start | None:
    """Return where a run goes on; None: it has no checkpoint at all. What is passed over, or done
    again, is said. Raises `AdapterError` where nothing is sound that it could go on with;
    `ConfigError` where the plan is another."""
    faults: list[str] = []
    for index in reversed(range(len(paths.plan.phases))):
        if not (candidates := paths.saved(index)):
            continue
        name = paths.plan.phases[index].name
        try:
            checkpoint = newest_sound(candidates, report)
        except AdapterError as error:
            faults += [
                f"{name}/{line.removeprefix('  - ')}" for line in error.what.splitlines()[1:]
            ]
        else:
            return _at(paths, index, checkpoint, report)
        if index and _stands(paths, index):
            report_warning(f"phase {name} begins again: none of its checkpoints is valid", report)
            return _at(paths, index, None, report)
    if faults:
        what = f"no checkpoint of the run is valid:{listed(faults)}"
        how = "restore one from a good copy, or begin a new run in another output_dir"
        raise AdapterError(what, where=str(paths.directory), how=how)
    return None


def _at(paths: PhasePaths, index: int, checkpoint: Path | None, report: Reporter) -> Start:
    """Return the point at a checkpoint of a phase, or at its beginning, once what lies below it
    is seen to be there.
    """
    _check_plan(paths, index, checkpoint)
    ended = checkpoint == paths.end_of(index) and paths.is_done(index, alone=True)
    return Start(
        index, checkpoint, here=True, ended=ended, rebuilt=_to_rebuild(paths, index, report)
    )


def _check_plan(paths: PhasePaths, index: int, checkpoint: Path | None) -> None:
    """Refuse another plan than that of the checkpoint that is resumed, or of the end of the
    phase before.
    """
    if checkpoint is None:
        if index == 0 or not _is_sound(paths.end_of(index - 1)):
            return  # no file says which weights were trained
        checkpoint = paths.end_of(index - 1)
        index = index - 1
    about = read_state(checkpoint)["extra"]
    how = "begin a new run in another output_dir"
    if "plan" not in about:
        raise AdapterError(
            "this checkpoint does not belong to a run of phases", where=str(checkpoint), how=how
        )
    paths.plan.check_same(about["plan"], str(checkpoint), index + 1)


def _is_sound(checkpoint: Path) -> bool:
    # it is passed over, and that is said, where its own phase is looked at
    with suppress(AdapterError):
        return bool(check_sound(checkpoint))
    return False


def _stands(paths: PhasePaths, index: int) -> bool:
    if paths.has_own_base(index) and not paths.has_model(index - 1):
        return False
    needs_end = paths.carries_moments(index) or not paths.has_own_base(index)
    return not needs_end or _is_sound(paths.end_of(index - 1))


def _to_rebuild(paths: PhasePaths, index: int, report: Reporter) -> int | None:
    """Return the phase whose model this one builds on, if it is missing and can be written
    again; else None.
    """
    below = paths.based(index) - 1
    if below < 0 or paths.has_model(below):
        return None
    end = paths.end_of(below)
    name = paths.plan.phases[below].name
    try:
        check_sound(end)
    except AdapterError as error:
        what = (
            f"the model that phase {name} wrote is missing and cannot be written again: "
            f"{error.what}"
        )
        how = "copy the model back, or begin again in another output_dir"
        raise AdapterError(
            what, where=f"{paths.model_of(below)}, from {error.where}", how=how
        ) from error
    report_warning(
        f"the model that phase {name} wrote is missing: LEMA writes it again from {end}", report
    )
    return below
