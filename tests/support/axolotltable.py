"""Prints what becomes of a directory of axolotl's files: imported, or refused with the reasons.

PYTHONPATH=tests/support python tests/support/axolotltable.py axolotl/examples
"""

import sys
from collections import Counter
from pathlib import Path

from lema.config.yaml import read_yaml
from lema.errors import LemaError
from lema_tools.importing.command import translated

__all__ = ["outcome"]


def outcome(file: Path) -> tuple[str, list[str]]:
    """Return `same`, `differs` (exit code 3) or `error`, and the keys or the error for it."""
    try:
        _, translation = translated([str(file)], tool="axolotl")
    except LemaError as error:
        return "error", [" ".join(str(error).split())]
    keys = [note.key for note in translation.changes]
    return ("differs" if keys else "same"), keys


def main(directory: Path) -> None:
    """Print a line a file, then how many files have each outcome and each key."""
    outcomes = Counter[str]()
    reasons = Counter[str]()
    for file in sorted(directory.rglob("*.y*ml")):
        if "base_model" not in read_yaml(file).values:
            continue
        word, keys = outcome(file)
        outcomes[word] += 1
        reasons.update(keys)
        sys.stdout.write(f"{file.relative_to(directory)}: {word}: {', '.join(keys)}\n")
    sys.stdout.write(f"{dict(outcomes)}\n")
    for key, count in reasons.most_common():
        sys.stdout.write(f"{count:5} {key}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
