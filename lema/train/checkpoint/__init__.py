"""Checkpoints: what they hold, which one a run goes on from, and whether it is still the same run.

docs/internals/checkpoints.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.train.checkpoint.format import checkpoints
    from lema.train.checkpoint.resume import newest_sound

__all__ = ["checkpoints", "newest_sound"]

__getattr__, __dir__ = lazy_exports(__name__, {"checkpoints": "format", "newest_sound": "resume"})
