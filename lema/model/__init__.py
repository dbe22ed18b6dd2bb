"""The `transformers` model taken apart: built on `meta`, split into prelude, layers and head, its
weights by name.

The first chapter of docs/internals/engine.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.model.files import read_config
    from lema.model.skeleton import meta_model
    from lema.model.split import Split

__all__ = ["Split", "meta_model", "read_config"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"Split": "split", "meta_model": "skeleton", "read_config": "files"}
)
