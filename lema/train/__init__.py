"""A run: the model that is trained, the trainer, the loop of steps, its checkpoints and its phases.
docs/internals/full-training.md and docs/internals/checkpoints.md describe the folder."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.train.model import LemaModel
    from lema.train.run import train
    from lema.train.trainer import LemaTrainer

__all__ = ["LemaModel", "LemaTrainer", "train"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"LemaModel": "model", "LemaTrainer": "trainer", "train": "run"}
)
