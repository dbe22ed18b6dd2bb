"""The merged model that `lema chat` and `lema generate` run in the place of an adapter."""

from pathlib import Path
from typing import Annotated

import typer

from lema.errors import ConfigError

__all__ = ["Merged", "check_merged", "merged_model"]

Merged = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Run the merged model in DIR, which is written first if it is not there.",
    ),
]


def check_merged(base: bool, merged: Path | None) -> None:
    """Refuse, with `ConfigError`, to leave the adapter out of a merged model."""
    if base and merged is not None:
        raise ConfigError(
            "a merged model has no adapter to leave out", where="--base, --merged", how="give one"
        )


def merged_model(
    source: Path, out: Path, settings: list[str] | None, trust_remote_code: bool
) -> Path:
    """Return the directory of the merged model, which is written if it is not there.

    Args:
        source: the directory of an adapter, or a file of the settings of a run.
        out: where the merged model is, or will be.
        settings: those of `--set`.
        trust_remote_code: whether code beside the base may run.

    Raises:
        AdapterError: there is no adapter.
        ConfigError: `out` has a model that is not the adapter's merge as the adapter is now.
    """
    from lema.cli.arguments import config_of
    from lema.convert import merge_adapter
    from lema.convert.mergemark import check_merge

    adapter = source if source.is_dir() else Path(config_of(source, settings).output_dir)
    if (out / "config.json").is_file():
        check_merge(out, adapter)
        return out
    typer.echo(f"merging {adapter} into {out}", err=True)
    return merge_adapter(adapter, out, trust_remote_code=trust_remote_code)
