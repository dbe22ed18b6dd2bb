"""The doctor's report: runs every examination, one after the other, and shows the findings to a
reader.

An examination that fails becomes a finding, and the others go on. The report is a table on a
terminal and lines of tab-separated columns anywhere else.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lema.backend import Finding, Level
from lema.config.printing import print_table
from lema_tools.doctor.device import devices, disk, links
from lema_tools.doctor.machine import environment, machine, versions

__all__ = ["Report", "examine", "show_report"]


FORMAT = 1  # of the JSON; it grows when a key goes or changes its meaning
NOT_READY = 2  # the exit code of a config that cannot run here
Examination = Callable[[], Iterable[Finding]]


@dataclass(frozen=True)
class Report:
    """What was found."""

    findings: tuple[Finding, ...]  # in the order they were made
    measured: bool  # whether disk and links were timed

    @property
    def ready(self) -> bool:
        """Whether everything LEMA needs is there; warnings do not count."""
        return not self.count(Level.PROBLEM)

    @property
    def exit_code(self) -> int:
        """What the command line ends with."""
        return 0 if self.ready else NOT_READY

    def count(self, level: Level) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level is level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; `findings` is a list, each with the keys of
        `Finding.to_dict`.
        """
        return {
            "format": FORMAT,
            "ready": self.ready,
            "measured": self.measured,
            "problems": self.count(Level.PROBLEM),
            "warnings": self.count(Level.WARNING),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def examine(directory: Path, *, measure: bool = True) -> Report:
    """Look at everything, at the disk that `directory` is on too; timing disk and links takes
    some seconds.
    """
    examinations: list[tuple[str, Examination]] = [
        ("versions", versions),
        ("machine", machine),
        ("environment", environment),
    ]
    examinations.append(("devices", devices))
    of_backends = sorted(entry_points(group="lema.doctors"), key=lambda point: point.name)
    examinations += [(point.name, partial(_asked, point)) for point in of_backends]
    if measure:
        examinations.append(("link", links))
    examinations.append(("disk", partial(disk, directory, measure=measure)))
    return Report(
        tuple(
            finding
            for section, examination in examinations
            for finding in _careful(section, examination)
        ),
        measure,
    )


def _asked(point: EntryPoint) -> Iterable[Finding]:
    findings: Iterable[Finding] = point.load()()  # both may fail, and neither may end the report
    return findings


def _careful(section: str, examination: Examination) -> Iterator[Finding]:
    """Yield what a look finds; what it raises is one more finding."""
    try:
        for finding in examination():
            if not isinstance(finding, Finding):
                raise TypeError(f"{finding!r} is no finding")
            yield finding
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what the user wants to know
        what = f"Looking at {section} failed: {type(error).__name__}: {error}."
        yield Finding(section, "failed", Level.WARNING, what, "the rest of this report is valid")


STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def show_report(report: Report, console: Console) -> None:
    """Print the report: columns are section, what was looked at, level, and the sentence with how
    to fix it; a table leaves out the second, which the sentence says."""
    if console.is_terminal:
        levels = (Text(finding.level.value, STYLES[finding.level]) for finding in report.findings)
        sentences = (_sentence(finding, "\n") for finding in report.findings)
        print_table(
            zip((finding.section for finding in report.findings), levels, sentences, strict=True),
            console,
        )
        console.print(Text(_summary(report), style=STYLES[_level(report)]))
        return
    cells = [
        (finding.section, finding.name, finding.level.value, _sentence(finding, " "))
        for finding in report.findings
    ]
    print_table([*cells, ("in all", "", _level(report).value, _summary(report))], console)


def _sentence(finding: Finding, between: str) -> Text:
    fix = finding.how and f"fix: {finding.how}"
    see = finding.source and f"see: {finding.source}"
    return Text(between.join(filter(None, (finding.what, fix, see))))


def _level(report: Report) -> Level:
    return max(
        (finding.level for finding in report.findings),
        key=lambda level: level.rank,
        default=Level.OK,
    )


def _summary(report: Report) -> str:
    counts = [
        (report.count(level), level.value) for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
    ]
    counted = ", ".join(
        f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count
    )
    return f"{'Ready' if report.ready else 'Not ready'}: {counted or 'nothing to fix'}."
