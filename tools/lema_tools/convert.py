"""The commands that rewrite files: prepare a model, merge an adapter."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import Revision, Trust
from lema.errors import ConfigError

__all__ = ["merge", "prepare"]


def prepare(
    model: Annotated[str, typer.Argument(help="Model directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="A directory or a .safetensors file.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's.")] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="int8|fp8|nf4", help="Quantise the linear weights of the layers.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write a model as one file, with the layers in the order in which they are read."""
    from lema.config import LemaConfig

    checked = LemaConfig(model, dtype=dtype, revision=revision)
    from lema.cli.progress import ByteProgress
    from lema.convert.prepare import prepare as prepare_model
    from lema.storage import resolve_model
    from lema.storage.hub import own_weights

    directory = resolve_model(model, revision=revision, trust_remote_code=trust_remote_code)
    with contextlib.closing(ByteProgress()) as display:
        weights, dtype = own_weights(model, directory), checked.dtype
        prepared = prepare_model(
            weights, out, dtype, quantize=quantize, trust_remote_code=trust_remote_code, progress=display
        )
    for note in prepared.notes():
        typer.echo(note)
    if prepared.precision:
        from rich.console import Console

        from lema.convert.quantize import show

        show(prepared.precision, Console(highlight=False))
    typer.echo(f"wrote {out}: {display.summary()}")


def merge(
    adapter: Annotated[Path, typer.Argument(help="Directory of a saved adapter or delta.")],
    out: Annotated[Path, typer.Argument(help="Directory for the merged model.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest file, e.g. 5GB.")] = "5GB",
    rounding: Annotated[
        str,
        typer.Option(metavar="nearest|stochastic", help="Rounding of merged weights; stochastic keeps small changes."),
    ] = "nearest",
    seed: Annotated[int, typer.Option(min=0, help="Seed of stochastic rounding.")] = 0,
    base: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of a delta's base model.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Merge an adapter or a delta into its base model, and write the model in the hub's format."""
    from lema.config.units import parse_memory

    size = parse_memory(max_shard_size, 0)
    from lema.convert import apply_delta
    from lema.convert.delta import is_delta

    if is_delta(adapter):
        if rounding != "nearest":
            raise ConfigError("a delta has complete weights", where="--rounding", how="leave it out")
        apply_delta(adapter, out, base, size, trust_remote_code=trust_remote_code)
    else:
        if base is not None:
            how = "leave it out, or change model_name_or_path in its lema_config.json"
            raise ConfigError("an adapter names its base model itself", where="--base", how=how)
        from lema.convert import merge_adapter

        drawn: dict[str, Any] = {"rounding": rounding, "seed": seed}  # checked there
        merge_adapter(adapter, out, max_shard_size=size, trust_remote_code=trust_remote_code, note=typer.echo, **drawn)
    typer.echo(f"wrote {out}")
