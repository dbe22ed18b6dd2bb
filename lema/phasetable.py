"""A report on phases for a reader: a table on a terminal, lines of tab-parted columns anywhere else."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from lema.metrics import human_bytes, human_count, human_duration
from lema.phasereport import PhaseEntry, PhaseReport

__all__ = ["report_rows", "show_report"]

Row = tuple[str, str, str]
HOURS_FROM = {"profile": "by its profile", "measured": "as measured"}


def report_rows(report: PhaseReport) -> Iterator[Row]:
    """Yield what a report says, as (phase, what, how much)."""
    for phase in report.phases:
        for what, amount in _phase(phase, report):
            yield phase.name, what, amount
    yield "in all", "steps", f"{report.steps:,}"
    yield "in all", "tokens", f"{report.tokens:,}"
    yield "in all", "takes", _duration(report.hours, report)
    if report.cost is not None:
        yield "in all", "costs", f"{report.cost:,.2f}"
    for warning in report.warnings:
        yield "note", warning, ""


def show_report(report: PhaseReport, console: Console) -> None:
    """Print a report."""
    if console.quiet:
        return
    if not console.is_terminal:
        for row in report_rows(report):
            console.file.write("\t".join(row).rstrip("\t") + "\n")
        console.file.flush()
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    last = ""
    for section, what, amount in report_rows(report):
        if section == "note":
            continue
        table.add_row(section if section != last else "", what, amount)
        last = section
    console.print(table, markup=False, highlight=False)
    for warning in report.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False, highlight=False)


def _phase(phase: PhaseEntry, report: PhaseReport) -> Iterator[tuple[str, str]]:
    parts = {"full": "every weight", "lora": "adapters", "selection": "a selection of weights"}
    numbers = f"{human_count(phase.trainable)} parameters, of a model of {human_count(phase.parameters)}"
    yield "trains", f"{parts[phase.trains]}: {numbers}"
    yield "steps", f"{phase.first_step:,} to {phase.last_step:,}"
    left = f"; {phase.leftover:,} more are less than a step" if phase.leftover else ""
    yield "tokens", f"{phase.tokens:,}{left}"
    for name, tokens in phase.tokens_per_source.items():
        yield f"tokens of {name}", f"{tokens:,}"
    rates = phase.rates
    yield "learning rate", f"{rates.first:.3g} at first, {rates.peak:.3g} at its peak, {rates.last:.3g} at last"
    memory, moved = phase.memory, phase.moved
    where = "memory to compute in" if report.shared else "device memory"
    yield where, f"{human_bytes(memory.device)} of {human_bytes(report.device_memory)}"
    yield "host memory", f"{human_bytes(memory.host)} of {human_bytes(report.host_memory)}"
    if memory.mapped:
        yield "in files mapped into memory", human_bytes(memory.mapped)
    yield "disk, for what it leaves", human_bytes(memory.disk)
    for what, nbytes in (
        ("read from disk", moved.read),
        ("copied to the device", moved.uploaded),
        ("copied from the device", moved.downloaded),
    ):
        if nbytes:
            yield what, human_bytes(nbytes)
    yield "takes", _duration(phase.hours, report)


def _duration(hours: float | None, report: PhaseReport) -> str:
    if hours is None:
        return "not known: `lema plan` measures"
    return f"{human_duration(3600 * hours)}, {HOURS_FROM[report.speeds]}"
