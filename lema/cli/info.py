"""The commands that only show something: devices and settings."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import ConfigFile, PhaseNamed, Settings, config_of, phase_of
from lema.errors import BackendUnavailable, installing

__all__ = ["backends", "schema", "show"]


def backends() -> None:
    """List the devices that LEMA supports, say why one cannot run here, and where LEMA has run
    on it.
    """
    from lema.backend import available

    installed = list(available())
    if not installed:
        raise BackendUnavailable(
            "no backend is installed", how=f"{installing()} brings one for the CPU"
        )
    for backend in installed:
        typer.echo(
            f"{backend.name}  {'ok' if backend.ok else 'unavailable: ' + str(backend.reason)}"
        )
        if backend.proven:
            typer.echo(f"  proven: {backend.proven}")


def show(config: ConfigFile, phase: PhaseNamed = None, settings: Settings = None) -> None:
    """Print every setting of a run as YAML, defaults included; of phases all, or those that one
    of them has.
    """
    if (selected := phase_of(config, settings, phase)) is None:
        _print_yaml(config_of(config, settings).to_dict())
        return
    from lema.train.phases.file import all_settings

    _print_yaml(all_settings(selected[0], None if phase is None else selected[1]))


def _print_yaml(settings: Mapping[str, Any]) -> None:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # its annotation is narrower than its use
    yaml.dump(dict(settings), sys.stdout)


def schema(
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write it to .lema/schema.json here, and have VS Code use it."
        ),
    ] = False,
) -> None:
    """Print the JSON schema of a file of settings, from which editors complete YAML."""
    if write:
        from lema.cli.schemafiles import MODELINE, wire_editor, write_schema

        typer.echo(f"wrote {write_schema(Path())}")
        typer.echo(f"wrote {wire_editor(Path())}: VS Code with the YAML extension uses the schema")
        typer.echo(f"other editors: let a file begin with `{MODELINE}`")
        return
    from lema.train.phases.schema import file_schema

    typer.echo(json.dumps(file_schema(), indent=2))
