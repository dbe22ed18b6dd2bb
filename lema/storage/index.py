"""The Global Binary Index, the table of where every tensor of a model lies on disk: file, offset,
dtype, shape.

A model is one safetensors file, or several under the hub's `model.safetensors.index.json`. An index
from a stranger may name only files of its own directory; the hub cache, whose snapshots are links
into blobs, is known and allowed.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lema.errors import WeightsError
from lema.storage.header import MAX_HEADER_BYTES, TensorRecord, damaged, read_header, read_json
from lema.storage.regular import check_inside

__all__ = ["INDEX_NAME", "ORIGIN_MARK", "PREPARED_MARK", "SINGLE_NAME", "GlobalBinaryIndex"]
__all__ += ["SOURCES_MARK", "file_stamps", "origin_of"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# metadata key: what a prepared file was made of, as `origin_of` writes it
ORIGIN_MARK = "lema.origin"
# metadata key: the fingerprints of what a prepared file was made of, with spaces between
SOURCES_MARK = "lema.sources"
PREPARED_MARK = "lema.in_memory_names"  # metadata key of files that were prepared
# its value; no JSON, because transformers takes metadata that is JSON for torchao's own
ASSEMBLED = "assembled"
# Its values in files of earlier versions: every name is one in memory, and a second conversion
# could corrupt it.
OLD_MARKS = ("true", "yes")
# of `config.json`: a file of weights, or an index, with another name
WEIGHTS_KEY = "transformers_weights"
MAX_CONFIG_BYTES = 10_000_000
MAX_NAME = 200  # characters; file systems have 255 bytes


class GlobalBinaryIndex(dict[str, TensorRecord]):
    """Every tensor of a model, by name, over all its files; the headers are read and checked, the
    tensors are not. `path` is a model directory, one `.safetensors` file, or a
    `.safetensors.index.json`. The names come in the order of the files' names and, within a file,
    of the bytes. `described` is the `metadata` of an index; None: there is no index.
    `WeightsError`: a file is missing, damaged, not safetensors, or lies outside the directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        entry = _entry(self.path)
        self.root = entry.parent  # the directory the files lie in
        weight_map: dict[str, str] = {}
        self.described: dict[str, Any] | None = None
        if entry.name.endswith(".json"):
            weight_map, self.described = _read_weight_map(entry)
        self.files = tuple(entry.parent / name for name in sorted(set(weight_map.values()))) or (
            entry,
        )
        self.stamps = file_stamps(self.files)  # before the headers are read
        # file -> the strings its writer left in the header
        self.metadata: dict[Path, dict[str, str]] = {}
        for file in self.files:
            self.metadata[file], records = read_header(file)
            for name, record in records.items():
                if (previous := self.get(name)) is not None:
                    how = "delete the shard left over from another download or save"
                    raise WeightsError(
                        f"tensor {name!r} is stored twice",
                        where=f"{previous.file} and {file}",
                        how=how,
                    )
                self[name] = record
        broken = [
            f"{name} (in {file})"
            for name, file in weight_map.items()
            if name not in self or self[name].file.name != file
        ]
        if broken:
            what = f"{len(broken)} tensors are not in the file the index names: {', '.join(broken)}"
            how = "download the model again; index and shards come from different saves"
            raise WeightsError(what, where=str(entry), how=how)

    def __repr__(self) -> str:
        return (
            f"GlobalBinaryIndex({str(self.path)!r}: {len(self)} tensors, {len(self.files)} "
            f"files, {self.nbytes} B)"
        )

    @property
    def in_memory_names(self) -> bool:
        """Whether an earlier version prepared the files, with all names and shapes as
        `transformers` has in memory.
        """
        return all(metadata.get(PREPARED_MARK) in OLD_MARKS for metadata in self.metadata.values())

    @property
    def assembled(self) -> bool:
        """Whether the files were prepared such that tensors which are published in pieces are
        put together.
        """
        return all(
            metadata.get(PREPARED_MARK) in (ASSEMBLED, *OLD_MARKS)
            for metadata in self.metadata.values()
        )

    @property
    def origin(self) -> tuple[str, str | None] | None:
        """The model that the files were prepared from: a hub id and its commit, or a path; None:
        they do not say.
        """
        if (text := self.metadata[self.files[0]].get(ORIGIN_MARK)) is None:
            return None
        name, _, commit = ("", "", text) if Path(text).is_absolute() else text.rpartition("@")
        return (name, commit) if name else (text, None)

    @property
    def sources(self) -> tuple[str, ...]:
        """The fingerprints of the models that the files were prepared from, one after the other;
        none: they do not say. They are not those of the files, because a prepared model has other
        names, shapes or types."""
        return tuple(self.metadata[self.files[0]].get(SOURCES_MARK, "").split())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(record.nbytes for record in self.values())


def file_stamps(files: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """Return what the system says of each file, which changes when it is written or exchanged:
    device, inode, size, and the times of its contents and of what is said of it, in nanoseconds;
    nothing of one that is not there. The second time changes with its names and rights, too, and
    nobody can set it back."""
    stamps: dict[Path, tuple[int, ...]] = {}
    for file in files:
        with suppress(OSError):
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            stamps[file] = status.st_dev, status.st_ino, status.st_size, *times
    return stamps


def origin_of(index: GlobalBinaryIndex) -> str:
    """Return what names a model to others: what it was prepared from; else its hub id with its
    commit, where it lies in the hub's cache, and its path elsewhere."""
    if (origin := index.origin) is not None:
        return "@".join(filter(None, origin))
    root = index.root.absolute()
    repository = root.parent.parent.name
    if root.parent.name == "snapshots" and repository.startswith("models--"):
        return f"{repository.removeprefix('models--').replace('--', '/')}@{root.name}"
    return str(root)


def _read_weight_map(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return which file of the directory holds each tensor, and what the index says of the model
    otherwise.
    """
    content = read_json(index, MAX_HEADER_BYTES, "an index")
    weight_map = content.get("weight_map")
    described = content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "it has no weight_map from tensor names to file names")
    for name, file in weight_map.items():
        named = isinstance(file, str) and file.endswith(".safetensors") and len(file) <= MAX_NAME
        if not named or {"/", "\\", "\0"} & set(file):
            what = (
                f"the weight_map sends tensor {name!r} to {file!r:.300}, which is not a "
                ".safetensors file next to it"
            )
            how = (
                "an index may only name files of its own directory; do not use this model "
                "unless you trust it"
            )
            raise WeightsError(what, where=f"{index}: weight_map[{name!r}]", how=how)
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not os.path.exists(index.parent / file)]:  # noqa: PTH110 - of any name
        what = f"{len(missing)} files of the model are missing: {', '.join(missing)}"
        raise WeightsError(
            what, where=str(index), how="download the model again; the copy is not complete"
        )
    for file in files:
        check_inside(index.parent / file)
    return weight_map, described if isinstance(described, dict) else {}


def _named_by_config(directory: Path) -> Path | None:
    """Return the file of weights, or the index, that a model's `config.json` names, as
    `transformers` reads it; None: it names none. `WeightsError`: it names what is no such file
    beside it."""
    config = directory / "config.json"
    named = (
        read_json(config, MAX_CONFIG_BYTES, "a config").get(WEIGHTS_KEY)
        if config.is_file()
        else None
    )
    if named is None:
        return None
    plain = isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
    if (
        not plain
        or len(named) > MAX_NAME
        or {"/", "\\", "\0"} & set(named)
        or not (directory / named).is_file()
    ):
        what = (
            f"config.json says that the weights are in {named!r:.300}, which is no safetensors "
            "file next to it"
        )
        raise WeightsError(
            what,
            where=f"{config}: {WEIGHTS_KEY}",
            how="name a file of the directory, or remove the key",
        )
    entry = directory / str(named)
    check_inside(entry)
    return entry


def _entry(path: Path) -> Path:
    """The file to begin with: the single file, or the index of a sharded model."""
    if path.is_dir():
        if (entry := _named_by_config(path)) is not None:
            return entry
        files = sorted(path.glob("*.safetensors"))
        weights = [file for file in files if not file.name.startswith("adapter_")]
        # The names in the order transformers looks for them.
        named = [path / name for name in (SINGLE_NAME, INDEX_NAME) if os.path.lexists(path / name)]
        if named or len(weights) == 1:
            check_inside(entry := [*named, *weights][0])
            return entry
        what = "only adapter weights" if files else "no .safetensors file"
        what = f"there is {what} in {path}"
        how = "give the directory of the base model"
        if weights:
            what = (
                f"{len(weights)} .safetensors files and no index: "
                f"{', '.join(file.name for file in weights)}"
            )
            how = f"add {INDEX_NAME}, or name the one file that holds the model"
        elif binaries := sorted(
            file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)
        ):
            what = (
                f"the weights are pickled ({', '.join(binaries)}): such files can run code and "
                "cannot be streamed"
            )
            how = (
                "if you trust it, convert it: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
            )
        raise WeightsError(what, where=str(path), how=how)
    if path.name.endswith((".safetensors", ".json")) and path.exists():
        return path
    if path.exists():
        what = f"{path.name} is not a safetensors file"
        raise WeightsError(
            what, where=str(path), how="give a model directory or a .safetensors file"
        )
    raise WeightsError(f"{path} does not exist", where=str(path), how="check the path of the model")
