"""The engine: the forward and the backward of all micro-batches through one leased layer after the
other.

docs/internals/engine.md and docs/internals/recompute.md describe the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.engine.generation import complete
    from lema.engine.streamed import StreamedModel

__all__ = ["StreamedModel", "complete"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"StreamedModel": "streamed", "complete": "generation"}
)
