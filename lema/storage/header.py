"""The header of one safetensors file: lengths, dtypes, shapes and offsets are checked before they
are used.

Model files come from strangers. A header that passes gives every byte of the data section to
exactly one tensor, as https://github.com/huggingface/safetensors#format demands, and gives no
tensor a byte outside its file.
"""

import json
import os
import pickle
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from lema.errors import DataError, WeightsError, unreadable
from lema.storage.regular import open_regular, read_at_most

__all__ = [
    "DTYPE_BITS",
    "UNREADABLE",
    "TensorRecord",
    "check_pickled",
    "damaged",
    "parse_json",
    "read_header",
    "read_json",
    "regular_size",
]

# What torch.load says of bytes that it did not write; bytes that are nested too deep are a
# RuntimeError.
UNREADABLE = (
    *(
        pickle.UnpicklingError,
        struct.error,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        AttributeError,
    ),
    *(LookupError, TypeError, AssertionError, ArithmeticError),
)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor on disk: `nbytes` bytes at the absolute `offset` of `file`, C-contiguous,
    little-endian.
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> tuple[dict[str, str], dict[str, TensorRecord]]:
    """The metadata and the tensors of one safetensors file, these in the order of their bytes.
    `WeightsError`: the file is missing, not a regular file, truncated, or its header is not sound.
    """
    with _opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise damaged(file, f"it is {size} bytes long, too short for a safetensors header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise damaged(
                file, f"its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
            )
        if 8 + length > size:
            raise damaged(file, f"its header claims {length} bytes but the file has only {size}")
        raw = stream.read(length)
    header = parse_json(file, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise damaged(file, "__metadata__ is not a map of strings")
    data_start = 8 + length
    data_size = size - 8 - length
    records = sorted(
        (_record(file, name, entry, data_start) for name, entry in header.items()),
        key=lambda r: (r.offset, r.nbytes),
    )
    _check_coverage(file, records, data_start, data_size)
    return metadata, {record.name: record for record in records}


def _record(file: Path, name: str, entry: object, data_start: int) -> TensorRecord:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged(file, f"the entry of tensor {name!r} is not dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise damaged(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not are_sizes(shape):
        raise damaged(
            file, f"tensor {name!r} has the shape {shape!r}, which is not a list of sizes"
        )
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(
            file, f"tensor {name!r} has the data_offsets {offsets!r}, which are not [begin, end]"
        )
    nbytes = offsets[1] - offsets[0]
    bits = prod(shape) * DTYPE_BITS[dtype]
    if nbytes * 8 != bits:
        what = (
            f"tensor {name!r} ({dtype} {shape}) needs {-(-bits // 8)} bytes but its offsets "
            f"give {nbytes}"
        )
        raise damaged(file, what)
    return TensorRecord(name, file, data_start + offsets[0], nbytes, dtype, tuple(shape))


def are_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether a value from a file is a list of sizes."""
    # type(), not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _check_coverage(
    file: Path, records: list[TensorRecord], data_start: int, data_size: int
) -> None:
    """Every byte of the data section belongs to exactly one tensor, as the format demands."""
    position = data_start
    for record in records:
        if record.offset + record.nbytes > data_start + data_size:
            missing = record.offset + record.nbytes - data_start - data_size
            raise damaged(
                file, f"it is truncated: tensor {record.name!r} ends {missing} bytes past its end"
            )
        if record.offset != position:
            fault = (
                "overlaps the tensor before it"
                if record.offset < position
                else "leaves a gap before it"
            )
            raise damaged(file, f"tensor {record.name!r} {fault}")
        position += record.nbytes
    if position != data_start + data_size:
        raise damaged(
            file, f"{data_start + data_size - position} bytes at its end belong to no tensor"
        )


def parse_json(file: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, which came from `file`; a name given twice is an error, not the
    last one's victory.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            twice = sorted(
                name for name, count in Counter(name for name, _ in pairs).items() if count > 1
            )
            raise damaged(file, f"its JSON gives {', '.join(map(repr, twice))} twice")
        return names

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        kind = (
            "is not JSON"
            if file.name.endswith(".json")
            else "does not begin with a safetensors header"
        )
        raise damaged(file, f"it {kind} ({type(error).__name__}: {str(error)[:200]})") from error
    if not isinstance(parsed, dict):
        raise damaged(file, "its JSON is not an object")
    return parsed


def regular_size(file: Path) -> int:
    """Bytes of a file that is there and is neither a pipe nor a device, which could block or
    never end.
    """
    with _readable(file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise WeightsError(
            f"{file.name} is not a regular file", where=str(file), how="give a regular file"
        )
    return status.st_size


def check_pickled(file: Path) -> None:
    """Refuse a file of `torch.save` that is a pipe, a device or the like, or an archive that
    unpacks to more than it holds: `torch.save` compresses nothing. `WeightsError` says which."""
    with _opened(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            if not zipfile.is_zipfile(opened):
                return
            with zipfile.ZipFile(opened) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, ValueError) as error:
            raise damaged(file, f"it is no archive that torch.save wrote ({error})") from error
    if unpacked > size:
        raise damaged(file, f"it has {size:,} bytes and says that it unpacks to {unpacked:,}")


@contextmanager
def _opened(file: Path) -> Iterator[BufferedReader]:
    """Open a file to read; what cannot be opened or read, or is no regular file, is a
    `WeightsError`.
    """
    with _readable(file):
        try:
            opened = open_regular(file)
        except DataError as error:
            raise WeightsError(error.what, where=error.where, how=error.how) from error
        with opened:
            yield opened


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{file.name} cannot be opened ({error.strerror})"
        raise unreadable(
            file, error, WeightsError, what, "check the path and its permissions"
        ) from error


def read_json(file: Path, limit: int, kind: str) -> dict[str, Any]:
    """Read a small file's JSON object. `WeightsError`: there is none, or more than its `kind`'s
    `limit` of bytes.
    """
    with _opened(file) as opened:
        content = read_at_most(opened, limit + 1)
    if len(content) > limit:
        raise damaged(file, f"it has more than the {limit:,} bytes that {kind} may have")
    return parse_json(file, content)


def damaged(file: Path, what: str) -> WeightsError:
    """The error that says what is wrong with a file whose bytes cannot be right."""
    return WeightsError(
        f"{file.name} is damaged: {what}", where=str(file), how="download or save the file again"
    )
