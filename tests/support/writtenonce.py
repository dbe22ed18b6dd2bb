"""Directories of published models, each of which is written when it is first asked for."""

from collections.abc import Callable
from pathlib import Path

Directories = Callable[[str], Path]


def written_once(root: Path, publish: Callable[[str, Path], Path]) -> Directories:
    """Return what gives the directory below `root` of a model of a type, which `publish` writes."""

    def directory(model_type: str) -> Path:
        path = root / model_type
        return path if path.exists() else publish(model_type, path)

    return directory
