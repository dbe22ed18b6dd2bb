"""`lema config import`: prints the same run of another trainer as a file of settings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.errors import ConfigError
from lema_tools.importing.recognition import peer_named, peer_of, refuse_settings
from lema_tools.importing.translation import Translation

__all__ = ["import_run", "translated"]

LOST_EXIT_CODE = 3


def import_run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | COMMAND...",
            help=(
                "A file of TRL, axolotl, LLaMA-Factory or torchtune; or, after --, a command "
                "line of theirs, such as `trl dpo --config dpo.yaml --beta 0.2`."
            ),
        ),
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="trl, axolotl, llamafactory or torchtune. Default: told by the keys.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What a file of TRL is for, which it does not say: sft, dpo, kto, reward, grpo.",
        ),
    ] = None,
    dataset_info: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="LLaMA-Factory's dataset_info.json. Default: the one in its dataset_dir.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: print it."),
    ] = None,
    accept_differences: Annotated[
        bool,
        typer.Option(
            "--accept-differences", help="Write a file also if the numbers become others."
        ),
    ] = False,
) -> None:
    """Translate a run of TRL, axolotl, LLaMA-Factory or torchtune into the same run of LEMA.
    Comments list what is the same, what differs, and what is not carried. Exit code 3: a value that
    changes the numbers cannot be carried, and nothing is written.
    """
    if output is not None and (output.exists() or output.is_symlink()):
        raise ConfigError(
            "this file exists already", where=str(output), how="choose another one: --output FILE"
        )
    options = {} if dataset_info is None else {"dataset_info": dataset_info}
    text, translation = translated(words, tool=tool, objective=objective, options=options)
    if translation.changes and not accept_differences:
        _refuse(translation)
    if output is None:
        typer.echo(text, nl=False)
        return
    with output.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
    typer.echo(f"{output}: {len(translation.same)} keys are the same")
    typer.echo(f"next: lema plan {output}")


def translated(
    words: Sequence[str],
    *,
    tool: str | None = None,
    objective: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[str, Translation]:
    """Translate a file or a command line.

    Args:
        words: the path of a file, or the words of a command line.
        tool: the trainer's folder in this package; None: told by the keys.
        objective: what the run minimises, where neither file nor command says it.
        options: further options of the import, such as `dataset_info`.

    Returns:
        The text of a file of settings, and the translation.

    Raises:
        ConfigError: a file cannot be read, the trainer is unclear, or the settings are refused.
    """
    from lema_tools.importing.checking import checked
    from lema_tools.importing.commandline import foreign_run
    from lema_tools.importing.writing import settings_text

    run = foreign_run(words, objective=objective, options=options or {})
    refuse_settings(run, words[0])
    peer = peer_of(run, words[0]) if tool is None else peer_named(tool)
    translation = checked(peer.translate(run))
    return settings_text(translation, peer.origin()), translation


def _refuse(translation: Translation) -> None:
    """Say which values change the numbers, and end with the exit code for that."""
    lines = [f"  {note.key}: {' '.join(note.why.split())}" for note in translation.changes]
    noun = "value" if len(lines) == 1 else "values"
    typer.echo(
        f"error: the run would become another one by {len(lines)} {noun} that cannot be carried",
        err=True,
    )
    for line in lines:
        typer.echo(json.dumps(line)[1:-1] if not line.isprintable() else line, err=True)
    typer.echo("  fix:   change them there, or take them with --accept-differences", err=True)
    raise typer.Exit(LOST_EXIT_CODE)
