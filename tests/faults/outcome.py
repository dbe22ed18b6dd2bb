"""What came of one kind of fault: how many cases were tried, how many ended as they must, and what the others did."""

from dataclasses import dataclass

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
    """

    fault: str
    required: str
    cases: int
    passed: int
    failures: tuple[str, ...]
    seconds: float = 0.0
