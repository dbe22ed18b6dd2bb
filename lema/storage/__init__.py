"""Files: tensors read and written, directories that appear whole, models found. Nothing from
outside is trusted here.

docs/internals/reading.md and docs/internals/checkpoints.md describe the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.storage.hub import resolve_model
    from lema.storage.index import GlobalBinaryIndex
    from lema.storage.tensorfile import TensorFile

__all__ = ["GlobalBinaryIndex", "TensorFile", "resolve_model"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"GlobalBinaryIndex": "index", "TensorFile": "tensorfile", "resolve_model": "hub"}
)
