"""From files of text, prompts or chats to batches of token ids; each batch is a pure function of
seed and step.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.data.batches import Batch, Batches, collate
    from lema.data.dataset import Counts, TokenDataset
    from lema.data.files import Row
    from lema.data.forms import Forms, forms_of, longest_row, num_positions
    from lema.data.mixing.sampling import Sampling
    from lema.data.read import needs_tokenizer, prepare_data
    from lema.data.sets.sources import load_rows, read_rows

__all__ = [
    "Batch",
    "Batches",
    "Counts",
    "Forms",
    "Row",
    "Sampling",
    "TokenDataset",
    "collate",
    "forms_of",
    "load_rows",
    "longest_row",
    "needs_tokenizer",
    "num_positions",
    "prepare_data",
    "read_rows",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(("Batch", "Batches", "collate"), "batches"),
        **dict.fromkeys(("Counts", "TokenDataset"), "dataset"),
        **dict.fromkeys(("Forms", "forms_of", "longest_row", "num_positions"), "forms"),
        "Row": "files",
        **dict.fromkeys(("load_rows", "read_rows"), "sets.sources"),
        **dict.fromkeys(("needs_tokenizer", "prepare_data"), "read"),
        "Sampling": "mixing.sampling",
    },
)
