"""The parts of a model that text does not reach: towers that see images or hear, and what fits
their output to the layers.
"""

from lema.model.towers.closed import close_towers, foreign_inputs, refusal
from lema.model.towers.frozen import check_towers, open_towers

__all__ = ["check_towers", "close_towers", "foreign_inputs", "open_towers", "refusal"]
