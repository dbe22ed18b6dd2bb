"""Tensors of files in memory: loaded, and verified to be finite, as they were written, and of a
known model.

The fingerprint of a model tells its files from another's: a hash of all tensors' names, shapes,
types and some bytes.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lema.errors import DataError, DiskError, NonFiniteError, ReadError, WeightsError
from lema.storage.header import TensorRecord, read_header
from lema.storage.index import GlobalBinaryIndex, file_stamps
from lema.storage.regular import read_regular
from lema.storage.tensorfile import read_into

__all__ = [
    "DTYPES",
    "BaseFiles",
    "base_fingerprint",
    "check_finite",
    "check_written",
    "load_record",
    "load_tensors",
]
__all__ += ["model_config", "same_bits"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, each in memory of its own, in the order of their
    bytes. They are read and not mapped, because a disk that fails under a mapped file, or another
    program that cuts it, ends the process. `WeightsError`: the file is missing or not sound;
    `ReadError`: its disk fails."""
    _, records = read_header(file)
    return {name: load_record(record) for name, record in records.items()}


def load_record(record: TensorRecord) -> Tensor:
    """Return one stored tensor, in memory of its own. Errors are those of `load_tensors`."""
    if (dtype := DTYPES.get(record.dtype)) is None:
        what = (
            f"tensor {record.name!r} has the type {record.dtype}, which is not one that is "
            "written here"
        )
        raise WeightsError(
            what, where=str(record.file), how="save the file again, with another type"
        )
    memory = torch.empty(record.nbytes, dtype=torch.uint8)
    read_into(record, memoryview(memory.numpy()))  # type: ignore[arg-type] # as in `spillfile.as_bytes`
    return memory.view(dtype).view(record.shape)


def check_finite(tensors: Mapping[str, Tensor], where: Path) -> None:
    """Make sure that no tensor to be saved `where` it says is NaN or infinite. `NonFiniteError`:
    one is; names it.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        # torch asks this of no type of 8 bits
        wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        if not bool(torch.isfinite(wide).all()):
            count = int((~torch.isfinite(wide)).sum())
            what = (
                f"{name} is not saved: {count:,} of its {tensor.numel():,} numbers are NaN or "
                "infinite"
            )
            how = (
                "resume from the last checkpoint, with a lower learning_rate or with "
                "max_grad_norm set"
            )
            raise NonFiniteError(what, where=str(where), how=how)


def check_written(file: Path, expected: Mapping[str, Tensor], also: int = 0) -> None:
    """Read a safetensors file back, and compare it bit for bit with memory: names, shapes, types
    and values. `DiskError`: something differs, or fewer numbers are there than `also` says; names
    the tensor."""
    try:
        _, records = read_header(file)
        if differing := sorted(records.keys() ^ expected.keys()):
            location = "in the file" if differing[0] in records else "in memory"
            raise _differs(f"{differing[0]} is only {location}", file)
        for name, record in records.items():
            if not same_bits(load_record(record), expected[name]):
                raise _differs(f"{name} is not what is in memory", file)
    except (ReadError, WeightsError) as error:
        raise _differs(f"it cannot be read: {error.what}", file) from error
    count = sum(prod(record.shape) for record in records.values())
    if count < also:
        raise _differs(f"{count:,} numbers are in it, and {also:,} train", file)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits; NaN is not asked whether it equals
    itself.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    mine, yours = (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)
    )
    return torch.equal(mine, yours)


def _differs(what: str, file: Path) -> DiskError:
    what = f"the disk returns other bytes than were written: {what}"
    return DiskError(what, where=str(file), how="check the disk; earlier files are untouched")


class BaseFiles:
    """The files of a model as a run began to read them.

    Args:
        index: what the headers of the files say.
        unchanged: says whether files have all that has been read of them; it may raise `ReadError`.

    Attributes:
        fingerprint: of the tensors, as `base_fingerprint` describes.
        config: the bytes of the model's `config.json`; none where there is none beside the weights.

    Raises:
        WeightsError: a file has changed since its header was read.
    """

    def __init__(
        self,
        index: GlobalBinaryIndex,
        unchanged: Callable[[Collection[Path]], bool] = lambda _: True,
    ) -> None:
        self._index = index
        self._unchanged = unchanged
        self._stamps = index.stamps
        if _but_names(file_stamps(index.files)) != _but_names(index.stamps):
            raise self._changed()
        self.fingerprint = base_fingerprint(index)
        self.config = model_config(index)

    def check(self) -> None:
        """Make sure that the files are still those that the run began with: by what the system says
        of each, and where that has changed, by the fingerprint and by all that was read of them; of
        the config, by what is in it. `WeightsError`: they are not."""
        if model_config(self._index) != self.config:
            raise self._changed(["config.json"])
        now = file_stamps(self._index.files)
        if now == self._stamps:
            return
        try:
            same = (
                now.keys() == self._stamps.keys()
                and base_fingerprint(self._index) == self.fingerprint
            )
            same = same and self._unchanged(
                [file for file in now if now[file] != self._stamps[file]]
            )
        except (ReadError, WeightsError):  # it is shorter now
            same = False
        if not same:
            raise self._changed()
        self._stamps = now

    def _changed(self, files: Sequence[str] = ()) -> WeightsError:
        now = file_stamps(self._index.files)
        then = self._stamps
        changed = [*files] or [
            file.name for file in self._index.files if now.get(file) != then.get(file)
        ]
        what = f"the model has changed since the run began to read it: {', '.join(changed[:3])}"
        how = (
            "put the model back as it was; --resume continues from the last checkpoint, if "
            "any: that is of before"
        )
        return WeightsError(what, where=str(self._index.path), how=how)


def _but_names(stamps: Mapping[Path, tuple[int, ...]]) -> dict[Path, tuple[int, ...]]:
    """Return stamps without the time that a new name of a file changes, too."""
    return {file: stamp[:-1] for file, stamp in stamps.items()}


def model_config(index: GlobalBinaryIndex) -> bytes:
    """Return a model's `config.json`; nothing where there is none beside the weights, or it
    cannot be read.
    """
    try:
        return read_regular(index.root / "config.json")
    except (OSError, DataError):
        return b""


SAMPLE_BYTES = 1024
VERSION = "1"  # of what is hashed


def base_fingerprint(records: Mapping[str, TensorRecord]) -> str:
    """Return the fingerprint of a model: `1-` and a SHA-256 in hexadecimal. Of every tensor it
    takes name, type and shape as they are stored, and of its bytes the first, the middle and the
    last 1024: so it costs a few reads per tensor however large the model is. Training changes
    nearly every weight, so a model that was trained on has another fingerprint; a change of a few
    bytes elsewhere is not seen. How the tensors are divided among files does not matter. A file
    that cannot be read is a `ReadError`."""
    digest = sha256()
    for name in sorted(records):
        record = records[name]
        about = json.dumps([name, record.dtype, list(record.shape)]).encode()
        digest.update(len(about).to_bytes(8, "little") + about)
        starts = (0, (record.nbytes - SAMPLE_BYTES) // 2, record.nbytes - SAMPLE_BYTES)
        for start in (
            starts if record.nbytes > 3 * SAMPLE_BYTES else range(0, record.nbytes, SAMPLE_BYTES)
        ):
            sample = bytearray(min(SAMPLE_BYTES, record.nbytes - start))
            read_into(record, memoryview(sample), start)
            digest.update(sample)
    return f"{VERSION}-{digest.hexdigest()}"
