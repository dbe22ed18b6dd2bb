"""From files of text, prompts or chats to batches of token ids; nothing heavy is imported until a name is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lema.data.batches import Batch, Batches, collate, share_of
    from lema.data.dataset import Counts, TokenDataset
    from lema.data.files import Row, load_rows, read_rows
    from lema.data.length import longest_row
    from lema.data.prepare import needs_tokenizer, prepare_data

__all__ = [
    "Batch",
    "Batches",
    "Counts",
    "Row",
    "TokenDataset",
    "collate",
    "load_rows",
    "longest_row",
    "needs_tokenizer",
    "prepare_data",
    "read_rows",
    "share_of",
]

_HOME = {
    "Batch": "batches",
    "Batches": "batches",
    "Counts": "dataset",
    "Row": "files",
    "TokenDataset": "dataset",
    "collate": "batches",
    "load_rows": "files",
    "longest_row": "length",
    "needs_tokenizer": "prepare",
    "prepare_data": "prepare",
    "read_rows": "files",
    "share_of": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
