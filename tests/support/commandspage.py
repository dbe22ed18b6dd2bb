"""Makes docs/commands.md, the reference of the command line, from the commands themselves.

PYTHONPATH=.:backends:tests/support python tests/support/commandspage.py > docs/commands.md
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from lema.cli.app import app

_HEAD = """# Commands

This page lists every command with its arguments and options. `-h` after a command prints the same.
`python tests/support/commandspage.py > docs/commands.md` generates the page.

`CONFIG` is the YAML file of a run or of phases. Commands that read settings take `--set KEY=VALUE`, or a setting's own
name, as in `--learning-rate 1e-4`: [settings](settings.md) lists them. Commands that open a model take
`--trust-remote-code`, which allows a model's own code to run. The tables below leave out both.
`lema --debug COMMAND` shows the traceback of an error, and [troubleshooting](troubleshooting.md) explains
the exit codes."""

SHARED = ("settings", "trust_remote_code")  # which the head explains


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from _HEAD.splitlines()
    group = typer.main.get_command(app)
    yield from _commands(group, "lema", group.make_context("lema", [], resilient_parsing=True))


def _commands(group: Any, path: str, context: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        within = f"{path} {name}"
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        if isinstance(command, TyperGroup):
            yield from _commands(command, within, inner)
            continue
        usage = " ".join(command.collect_usage_pieces(inner))
        yield from (
            "",
            f"## {within}",
            "",
            f"`{within} {usage}`: {' '.join((command.help or '').split())}",
        )
        rows = [_row(one, inner) for one in command.params if one.name not in SHARED]
        if rows:
            yield from ("", "| argument or option | meaning |", "|---|---|", *rows)


def _row(parameter: Any, context: Any) -> str:
    name, told = parameter.get_help_record(context)
    # the type, where the command gives no better word
    name = re.sub(r" <[a-z\[\] ]+>", "", " ".join(name.split()))
    cells = (f"`{name}`", " ".join(told.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
