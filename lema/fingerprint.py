"""What tells one model's files from another's: a hash of names, shapes, types and samples of all tensors' bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from lema.tensorfile import read_into
from lema.weights import TensorRecord

__all__ = ["base_fingerprint"]

SAMPLE_BYTES = 1024
VERSION = "1"  # of what is hashed


def base_fingerprint(records: Mapping[str, TensorRecord]) -> str:
    """Return the fingerprint of a model: `1-` and a SHA-256 in hexadecimal.

    Of every tensor it takes name, type and shape as they are stored, and of its bytes the first, the middle and the
    last 1024: so it costs a few reads per tensor however large the model is. Training changes nearly every weight, so a
    model that was trained on has another fingerprint; a change of a few bytes elsewhere is not seen. How the tensors
    are divided among files does not matter.

    Args:
        records: where a model's tensors are, such as a `GlobalBinaryIndex`.

    Raises:
        ReadError: a file could not be read.
    """
    whole = sha256()
    for name in sorted(records):
        record = records[name]
        about = json.dumps([name, record.dtype, list(record.shape)]).encode()
        whole.update(len(about).to_bytes(8, "little") + about)
        for start in _starts(record.nbytes):
            sample = bytearray(min(SAMPLE_BYTES, record.nbytes - start))
            read_into(record, memoryview(sample), start)
            whole.update(sample)
    return f"{VERSION}-{whole.hexdigest()}"


def _starts(nbytes: int) -> list[int]:
    """Where the samples of a tensor begin; one that is not longer than they are is read whole."""
    if nbytes <= 3 * SAMPLE_BYTES:
        return list(range(0, nbytes, SAMPLE_BYTES))
    return [0, (nbytes - SAMPLE_BYTES) // 2, nbytes - SAMPLE_BYTES]
