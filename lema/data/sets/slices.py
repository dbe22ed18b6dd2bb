"""Parts of splits, such as `train[:20%]+test[100:]`, in the notation of `datasets` and with its
rounding (https://huggingface.co/docs/datasets/loading#slice-splits).
"""

import math
import re
from dataclasses import dataclass

from lema.errors import DataError

__all__ = ["SplitPart", "is_sliced", "parse_split"]

_PART = re.compile(
    r"(?P<split>\w+(?:\.\w+)*)"
    r"(?:\[(?:(?P<start>-?[\d_]+)(?P<start_percent>%)?)?:(?:(?P<stop>-?[\d_]+)(?P<stop_percent>%)?)?\])?"
    r"(?:\((?P<rounding>[^)]*)\))?"
)
_ROUNDINGS = (None, "closest", "pct1_dropremainder")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A part of a split, with bounds in rows or in percent; None: from its first row, or to its
    last.
    """

    split: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False
    dropping: bool = False  # whether a percent is the same number of rows everywhere

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Return the first row of the part and the one after its last, of so many rows.
        `ValueError`: there are fewer rows than percents, and they are all to be alike."""
        start = 0 if self.start is None else self._row(self.start, num_rows)
        stop = num_rows if self.stop is None else self._row(self.stop, num_rows)
        return start, max(start, stop)

    def _row(self, bound: int, num_rows: int) -> int:
        if self.percent and self.dropping:
            if num_rows < 100:
                raise ValueError(f"pct1_dropremainder needs 100 rows, and there are {num_rows}")
            bound *= math.trunc(num_rows / 100.0)
        elif self.percent:
            bound = round(bound * num_rows / 100.0)
        return min(max(num_rows + bound, 0) if bound < 0 else bound, num_rows)


def is_sliced(split: str) -> bool:
    """Whether a text names parts of splits, not whole ones."""
    return "[" in split


def parse_split(text: str, where: str) -> list[SplitPart]:
    """Return the parts that a text names, in its order. `DataError`: it is written wrongly;
    `where` is the data set that it is of."""
    return [_parsed(part.strip(), where) for part in text.split("+")]


def _parsed(text: str, where: str) -> SplitPart:
    match = _PART.fullmatch(text)
    how = "write train, train[:20%], train[100:200], or several with + between them"
    if match is None:
        raise DataError(f"{text!r} is no part of a split", where=where, how=how)
    percent = bool(match["start_percent"] or match["stop_percent"])
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    if percent and any(abs(bound or 0) > 100 for bound in (start, stop)):
        raise DataError(f"{text!r} has more than 100 percent", where=where, how=how)
    rounding = match["rounding"]
    if rounding not in _ROUNDINGS or (rounding is not None and not percent):
        what = f"{text!r} asks for the rounding {rounding!r}"
        raise DataError(
            what, where=where, how="of percents there are closest and pct1_dropremainder"
        )
    return SplitPart(match["split"], start, stop, percent, rounding == "pct1_dropremainder")
