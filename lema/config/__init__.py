"""Every setting of a run, checked before anything heavy is imported."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.config.lemaconfig import LemaConfig
    from lema.config.types import MemoryStrategy

__all__ = ["LemaConfig", "MemoryStrategy"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"LemaConfig": "lemaconfig", "MemoryStrategy": "types"}
)
