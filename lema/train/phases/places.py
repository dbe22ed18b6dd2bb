"""The directories of the phases of a run, which phases have ended, and the two notes that name a checkpoint.

`output_dir/NAME/checkpoint-<step>` holds a phase's steps, `output_dir/NAME/model` the model it leaves to the next one.
`output_dir/latest.json` names the last checkpoint of the run, `output_dir/NAME/best.json` that of a phase with the
lowest validation loss. The notes are for people and programs; a resumed run looks for the checkpoints themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lema.errors import AdapterError, ConfigError
from lema.storage.atomic import replace_file
from lema.storage.manifest import MANIFEST, check_manifest
from lema.train.checkpoint.format import checkpoints, delete_checkpoint, forget_old_checkpoints, read_state
from lema.train.phases.plan import PhasePlan

__all__ = ["BEST", "LATEST", "MODEL", "Places"]

BEST, LATEST, MODEL, DELTA = "best.json", "latest.json", "model", "delta"


@dataclass(frozen=True)
class Places:
    """Where a run's phases are."""

    directory: Path  # where the run writes
    plan: PhasePlan  # its phases

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

    def is_done(self, index: int, *, alone: bool = False) -> bool:
        """Whether a phase has ended, with all that the next one needs; `alone`: whatever is there of later ones."""
        if not alone and any(self.is_begun(later) for later in range(index + 1, len(self.plan.phases))):
            return True  # a phase begins when the one before has ended
        if not self.leaves_model(index):
            return self._has_ended(index)
        # It is written when the phase has ended.
        return self.has_model(index) and (self._has_ended(index) or not self.carries_moments(index + 1))

    def has_model(self, index: int) -> bool:
        """Whether the model that a phase leaves is there; `AdapterError` if it is not as it was written."""
        model, name = self.model_of(index), self.plan.phases[index].name
        if model.is_symlink() and not model.is_dir():
            what = f"the model that phase {name} was said to have left is gone"
            how = "put it back, or begin again in another output_dir"
            raise ConfigError(what, where=f"{model} -> {model.readlink()}", how=how)
        if not model.is_dir():
            return False
        if model.is_symlink() and not (model / MANIFEST).is_file():
            return True
        try:
            check_manifest(model)
        except AdapterError as error:
            how = "copy it back from where it is whole, or begin again in another output_dir"
            if (end := self.end_of(index)).is_dir():
                how = f"delete {model}, and resume: it is written again from {end.name}, bit for bit"
            what = f"the model that phase {name} left is damaged: {error.what}"
            raise AdapterError(what, where=error.where, how=how) from error
        return True

    def _has_ended(self, index: int) -> bool:
        """Whether the last step of a phase was taken, and nothing is left that comes after it."""
        return self.end_of(index).is_dir() and not read_state(self.end_of(index))["extra"].get("left")

    def check_new(self) -> None:
        """Refuse, with `ConfigError`, a directory in which a phase has been begun."""
        for index in range(len(self.plan.phases)):
            if self.is_begun(index):
                what = f"phase {self.plan.phases[index].name} has been begun there"
                raise ConfigError(what, where=str(self.place(index)), how="resume, or choose another output_dir")

    def begins_anew(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, rather than in the midst of the one before."""
        if index == 0:
            return True
        before, phase = self.plan.phases[index - 1], self.plan.phases[index]
        if phase.merge or (before.trains == "lora") != (phase.trains == "lora"):
            return True
        selected = [(one.trains, one.trainable, one.layers) for one in (before, phase)]
        return phase.trains != "lora" and (phase.optimizer == "reset" or selected[0] != selected[1])

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
        """Say which checkpoint is the run's last, or raise `DiskError`."""
        steps = self.plan.boundaries()[index].first_step + step
        name = self.checkpoint(index, step).relative_to(self.directory).as_posix()
        note = {"phase": self.plan.phases[index].name, "checkpoint": name, "step": steps, "step_in_phase": step}
        _write(self.directory / LATEST, note)

    def note_best(self, index: int, best: Mapping[str, Any] | None) -> None:
        """Note which checkpoint of a phase is `best` (`step`, `eval_loss`, `only`), and delete the one before."""
        name, before = f"checkpoint-{(best or {}).get('step')}", self.best(index)
        if best is None or (before is not None and before["checkpoint"] == name):
            return
        _write(self.place(index) / BEST, {"checkpoint": name, **{key: best[key] for key in ("eval_loss", "only")}})
        if before is not None and before["only"] and (old := self.place(index) / str(before["checkpoint"])).is_dir():
            delete_checkpoint(old, "a checkpoint that is not the best any more")

    def best(self, index: int) -> dict[str, Any] | None:
        """What `note_best` has written of a phase, None where it has nothing; or `AdapterError`."""
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
        """Delete checkpoints of a phase up to `step`, but for the newest `keep` and the best, or raise `DiskError`."""
        best = self.best(index)
        spared = () if best is None else (self.place(index) / str(best["checkpoint"]),)
        forget_old_checkpoints(self.place(index), self.checkpoint(index, step), keep, spared)


def _write(file: Path, note: Mapping[str, Any]) -> None:
    replace_file(file, (json.dumps(note, indent=2) + "\n").encode())
