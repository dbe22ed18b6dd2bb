"""The base of `quantize_base` (QLoRA): a model whose weights are quantised once, at the first
start, and kept for later ones.

A file holds each layer, and takes its name when it is complete, so that a start which was killed
leaves what it has done. The next start checks these files by their digests, and goes on behind
them. The directory appears when all is there, as one that `lema prepare --quantize` writes. It says
of which base it is: by the fingerprint of that, and by what its config says. Of several processes
that want it one converts, and the others wait.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lema.backend.host.files import flush
from lema.config import LemaConfig
from lema.config.types import dtype_name
from lema.config.units import human_bytes, human_duration
from lema.convert.basefolder import cache_directory, is_locked_here, locked
from lema.convert.conversion import Conversion, Progress, Section, opened_source
from lema.convert.conversionreport import ConversionReport
from lema.convert.tensors import copy_companions, write_config
from lema.errors import ConfigError, WeightsError
from lema.lora.baseconfig import of_numbers
from lema.model.files import ModelFiles
from lema.model.quantizable import QuantizedDirectory, kind_to_quantize
from lema.model.weight_names import checkpoint_dtype
from lema.storage import GlobalBinaryIndex
from lema.storage.atomic import appearing, discard, replace_file
from lema.storage.diskspace import check_free_bytes
from lema.storage.index import INDEX_NAME
from lema.storage.regular import check_separate, read_regular
from lema.storage.verify import base_fingerprint, model_config

__all__ = ["MARK", "with_quantized_base"]

MARK = "lema_quantized_base.json"
"""The file that says of which base a directory is, and which files of it are complete."""
VERSION = 1  # of what is written: another number converts again
FILE_NAME = "model-{:05}-of-{:05}.safetensors"
SAMPLE = 1 << 20  # weights whose quantisation is timed


def with_quantized_base(
    files: ModelFiles, config: LemaConfig, report: ConversionReport | None = None
) -> ModelFiles:
    """Return a model's files with the weights that `quantize_base` asks for, converted now if this
    was not done before; the same files where it asks for none.

    Args:
        files: the model as it is stored.
        config: the settings.
        report: is told what happens; None: it is written to the standard error.

    Raises:
        ConfigError: the model cannot be quantised so, or the folder is one that has other files.
        DiskFull: there is no room for the quantised weights.
        DiskError: they cannot be written.
    """
    if files.quantized is not None:
        return files
    kind = kind_to_quantize(config, files.config, files.directory)
    if kind is None:
        return files
    base = _Base.of(files, config, kind)
    target = cache_directory(config, files, kind, base.suffix)
    return files.with_weights(_converted(base, target, report or ConversionReport()))


@dataclass(frozen=True)
class _Base:
    """A model that is to be quantised, and to what."""

    files: ModelFiles
    kind: str
    dtype: torch.dtype  # what the weights expand to
    suffix: str  # of the directory's name: the type, if it is not that of the checkpoint
    nbytes: int  # of its weights
    identity: Mapping[str, Any]  # what decides every byte that is written

    @classmethod
    def of(cls, files: ModelFiles, config: LemaConfig, kind: str) -> "_Base":
        """Look at the headers of a model's files, and at some bytes of each tensor."""
        index = GlobalBinaryIndex(files.weights)
        dtype = checkpoint_dtype(files.config, index, config.dtype)
        is_own = dtype == checkpoint_dtype(files.config, index)
        about = of_numbers(model_config(index)) or {}
        about["architectures"] = files.config.architectures
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        identity = {
            "version": VERSION,
            "kind": kind,
            "dtype": dtype_name(dtype),
            "base": base_fingerprint(index),
            "config": digest,
        }
        suffix = "" if is_own else f"-{dtype_name(dtype)}"
        return cls(files, kind, dtype, suffix, index.nbytes, identity)


@dataclass
class _Record:
    """What is written in a directory: of which base it is, and each complete file."""

    identity: Mapping[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> "_Record | None":
        """Read what a directory says; None: it says nothing that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(read_regular(directory / MARK))
            return cls(dict(content["identity"]), dict(content["files"]))
        return None

    def write(self, directory: Path) -> None:
        """Write it, or raise `DiskError`."""
        content = {"identity": self.identity, "files": self.files}
        replace_file(directory / MARK, (json.dumps(content, indent=1) + "\n").encode())

    def is_whole(self, directory: Path) -> bool:
        """Whether every file is there in its size."""
        sizes = {name: about["bytes"] for name, about in self.files.items()}
        with suppress(OSError):
            return (directory / INDEX_NAME).is_file() and all(
                (directory / name).stat().st_size == size for name, size in sizes.items()
            )
        return False


def _converted(base: _Base, target: Path, report: ConversionReport) -> QuantizedDirectory:
    """Return the directory of a quantised base, and hold its lock so that nobody replaces it."""
    waits = False
    while True:
        lock = locked(target, shared=True)
        if lock is not None and _is_ready(base, target):
            return QuantizedDirectory(target, base.kind, base.nbytes, lock.close)
        if lock is not None:
            lock.close()  # because nobody has alone what another has as well
        if (lock := locked(target, shared=False)) is not None:
            with closing(lock):
                if not _is_ready(base, target):
                    _convert(base, target, report)
            continue
        if is_locked_here(target):
            what = "the base has changed, and this process still uses what was made of it before"
            raise ConfigError(what, where=str(target), how="close the model that uses it first")
        if not waits:
            report.line(f"waiting for another process, which converts or uses {target}")
            waits = True
        time.sleep(0.2)


def _is_ready(base: _Base, target: Path) -> bool:
    record = _Record.read(target)
    return record is not None and record.identity == dict(base.identity) and record.is_whole(target)


def _convert(base: _Base, target: Path, report: ConversionReport) -> None:
    part = target.with_name(f".{target.name}.converting")
    check_separate(target, [base.files.directory])
    if target.is_symlink() or target.exists():
        _clear(base, target, part, report)
    earlier = _Record.read(part)
    if part.exists() and (earlier is None or earlier.identity != dict(base.identity)):
        shutil.rmtree(part)
    opened = opened_source(base.files.weights, base.dtype, base.files.trusted)
    conversion = Conversion(opened, quantize=base.kind, assembled=True, measured=False)
    sections = {
        FILE_NAME.format(number, len(conversion.sections)): section
        for number, section in enumerate(conversion.sections, 1)
    }
    record = _Record(base.identity, _complete(part, _Record.read(part), sections))
    todo = {name: section for name, section in sections.items() if name not in record.files}
    nbytes = sum(section.nbytes for section in todo.values())
    how = "free some space, or set quantize_base_cache to a folder on another disk"
    check_free_bytes(target.parent, nbytes, f"the base in {base.kind}", how=how)
    if record.files:
        complete = f"{len(record.files)} of {len(sections)} files are complete and are kept"
        report.line(f"quantize_base: going on with {target}: {complete}")
    seconds = _seconds(conversion, nbytes)
    report.line(
        f"quantize_base: {base.kind}: converting {base.files.directory} "
        f"({human_bytes(base.nbytes)}) to {target}: "
        f"{human_bytes(nbytes)} to write, about {human_duration(seconds)}; "
        "later starts use what is there"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    part.mkdir(exist_ok=True)
    began = time.monotonic()
    with appearing(target, part), torch.no_grad(), report.bar(nbytes) as advance:
        record.write(part)
        done = 0
        for name, section in todo.items():
            file = part / name
            conversion.write(file, [section], _further(advance, done))
            record.files[name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
            record.write(part)
            done += section.nbytes
        _finish(base, part, conversion, sections)
    report.line(
        f"quantize_base: converted {len(todo)} files in {human_duration(time.monotonic() - began)}"
    )


def _further(advance: Callable[[int], None], before: int) -> Progress:
    """Return what tells of the bytes of one file, after those of the files before."""
    return lambda done, _: advance(before + done)


def _clear(base: _Base, target: Path, part: Path, report: ConversionReport) -> None:
    """Make room where another base, or a damaged one, is; what is none of a base stays, with
    `ConfigError`."""
    record = _Record.read(target)
    if record is None or target.is_symlink():
        what = "the folder for the quantised base has other files, which are not written over"
        how = "move it, or set quantize_base_cache to another folder"
        raise ConfigError(what, where=str(target), how=how)
    if record.identity == dict(base.identity):
        report.line(f"quantize_base: files of {target} are missing or damaged: making them again")
        shutil.rmtree(part, ignore_errors=True)
        target.rename(part)
        flush(target.parent)
        return
    report.line(
        f"quantize_base: the base has changed since {target} was made of it: converting it again"
    )
    discard(target)


def _complete(
    part: Path, record: _Record | None, sections: Mapping[str, Section]
) -> dict[str, dict[str, Any]]:
    """Return those of the sections that are in their files already, as their digests say."""
    complete: dict[str, dict[str, Any]] = {}
    for name, about in ({} if record is None else record.files).items():
        with suppress(OSError):
            if name in sections and _digest(part / name) == about["sha256"]:
                complete[name] = about
    return complete


def _digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seconds(conversion: Conversion, nbytes: int) -> float:
    """Return about how long it takes to write so many bytes, from how long a piece takes."""
    quantizer = conversion.quantizer
    assert quantizer is not None
    name = next(iter(quantizer.chosen))
    began = time.monotonic()
    weight = conversion.form.read(conversion.form.owner(name))
    read = (time.monotonic() - began) / weight.numel()
    sample = weight.flatten(0, -2)[: max(1, SAMPLE // weight.shape[-1])]
    quantizer.quantized(sample)  # because the first time imports and starts more than the second
    began = time.monotonic()
    written = sum(part.nbytes for part in quantizer.quantized(sample).values())
    written_seconds = (time.monotonic() - began) / sample.numel()
    return (read + written_seconds) * nbytes * sample.numel() / max(written, 1)


def _finish(
    base: _Base, part: Path, conversion: Conversion, sections: Mapping[str, Section]
) -> None:
    """Write what makes the files a model, as `lema prepare` does."""
    weight_map = {name: file for file, section in sections.items() for name, _, _ in section.specs}
    total = sum(section.nbytes for section in sections.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_file(part / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
    directory = base.files.directory
    copy_companions(directory, part, code=base.files.trusted)
    write_config(directory / "config.json", part, conversion.changes)
    try:
        GlobalBinaryIndex(part)
    except WeightsError as error:
        what = f"the disk returns other bytes than were written: {error.what}"
        raise WeightsError(what, where=error.where, how="check the disk") from error
