"""The manifest of a directory: the size and the SHA-256 of every file in it, written last.

`manifest.json` makes a directory whole: one without it was never finished, and a file that differs
from it is damaged. safetensors itself has no checksum, so a flipped bit would load without an
error.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lema.errors import AdapterError
from lema.storage.regular import open_regular, read_regular

__all__ = ["MANIFEST", "check_manifest", "write_manifest"]

MANIFEST = "manifest.json"
ALGORITHM = "sha256"
FILES = "files"
TENSORS = {".safetensors", ".bin"}  # files that are read from anywhere, so none may be unlisted
ANOTHER = "choose another checkpoint, or restore this one from a good copy"


def write_manifest(directory: Path) -> None:
    """Write `manifest.json` for the files in a directory, and flush it to disk; call it when they
    are all written. Files of folders below it are named by their paths. What cannot be read, or
    written, is an `OSError`."""
    facts = {name: _facts(directory / name) for name in _names(directory)}
    text = _text({"algorithm": ALGORITHM, FILES: facts})
    with (directory / MANIFEST).open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_manifest(directory: Path, spared: Collection[str] = ()) -> None:
    """Read every file of a directory back, and compare it with what its manifest says. Files that
    the manifest does not name are let be, such as notes of the user's; those with tensors are not.
    Those named in `spared` may be missing or damaged. `AdapterError`: no sound manifest, or a file
    is missing, damaged or too many; names it."""
    recorded = _read(directory)
    for name, facts in recorded.items():
        if name in spared:
            continue
        path = directory / name
        try:
            size = path.stat().st_size if path.is_file() else None
            actual = _facts(path) if size == facts["size"] else {}
        except OSError as error:
            raise _damaged(f"a file cannot be read: {error.strerror}", path) from error
        if size is None:
            raise _damaged("a file is missing", path)
        if size != facts["size"]:
            raise _damaged(f"a file has {size:,} bytes, and {facts['size']:,} were written", path)
        if actual != facts:
            raise _damaged("a file has changed: its SHA-256 differs", path)
    for name in _names(directory):
        if name not in recorded and Path(name).suffix in TENSORS:
            raise _damaged(
                "there is a file with tensors that does not belong to the checkpoint",
                directory / name,
            )


def _read(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the size and the hash of each file, as the manifest says."""
    file = directory / MANIFEST
    try:
        there = read_regular(file)
        written = json.loads(there)
    except FileNotFoundError as error:
        raise _damaged(
            f"there is no {MANIFEST}: it is unfinished, or from an earlier version", file
        ) from error
    except OSError as error:
        raise _damaged(f"the manifest cannot be read: {error.strerror}", file) from error
    except ValueError as error:
        raise _damaged(f"the manifest is damaged: {error}", file) from error
    files = written.get(FILES) if isinstance(written, dict) else None
    if not isinstance(files, dict) or not files or written.keys() != {"algorithm", FILES}:
        raise _damaged(f"the manifest is damaged: it names no {FILES}", file)
    if written["algorithm"] != ALGORITHM:
        raise _damaged(f"the manifest's hashes are {written['algorithm']!r}, not {ALGORITHM}", file)
    for name, facts in files.items():
        inside = "\0" not in name and not {"", ".", ".."} & set(
            name.split("/")
        )  # as `write_manifest` writes it
        sound = inside and isinstance(facts, dict) and facts.keys() == {"size", ALGORITHM}
        if not sound or type(facts["size"]) is not int or not isinstance(facts[ALGORITHM], str):
            raise _damaged(f"the manifest is damaged at {name!r}", file)
    if _text(written).encode() != there:  # a last byte may be missing that JSON does not miss
        raise _damaged("the manifest has changed since it was written", file)
    return files


def _text(written: object) -> str:
    return json.dumps(written, indent=1) + "\n"


def _names(directory: Path) -> list[str]:
    """Return the files below a directory, but for the manifest itself, by their paths from it."""
    paths = (
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    return sorted(name for name in paths if name != MANIFEST)


def _facts(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, ALGORITHM)
        return {"size": file.tell(), ALGORITHM: digest.hexdigest()}


def _damaged(what: str, path: Path) -> AdapterError:
    return AdapterError(what, where=str(path), how=ANOTHER)
