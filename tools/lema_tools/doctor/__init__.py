"""`lema doctor`: whether this machine is ready (versions, limits, devices, disk), and how to fix
what is not.
"""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    directory: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Directory on the disk to measure. Nothing remains there.",
        ),
    ] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not time disk and link, which takes seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine is ready: versions, limits, devices, link and disk, and say how
    to fix problems.
    """
    from rich.console import Console

    from lema_tools.doctor.report import examine, show_report

    waiting = Console(stderr=True)
    with waiting.status("looking") if waiting.is_terminal else contextlib.nullcontext():
        report = examine(directory, measure=not quick)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_report(report, Console(highlight=False))
    raise typer.Exit(report.exit_code)
