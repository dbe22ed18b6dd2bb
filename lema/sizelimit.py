"""A bound on what a config may have built: tensors are counted, and no table grows beyond what memory may hold.

The sizes come from a stranger's file. Parameters are on `meta` and cost nothing, whatever their shape, and a wrong
shape shows when they are compared with the weights; but tables are real, and each tensor takes time to make.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lema.errors import ModelError

__all__ = ["MAX_TABLES_BYTES", "MAX_TABLE_BYTES", "MAX_TENSORS", "SizeLimit"]

MAX_TENSORS = 200_000  # about three times those of the model that has the most, with each expert's apart
MAX_TABLE_BYTES = 256 << 20  # of one table
MAX_TABLES_BYTES = 2 << 30  # of all the large ones of a model together
LARGE = 16 << 20  # bytes; smaller ones are not counted
TABLES = frozenset({torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn})
MASKS = frozenset({torch.tril, torch.triu})


class SizeLimit(TorchFunctionMode):
    """Active while a model is built.

    Raises:
        ModelError: inside, where the model would have too many tensors, or tables that are too large.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors = self._bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.empty:
            self._tensors += 1
            if self._tensors > MAX_TENSORS:
                raise _too_large(f"more than {MAX_TENSORS:,} tensors")
        elif func in TABLES and str(given.get("device")) != "meta":
            self._count(func(*args, **{**given, "device": "meta"}))
        elif func in MASKS and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
            self._count(args[0])
        return func(*args, **given)

    def _count(self, like: torch.Tensor) -> None:
        if like.nbytes > MAX_TABLE_BYTES:
            raise _too_large(f"a table of {like.nbytes:,} bytes, more than {MAX_TABLE_BYTES:,}")
        if like.nbytes >= LARGE:
            self._bytes += like.nbytes
            if self._bytes > MAX_TABLES_BYTES:
                raise _too_large(f"tables of {self._bytes:,} bytes, more than {MAX_TABLES_BYTES:,}")


def _too_large(what: str) -> ModelError:
    return ModelError(f"the config asks for {what}", where="config.json", how="check the sizes in the file")
