"""A report for a reader: a table on a terminal, lines of tab-parted columns anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lema.doctor.finding import Finding, Level
from lema.doctor.report import Report

__all__ = ["show"]

STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def show(report: Report, console: Console) -> None:
    """Print the report: columns are section, what was looked at, level, and the sentence with how to mend it."""
    if not console.is_terminal:
        for finding in report.findings:
            cells = (finding.section, finding.name, finding.level.value, _sentence(finding, " "))
            console.file.write("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in cells) + "\n")
        console.file.write(f"in all\t\t{_level(report).value}\t{_summary(report)}\n")
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    last = ""
    for finding in report.findings:
        level = Text(finding.level.value, style=STYLES[finding.level])
        table.add_row(finding.section if finding.section != last else "", level, Text(_sentence(finding, "\n")))
        last = finding.section
    console.print(table, markup=False, highlight=False)
    console.print(Text(_summary(report), style=STYLES[_level(report)]))


def _sentence(finding: Finding, between: str) -> str:
    parts = [finding.what]
    if finding.how:
        parts.append(f"mend: {finding.how}")
    if finding.source:
        parts.append(f"see: {finding.source}")
    return between.join(parts)


def _level(report: Report) -> Level:
    return max((finding.level for finding in report.findings), key=lambda level: level.rank, default=Level.OK)


def _summary(report: Report) -> str:
    counts = [(report.count(level), level.value) for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)]
    found = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)
    return f"{'Ready' if report.ready else 'Not ready'}: {found or 'nothing to mend'}."
