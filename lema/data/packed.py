"""Packed tokens ("PMD"): one long row of token ids in a file, cut into blocks that are read on
demand.

A packed data set is a directory with `train.bin` and perhaps `val.bin`, which hold little-endian
unsigned numbers and nothing more, and a header for each, `train.json` and `val.json`. Blocks do not
overlap, and begin at multiples of their length; tokens after the last whole block are not read.
`lema.data.mixing.permutation` shuffles blocks.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from pydantic import Field, StrictInt, StrictStr, TypeAdapter, ValidationError

from lema.backend.host.files import BINARY
from lema.errors import ConfigError, DataError, DiskError, unreadable
from lema.storage.atomic import replacing
from lema.storage.directio import read_at
from lema.storage.regular import expanded, read_regular

__all__ = ["PackedHeader", "PackedTokens", "write_packed"]

FORMAT = "lema packed tokens"
VERSION = 1
LIMITS = {"uint16": 2**16, "uint32": 2**32}
SPLITS = ("train", "val")
CHUNK = 1 << 16  # tokens that are given one by one are written so many at a time
READ_BYTES = 1 << 20
AGAIN = "write it again with write_packed, or copy it again"
Block: TypeAlias = Mapping[str, npt.NDArray[np.int64]]
Item: TypeAlias = int | Sequence[int] | npt.NDArray[Any] | Mapping[str, Any]
"""A token, a row of tokens, or a row with `input_ids`."""


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What a packed file holds."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    vocab_size: Annotated[StrictInt, Field(gt=0)] | None = None  # ids are below it; None: not known
    tokenizer: StrictStr | None = None  # the name of the tokenizer that made them; None: not known
    sha256: StrictStr | None = None  # of the file, in hexadecimal; None: not known


class PackedTokens(Sequence[Block]):
    """The whole blocks of a packed file, as a sequence of rows with `input_ids` and `labels`, which
    are the same. `path`: a `.bin` file with its header next to it, or the directory of `train.bin`.
    `block`: tokens in a block. `vocab_size`: how many tokens the model knows; None: not known, and
    ids are compared with the header alone. `DataError`: the file or its header is missing or
    damaged, or it is shorter than one block."""

    def __init__(self, path: str | Path, block: int, vocab_size: int | None = None) -> None:
        if block < 2:
            raise DataError(
                f"blocks of {block} tokens have nothing to predict",
                where="block",
                how="use 2 or more",
            )
        path = expanded(path)
        self.path = path / "train.bin" if path.is_dir() else path
        self.block_size = block
        self.header = _read_header(self.path)
        if self.header.num_tokens < block:
            what = (
                f"{self.path.name} has {self.header.num_tokens:,} tokens, fewer than one block "
                f"of {block:,}"
            )
            raise DataError(
                what, where=str(self.path), how="use shorter blocks, or pack more tokens"
            )
        self._limit = min(
            size for size in (LIMITS[self.header.dtype], self.header.vocab_size, vocab_size) if size
        )
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | BINARY)
        except OSError as error:
            what = f"{self.path.name} cannot be opened: {error.strerror or error}"
            raise unreadable(self.path, error, DataError, what, "check its permissions") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._dtype = np.dtype(self.header.dtype).newbyteorder("<")
        self._vocab_size = vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedTokens, (self.path, self.block_size, self._vocab_size)

    def __len__(self) -> int:
        return self.header.num_tokens // self.block_size

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        tokens = self.block(index if index >= 0 else len(self) + index)
        return {"input_ids": tokens, "labels": tokens}

    def block(self, index: int) -> npt.NDArray[np.int64]:
        """Read one block, int64 `[block]`, and nothing else of the file. `DataError`: a token is
        not in the vocabulary. `IndexError`: there is no such block. `ReadError`: the disk fails."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        first = index * self.block_size
        size = self._dtype.itemsize
        content = read_at(self._descriptor, self.path, first * size, self.block_size * size)
        tokens = np.frombuffer(content, dtype=self._dtype).astype(np.int64)
        if (largest := int(tokens.max())) >= self._limit:
            where = f"{self.path}, token {first + int(tokens.argmax()):,}"
            what = f"token id {largest} is outside the vocabulary of {self._limit:,} tokens"
            tokenizer_note = f" ({self.header.tokenizer})" if self.header.tokenizer else ""
            raise DataError(
                what,
                where=where,
                how=f"use the model whose tokenizer{tokenizer_note} packed it; or {AGAIN}",
            )
        return tokens

    def verify(self) -> None:
        """Read the whole file, and compare it with the digest in its header, if any.
        `DataError`: it is another.
        """
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if self.header.sha256 not in (None, digest.hexdigest()):
            raise _damaged(self.path, "its sha256 is not the one in its header")


def write_packed(
    tokens: Iterable[Item],
    directory: str | Path,
    dtype: Literal["uint16", "uint32"] = "uint16",
    *,
    split: Literal["train", "val"] = "train",
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write a packed file and its header, and return its path; one that is there is replaced when
    the new one is complete. Whatever fails or is killed, the file is the old one, the new one, or
    one without a header, which is not read. `tokens` are taken one at a time; nothing is put
    between rows, so they should end in the end-of-sequence token. "uint16" is for vocabularies up
    to 65,536 tokens. `ConfigError`: no such `dtype` or `split`, or the vocabulary does not fit into
    `dtype`. `DataError`: there are no tokens, or one is no id of the vocabulary. `DiskError`: the
    file could not be written; what was there before is untouched."""
    if dtype not in LIMITS:
        raise ConfigError(
            f"tokens cannot be packed as {dtype!r}", where="dtype", how=f"use {' or '.join(LIMITS)}"
        )
    if split not in SPLITS:
        raise ConfigError(
            f"{split!r} is not a part of a data set",
            where="split",
            how=f"use {' or '.join(SPLITS)}",
        )
    if vocab_size is not None and not 0 < vocab_size <= LIMITS[dtype]:
        what = (
            f"a vocabulary of {vocab_size:,} tokens does not fit into {dtype}, which holds "
            f"{LIMITS[dtype]:,}"
        )
        raise ConfigError(
            what, where="dtype", how="use uint32" if vocab_size > 0 else "give the size, or None"
        )
    file = expanded(directory) / f"{split}.bin"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as out:
            count, digest = _write_tokens(tokens, out, dtype, vocab_size)
            if not count:
                raise DataError(
                    "there are no tokens to pack", where=str(file), how="give rows with tokens"
                )
            out.flush()
            os.fsync(out.fileno())
            # The old header goes before the new tokens get their name, because they would be read
            # by it as what they are not; it goes after they are on disk, so that a full disk costs
            # nothing.
            file.with_suffix(".json").unlink(missing_ok=True)
        header = PackedHeader(dtype, count, vocab_size, tokenizer, digest)
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)}, indent=1) + "\n"
        with replacing(file.with_suffix(".json")) as out:
            out.write(text.encode())
    except OSError as error:
        what = f"{file.name} could not be written: {error.strerror or error}"
        raise DiskError(
            what, where=str(file), how="free space, or choose another place that may be written"
        ) from error
    return file


def _write_tokens(
    tokens: Iterable[Item], out: BinaryIO, dtype: str, vocab_size: int | None
) -> tuple[int, str]:
    """Write ids as they come; return how many, and the digest of the file."""
    count = 0
    digest = hashlib.sha256()
    limit = vocab_size or LIMITS[dtype]
    for origin, ids in _pieces(tokens):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            if ids.size == 0 and ids.ndim == 1:
                continue
            raise DataError(
                "a row is not a list of token ids", where=origin, how="give whole numbers"
            )
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if wrong.size:
            what = f"token id {ids[wrong[0]]} is outside the vocabulary of {limit:,} tokens"
            how = "use the tokenizer of the model" + (
                "" if vocab_size else "; or dtype uint32 for more tokens"
            )
            raise DataError(what, where=f"{origin}, position {wrong[0]}", how=how)
        content = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        out.write(content)
        digest.update(content)
        count += len(ids)
    return count, digest.hexdigest()


def _pieces(tokens: Iterable[Item]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Arrays of ids, each with the words for where it is from."""
    items = iter(tokens)
    first = next(items, None)
    if first is None:
        return
    items = chain([first], items)
    if isinstance(first, int | np.integer):
        start = 0
        while chunk := list(islice(items, CHUNK)):
            yield f"tokens from {start:,} on", _array(chunk)
            start += len(chunk)
        return
    for number, item in enumerate(items):
        yield f"row {number}", _array(item.get("input_ids") if isinstance(item, Mapping) else item)


def _array(ids: object) -> npt.NDArray[Any]:
    try:
        return np.asarray(ids)
    except ValueError:  # rows within a row, of several lengths
        return np.empty((0, 0))


def _read_header(file: Path) -> PackedHeader:
    header_path = file.with_suffix(".json")
    for needed in (file, header_path):
        if not needed.is_file():
            there = (
                sorted(path.name for path in file.parent.glob("*.bin"))
                if file.parent.is_dir()
                else []
            )
            packed = (
                f"the directory has {', '.join(there)}" if there else "there are no packed tokens"
            )
            how = f"{packed}; check the name, or write it with write_packed"
            if needed == header_path:
                how = (
                    f"{AGAIN}; a run that was killed while it replaced the tokens leaves them "
                    "without"
                )
            kind = "packed tokens" if needed == file else f"the header of {file.name}"
            raise DataError(f"{needed.name} is missing: {kind}", where=str(needed), how=how)
    try:
        fields = json.loads(read_regular(header_path))
    except OSError as error:
        raise unreadable(header_path, error) from error
    except (DataError, ValueError, RecursionError) as error:
        raise _damaged(header_path, f"it cannot be read ({str(error)[:200]})") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise _damaged(header_path, "it is not the header of packed tokens")
    if (version := fields.pop("version", None)) != VERSION:
        what = f"{header_path.name} is of version {version!r}; this program reads version {VERSION}"
        raise DataError(
            what,
            where=str(header_path),
            how="use the program that wrote it, or pack the tokens again",
        )
    names = PackedHeader.__dataclass_fields__.keys()
    if unknown := sorted(fields.keys() - names):
        raise _damaged(header_path, f"it has the unknown keys {', '.join(unknown)}")
    try:
        header = TypeAdapter(PackedHeader).validate_python(
            {name: fields.get(name) for name in names}
        )
    except ValidationError as error:
        detail = error.errors()[0]
        expected = detail["msg"].removeprefix("Input should be ").replace("'", "")
        raise _damaged(
            header_path, f"{detail['loc'][0]} is {detail['input']!r}, not {expected}"
        ) from error
    size = file.stat().st_size
    needed_bytes = header.num_tokens * np.dtype(header.dtype).itemsize
    if size != needed_bytes:
        what = (
            f"it has {size:,} bytes, and its header says {header.num_tokens:,} tokens of "
            f"{header.dtype}"
        )
        raise _damaged(file, f"{what}, which are {needed_bytes:,}")
    return header


def _damaged(file: Path, what: str) -> DataError:
    return DataError(f"{file.name} is damaged: {what}", where=str(file), how=AGAIN)
