"""A check of the frozen weights where they first come into memory: a model with NaN or infinity in
them is refused.

The check looks at bits, in the thread that has just read them: of the numbers without their signs,
infinity and NaN are the largest. No whole copy is made, nothing is rounded, and what is read again
is not checked again.
"""

import bisect
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lema.errors import NonFiniteError
from lema.storage.header import TensorRecord
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.slices import AssembledRecord, Move
from lema.stream.placement import DTYPES, Cast

__all__ = ["BaseGuard", "first_non_finite", "refusal"]

CHUNK = 256 << 10  # bytes looked at at once: they are in a processor's own cache then

# Of each type: how wide it is, all bits but the sign, and the least such number that is none. Types
# that are not here (integers, codes of quantised weights) hold nothing that is not finite; the
# scales of those do, and are here.
KINDS: Mapping[torch.dtype, tuple[type[np.unsignedinteger], int, int]] = {
    torch.float64: (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float8_e5m2: (np.uint8, 0x7F, 0x7C),
    torch.float8_e8m0fnu: (np.uint8, 0xFF, 0xFF),  # exponents alone, of scales; it has one NaN
    torch.float8_e4m3fn: (np.uint8, 0x7F, 0x7F),  # it has no infinity, and one NaN
}


def first_non_finite(memory: Tensor, dtype: torch.dtype) -> int | None:
    """Return the index of the first element of uint8 `memory`, read as `dtype`, that is not
    finite; None: all are.
    """
    if dtype not in KINDS:
        return None
    kind, mask, limit = KINDS[dtype]
    bits = memory.numpy().view(kind)
    step = CHUNK // bits.itemsize
    unsigned = np.empty(min(step, len(bits)), kind)
    for begin in range(0, len(bits), step):
        chunk = bits[begin : begin + step]
        magnitudes = np.bitwise_and(chunk, kind(mask), out=unsigned[: len(chunk)])
        if magnitudes.max() >= limit:
            return begin + int((magnitudes >= limit).argmax())
    return None


class BaseGuard:
    """Refuses weights that are not finite; `records` says where each tensor is stored, by its
    name in the model.
    """

    def __init__(self, records: Mapping[str, Stored]) -> None:
        tensors_by_file: dict[Path, list[tuple[int, str, TensorRecord]]] = {}
        for name, record in _stored(records):
            tensors_by_file.setdefault(record.file, []).append((record.offset, name, record))
        self._tensors = {
            file: sorted(tensors, key=lambda entry: entry[0])
            for file, tensors in tensors_by_file.items()
        }
        self._seen: set[tuple[Path, int, int | Move | None]] = set()

    def check(self, memory: Tensor, file: Path, offset: int) -> None:
        """Look at bytes of a file, uint8, as they were read from `offset` on. `NonFiniteError`: an
        element of a weight is NaN or infinite; names the weight, the element and the file. What was
        looked at is not looked at again."""
        if (file, offset, memory.numel()) in self._seen:
            return
        end = offset + memory.numel()
        tensors = self._tensors.get(file, [])
        first = max(0, bisect.bisect_right(tensors, offset, key=lambda entry: entry[0]) - 1)
        for begin, name, record in tensors[first:]:
            if begin >= end:
                break
            start = max(begin, offset)
            stop = min(begin + record.nbytes, end)
            dtype = DTYPES.get(record.dtype)
            if dtype is None or start >= stop:
                continue
            if (
                index := first_non_finite(memory[start - offset : stop - offset], dtype)
            ) is not None:
                index += (start - begin) // dtype.itemsize
                raise refusal(
                    name,
                    record,
                    [int(coordinate) for coordinate in np.unravel_index(index, record.shape)],
                )
        self._seen.add((file, offset, memory.numel()))

    def check_cast(self, cast: Cast, target: Tensor) -> None:
        """Look at a tensor, or a piece of one, that was read aside and cast into `target`.
        `NonFiniteError`: it is not finite as it is stored, or too large for the type it was cast
        to."""
        record = cast.record
        dtype = cast.target.dtype
        if (record.file, record.offset, cast.move) in self._seen:
            return
        if first_non_finite(target.contiguous().reshape(-1).view(torch.uint8), dtype) is not None:
            tensors = self._tensors[record.file]
            _, name, tensor_record = tensors[
                bisect.bisect_right(tensors, record.offset, key=lambda entry: entry[0]) - 1
            ]
            raise refusal(
                name, tensor_record, None, None if DTYPES[record.dtype] == dtype else dtype
            )
        self._seen.add((record.file, record.offset, cast.move))


def refusal(
    name: str, record: TensorRecord, element: list[int] | None, dtype: torch.dtype | None = None
) -> NonFiniteError:
    """Return the error of a weight that is not finite, by its name in the model, and where it is
    stored. `element` says which of its elements; None: it was not looked for. `dtype`: it is too
    large for this cast; None: as stored."""
    at = "" if element is None else f", element {element}"
    cast = "" if dtype is None else f", as {str(dtype).removeprefix('torch.')}"
    stored = "" if record.name == name else f" (stored as {record.name})"
    what = f"a weight of the model is NaN or infinite: {name}{cast}"
    how = (
        "download or prepare the model again; if the model has such weights on purpose, set "
        "check_base_weights: false"
    )
    return NonFiniteError(what, where=f"{record.file}{stored}{at}", how=how)


def _stored(records: Mapping[str, Stored]) -> Iterable[tuple[str, TensorRecord]]:
    for name, record in records.items():
        if isinstance(record, QuantizedRecord):
            yield from _stored(
                {f"{name} ({part})": stored for part, stored in record.parts.items()}
            )
        elif isinstance(record, AssembledRecord):
            yield from {(name, piece.record): None for piece in record.pieces}
        else:
            yield name, record
