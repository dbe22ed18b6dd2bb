"""Model directories rewritten: prepared for streaming, quantised, or merged with an adapter.

docs/internals/reading.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.convert.delta import apply_delta
    from lema.convert.merge import merge_adapter
    from lema.convert.prepare import prepare_monolithic_safetensors

__all__ = ["apply_delta", "merge_adapter", "prepare_monolithic_safetensors"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"apply_delta": "delta", "merge_adapter": "merge", "prepare_monolithic_safetensors": "prepare"},
)
