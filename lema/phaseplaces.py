"""Where the phases of a run lie on disk, which of them have ended, and the two notes that name a checkpoint.

`output_dir/NAME/checkpoint-<step>` holds a phase's steps, `output_dir/NAME/model` what it leaves to the next one.
`output_dir/latest.json` names the last checkpoint of the run, `output_dir/NAME/best.json` that of a phase with the
lowest validation loss. The notes are for people and programs; a run that goes on looks for the checkpoints themselves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema.checkpoint import checkpoints, forget_old_checkpoints, read_state
from lema.errors import AdapterError, ConfigError, DiskError
from lema.phaseplan import Phase, PhasePlan
from lema.rewrite import replace_file

__all__ = ["BEST", "LATEST", "MODEL", "Places"]

BEST, LATEST, MODEL, DELTA = "best.json", "latest.json", "model", "delta"


@dataclass(frozen=True)
class Places:
    """Where a run's phases are.

    Attributes:
        directory: where the run writes.
        plan: its phases.
    """

    directory: Path
    plan: PhasePlan

    def place(self, index: int) -> Path:
        """Where a phase writes."""
        return self.directory / str(self.plan.phases[index].name)

    def checkpoint(self, index: int, step: int) -> Path:
        """The checkpoint of a phase after so many of its steps."""
        return self.place(index) / f"checkpoint-{step}"

    def end_of(self, index: int) -> Path:
        """The checkpoint that a phase ends with; the directory is there when the phase has ended."""
        return self.checkpoint(index, self.plan.steps(index).steps)

    def model_of(self, index: int) -> Path:
        """The model that a phase leaves, or what it has changed of one, where it leaves either."""
        return self.place(index) / (DELTA if self.plan.phases[index].save == "delta" else MODEL)

    def saved(self, index: int) -> list[Path]:
        """The checkpoints of a phase, the oldest first."""
        return checkpoints(self.place(index))

    def is_begun(self, index: int) -> bool:
        """Whether a phase has left anything from which the run goes on."""
        model = self.model_of(index)
        return bool(self.saved(index)) or model.is_symlink() or model.exists()

    def is_done(self, index: int) -> bool:
        """Whether a phase has ended, with all that the next one needs of it."""
        if any(self.is_begun(later) for later in range(index + 1, len(self.plan.phases))):
            return True  # a phase begins when the one before has ended
        if not self.leaves_model(index):
            return self.end_of(index).is_dir()
        model = self.model_of(index)
        if model.is_symlink() and not model.is_dir():
            raise ConfigError(
                f"the model that phase {self.plan.phases[index].name} was said to have left is gone",
                where=f"{model} -> {model.readlink()}",
                how="put it back, or begin again in another output_dir",
            )
        # It is written when the phase has ended.
        return model.is_dir() and (self.end_of(index).is_dir() or not self.carries_moments(index + 1))

    def check(self, *, resume: bool) -> None:
        """Refuse a directory with the phases of another run, or of another plan.

        Raises:
            ConfigError: there are some; AdapterError: a checkpoint is damaged.
        """
        begun = [index for index in range(len(self.plan.phases)) if self.is_begun(index)]
        if begun and not resume:
            raise ConfigError(
                f"phase {self.plan.phases[begun[0]].name} has been begun there",
                where=str(self.place(begun[0])),
                how="resume, or choose another output_dir",
            )
        for index in begun:
            if found := self.saved(index):
                about = read_state(found[-1])["extra"]
                self.plan.check_same(about["plan"], str(found[-1]), index + 1)

    def begins_anew(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, rather than in the midst of the one before."""
        if index == 0:
            return True
        before, phase = self.plan.phases[index - 1], self.plan.phases[index]
        if phase.merge or (before.trains == "lora") != (phase.trains == "lora"):
            return True
        return phase.trains != "lora" and (phase.optimizer == "reset" or _selection(before) != _selection(phase))

    def carries_moments(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, and yet with the optimizer of the one before."""
        phases = self.plan.phases
        if not 0 < index < len(phases) or phases[index].trains == "lora":
            return False
        return self.begins_anew(index) and phases[index].optimizer == "carry"

    def leaves_model(self, index: int) -> bool:
        """Whether a phase ends with a model: weights do at the last, and before a phase that begins with them."""
        if index == len(self.plan.phases) - 1:
            return self.plan.phases[index].trains != "lora"
        return self.begins_anew(index + 1)

    def based(self, index: int) -> int:
        """How many phases are under the base of a phase."""
        while not self.begins_anew(index):
            index -= 1
        return index

    def note_latest(self, index: int, step: int) -> None:
        """Say which checkpoint is the run's last.

        Raises:
            DiskError: the note could not be written.
        """
        steps = self.plan.boundaries()[index].first_step + step
        name = self.checkpoint(index, step).relative_to(self.directory).as_posix()
        note = {"phase": self.plan.phases[index].name, "checkpoint": name, "step": steps, "step_in_phase": step}
        _write(self.directory / LATEST, note)

    def note_best(self, index: int, best: Mapping[str, Any] | None) -> None:
        """Say which checkpoint of a phase has the lowest validation loss, and forget the one that was kept for that.

        Args:
            index: of the phase.
            best: its `step` and `eval_loss`, and whether it was written `only` for this; None: there is none yet.

        Raises:
            DiskError: the note could not be written, or the checkpoint before not be deleted.
        """
        if best is None:
            return
        name = f"checkpoint-{best['step']}"
        before = self.best(index)
        if before is not None and before["checkpoint"] == name:
            return
        _write(self.place(index) / BEST, {"checkpoint": name, **{key: best[key] for key in ("eval_loss", "only")}})
        if before is not None and before["only"] and (old := self.place(index) / str(before["checkpoint"])).is_dir():
            _delete(old)

    def best(self, index: int) -> dict[str, Any] | None:
        """What `note_best` has written of a phase; None: nothing.

        Raises:
            AdapterError: it cannot be read.
        """
        file = self.place(index) / BEST
        if not file.is_file():
            return None
        try:
            note = json.loads(file.read_text(encoding="utf-8"))
            return {key: note[key] for key in ("checkpoint", "eval_loss", "only")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            how = "delete it: the next evaluation that is best writes it again"
            raise AdapterError(f"this does not name a checkpoint: {error!r}", where=str(file), how=how) from error

    def forget_old(self, index: int, step: int, keep: int | None) -> None:
        """Delete checkpoints of a phase up to `step`, but for the newest `keep` and the best.

        Raises:
            DiskError: one could not be deleted.
        """
        best = self.best(index)
        spared = () if best is None else (self.place(index) / str(best["checkpoint"]),)
        forget_old_checkpoints(self.place(index), self.checkpoint(index, step), keep, spared)


def _selection(phase: Phase) -> tuple[Any, ...]:
    return phase.trains, phase.trainable, phase.layers


def _write(file: Path, note: Mapping[str, Any]) -> None:
    replace_file(file, (json.dumps(note, indent=2) + "\n").encode())


def _delete(checkpoint: Path) -> None:
    # Half a checkpoint must not bear the name of a whole one.
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    try:
        checkpoint.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise DiskError(
            f"a checkpoint that is not the best any more could not be deleted: {error.strerror}", where=str(checkpoint)
        ) from error
