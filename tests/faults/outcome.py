"""What came of one kind of fault: how many cases were tried, how many ended as they must, and
what the others did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
        fault: what was done to the run, in the words of the table.
        required: what must come of every case.
        cases: how many were tried.
        passed: how many ended as required.
        failures: a sentence for each of the others, with what it takes to make it again.
        seconds: the wall time of all of them.
        user: seconds of the processor in what they ran, where that was counted.
        codes: how many commands ended with each exit code, where that was counted.
    """

    fault: str
    required: str
    cases: int
    passed: int
    failures: tuple[str, ...]
    seconds: float = 0.0
    user: float = 0.0
    codes: Mapping[int, int] = field(default_factory=dict)
