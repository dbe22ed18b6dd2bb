"""Training of a model's own weights while its layers stream.

docs/internals/full-training.md describes the folder.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.train.full.export import save_delta, save_trained
    from lema.train.full.training import FullTraining

__all__ = ["FullTraining", "save_delta", "save_trained"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"FullTraining": "training", "save_delta": "export", "save_trained": "export"}
)
