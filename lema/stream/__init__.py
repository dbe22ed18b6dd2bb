"""Frozen weights on their way from a file through a ring in host memory to device slots, leased
layer by layer.

docs/internals/reading.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.stream.counters import StreamCounters
    from lema.stream.lease import Lease
    from lema.stream.stream import LayerStream

__all__ = ["LayerStream", "Lease", "StreamCounters"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"LayerStream": "stream", "Lease": "lease", "StreamCounters": "counters"}
)
