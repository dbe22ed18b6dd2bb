"""What becomes of a run that is resumed with another value of a setting: each setting says it in its type.

A change that would make it another run is refused: other shapes, rows, batches or draws. A change of numbers that a
user may reasonably want, such as a lower learning rate, takes effect and is reported. A setting that changes no number
may change freely: where the run is computed, how much memory it takes, what it writes and how often.
"""

from enum import Enum
from typing import Annotated, TypeVar

__all__ = ["Change", "OfAdapter", "OfData", "Refused", "Said", "Silent"]


class Change(Enum):
    """What becomes of a run that goes on with another value of a setting."""

    REFUSED = "the run would be another"
    ADAPTER = "what it came to mean for PEFT is compared, and refused where that differs"
    DATA = "the fingerprint of the rows decides; shown where that differs"
    SAID = "later numbers are others, if by their last bits alone; a line says so"
    SILENT = "no number changes, or something else is compared: the files of the model, what the checkpoint has"


Value = TypeVar("Value")

Refused = Annotated[Value, Change.REFUSED]
OfAdapter = Annotated[Value, Change.ADAPTER]
OfData = Annotated[Value, Change.DATA]
Said = Annotated[Value, Change.SAID]
Silent = Annotated[Value, Change.SILENT]
