"""The table: each kind of fault, how many of it a full run makes, and what came of them."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module

from faults.outcome import Outcome

__all__ = ["ROWS", "Row", "markdown", "outcome_of"]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: by which it is asked for.
        module: of this package, with the function.
        full: how many cases a full run has; 0: all there are.
        short: how many a short one has.
        function: `(count, seed, report) -> Outcome`.
    """

    name: str
    module: str
    full: int
    short: int
    function: str = "run"


ROWS = (
    Row("kills", "kills", 200, 3),
    Row("instants", "instants", 0, 6),
    Row("power", "instants", 0, 3, "power"),
    Row("over", "instants", 0, 2, "over"),
    Row("moves", "moves", 40, 2),
    Row("verbs", "verbkills", 0, 8),
    Row("terms", "terms", 50, 3),
    Row("everystep", "everystep", 160, 2),
    Row("damage", "damage", 500, 6),
    Row("fulldisk", "fulldisk", 200, 3),
    Row("smalldisk", "smalldisk", 121, 0),
    Row("nonfinite", "nonfinite", 0, 4),
    Row("inputs", "inputs", 100_000, 400),
    Row("paths", "paths", 40, 40),
    Row("rows", "rows", 200, 40),
    Row("configkeys", "configkeys", 100_000, 40),
    Row("bombs", "bombs", 10_000, 8),
    Row("settings", "extremes", 8_000, 8, "settings"),
    Row("options", "options", 20_000, 100),
    Row("phases", "phasekeys", 4_000, 8),
    Row("smallfiles", "extremes", 4_000, 12, "files"),
    Row("rundirs", "rundirs", 4_000, 12),
    Row("keptfiles", "keptfiles", 4_000, 8),
)


def outcome_of(
    row: Row, count: int, seed: int, report: Callable[[str], None] | None = None
) -> Outcome:
    """Make the faults of a row."""
    run: Callable[..., Outcome] = getattr(import_module(f"faults.{row.module}"), row.function)
    return run(count, seed, report)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table, with where and when it was made."""
    lines = ["| fault | cases | passed | required | seconds |", "|---|---:|---:|---|---:|"]
    for one in outcomes:
        lines.append(
            f"| {one.fault} | {one.cases:,} | {one.passed:,} | {one.required} | {one.seconds:.0f} |"
        )
    lines += ["", *(_counted(one) for one in outcomes if one.codes)]
    where = (
        f"{platform.machine()}, {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}"
    )
    lines += ["", f"{datetime.now(UTC):%d %b %Y}, {where}."]
    return "\n".join(lines)


def _counted(one: Outcome) -> str:
    codes = ", ".join(f"{code}: {number:,}" for code, number in sorted(one.codes.items()))
    return (
        f"- {one.fault}: exit codes {codes}; {one.user / one.cases:.2f} s of the processor for "
        "a case."
    )
