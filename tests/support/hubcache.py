"""The hub's cache as its library lays it out: blobs by hash, snapshots of links into them, refs
to commits.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

COMMIT = "1" * 40


def write_cache(
    cache: Path,
    files: Mapping[str, bytes],
    *,
    commit: str = COMMIT,
    ref: str = "main",
    name: str = "org/tiny",
) -> Path:
    """Lay out a model in `cache` under its name on the hub, and return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs" / ref).write_text(commit)
    return snapshot


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, by name."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
