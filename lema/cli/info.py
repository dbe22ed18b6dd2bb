"""The commands that only show something: models, devices, this machine, settings."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import ConfigFile, Revision, Settings, Trust, config_of
from lema.errors import BackendUnavailable

__all__ = ["backends", "doctor", "import_file", "models", "schema", "show"]


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TYPE|MODEL", help="Types, or directories and cached hub ids.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/models.md.")] = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """List the types of models: which stream, what adapters train in them, and why one does not stream."""
    from rich.console import Console

    from lema.cli.modeltable import json_text, markdown, show_models, survey_all

    rows = survey_all(names or [], revision=revision, trust_remote_code=trust_remote_code)
    if as_json or as_markdown:
        typer.echo((json_text if as_json else markdown)(rows), nl=as_json)
    else:
        show_models(rows, Console(highlight=False))


def backends() -> None:
    """List the devices lema can run on, and why one cannot run here."""
    from lema.backend import available

    known = list(available())
    if not known:
        raise BackendUnavailable("no backend is installed", how="pip install lema brings one for the CPU")
    for backend in known:
        typer.echo(f"{backend.name}  {'ok' if backend.ok else 'unavailable: ' + str(backend.reason)}")


def doctor(
    directory: Annotated[
        Path,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="Whose disk is measured; nothing stays there."),
    ] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes seconds: timing disk and link.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether this machine is ready: versions, limits, devices, link, disk, and how to mend what is not."""
    from rich.console import Console

    from lema.cli.doctor.report import examine, show_report

    waiting = Console(stderr=True)
    with waiting.status("looking") if waiting.is_terminal else contextlib.nullcontext():
        report = examine(directory, measure=not quick)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_report(report, Console(highlight=False))
    raise typer.Exit(report.exit_code)


def show(config: ConfigFile, settings: Settings = None) -> None:
    """Print every setting of a run as YAML, defaults included."""
    _print_yaml(config_of(config, settings).to_dict())


def import_file(file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of axolotl or TRL.")]) -> None:
    """Print a file of axolotl or TRL as settings of lema; comments say what was not carried over, and why."""
    from lema.config import LemaConfig
    from lema.config.foreign import imported
    from lema.config.problems import SettingsError
    from lema.config.yaml import read_yaml

    settings, notes = imported(read_yaml(file).values, LemaConfig.defaults())
    try:
        LemaConfig(**settings)
    except SettingsError as error:
        for problem in error.problems:
            if problem.key in settings:
                notes[problem.key] = str(problem)
                del settings[problem.key]
    _print_yaml(settings)
    for key, why in notes.items():
        typer.echo(f"# {key}: not carried over; {why}")


def _print_yaml(settings: Mapping[str, Any]) -> None:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # its annotation is narrower than its use
    yaml.dump(dict(settings), sys.stdout)


def schema() -> None:
    """Print the JSON schema of all settings, from which editors complete YAML."""
    from lema.config import LemaConfig

    typer.echo(json.dumps(LemaConfig.json_schema(), indent=2))
