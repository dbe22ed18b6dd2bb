"""Other people's trainers: a streamed model that is a PEFT model to them, and a mixin for their training steps.

docs/trainers.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.train.hf.mixin import StreamingMixin
    from lema.train.hf.peftmodel import StreamedPeftModel, streamed

__all__ = ["StreamedPeftModel", "StreamingMixin", "streamed"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"StreamedPeftModel": "peftmodel", "StreamingMixin": "mixin", "streamed": "peftmodel"}
)
