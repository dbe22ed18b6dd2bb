"""A run's own directory: locked while it runs, and cleared of what killed runs have left in the midst of a save."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lema.commit import sweep
from lema.replicas import Replicas
from lema.replicate import first_alone
from lema.runlock import run_lock

__all__ = ["one_run"]

# What the save at a run's end, beside its checkpoints, is under until it is whole.
UNFINISHED = re.compile(r"\.adapter-\w+|\.(lema_config\.json|metrics\.jsonl|loss\.png)\.\d+\.part")


@contextmanager
def one_run(replicas: Replicas, output_dir: Path, below: Sequence[Path] = ()) -> Iterator[None]:
    """Have a run write alone to a directory, in a `with` block; of several processes the first has its lock.

    Args:
        replicas: the processes, each of which calls this.
        output_dir: where the run writes.
        below: further directories in it that hold checkpoints.

    Raises:
        ConfigError: another run writes there; in every process.
        DiskError: it cannot be written to; likewise.
    """
    with ExitStack() as stack:

        def enter() -> None:
            alone = stack.enter_context(run_lock(output_dir))
            for directory in (output_dir, *below):
                sweep(directory, alone=alone)
            if alone:
                _clear(output_dir)

        first_alone(replicas, enter)
        yield


def _clear(output_dir: Path) -> None:
    """Remove what a run that was killed while it saved its adapter has left in its directory."""
    for left in list(output_dir.iterdir()):
        if UNFINISHED.fullmatch(left.name):
            with suppress(OSError):  # what another user owns is not ours to touch
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()
