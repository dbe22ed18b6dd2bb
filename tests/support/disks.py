"""A disk that is full in some steps of a run."""

import errno
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback

from lema.train.checkpoint import format as checkpoint

__all__ = ["Disk"]

WRITE = checkpoint.save_file


class Disk(TrainerCallback):
    """A disk that is full from the beginning of some steps to that of the next; notes what
    callbacks are told.
    """

    def __init__(self, *full: int) -> None:
        self.full = full
        self.now = 0
        self.saved = list[int]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now = state.global_step + 1

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved.append(state.global_step)

    def free(self, place: Path) -> int:
        return 0 if self.now in self.full else 1 << 40

    def save_file(self, tensors: Any, file: Path, *rest: Any) -> None:
        """Write half of a file, and fail as safetensors does."""
        if self.now not in self.full:
            return WRITE(tensors, file, *rest)
        file.write_bytes(bytes(100))
        raise SafetensorError(f"I/O error: No space left on device (os error {errno.ENOSPC})")
