"""The commands that rewrite files: prepare a model, merge an adapter, export it to a server."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import Revision, Trust
from lema.errors import ConfigError

__all__ = ["export", "merge", "prepare"]


def prepare(
    model: Annotated[str, typer.Argument(help="Model directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="A directory or a .safetensors file.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="int8|fp8|nf4", help="Quantise the linear weights of the layers."),
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
        weights = own_weights(model, directory)
        dtype = checked.dtype
        prepared = prepare_model(
            weights,
            out,
            dtype,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            progress=display,
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
        typer.Option(
            metavar="nearest|stochastic",
            help="Rounding of merged weights; stochastic keeps small changes.",
        ),
    ] = "nearest",
    seed: Annotated[int, typer.Option(min=0, help="Seed of stochastic rounding.")] = 0,
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory of the base model, if it is elsewhere by now."),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Merge an adapter or a delta into its base model, and write the model in the hub's format."""
    from lema.config.units import parse_memory

    size = parse_memory(max_shard_size, 0)
    from lema.convert import apply_delta
    from lema.convert.delta import DELTA_NAME, is_delta
    from lema.lora.consent import check_code_is_named

    if is_delta(adapter):
        if rounding != "nearest":
            raise ConfigError(
                "a delta has complete weights", where="--rounding", how="leave it out"
            )
        if trust_remote_code and base is None:
            check_code_is_named(adapter / DELTA_NAME)
        apply_delta(adapter, out, base, size, trust_remote_code=trust_remote_code)
    else:
        from lema.convert import merge_adapter
        from lema.lora.files import settings_file

        if trust_remote_code and base is None:
            check_code_is_named(settings_file(adapter))
        # checked there
        options: dict[str, Any] = {
            "rounding": rounding,
            "seed": seed,
            "base_dir": base,
        }
        merge_adapter(
            adapter,
            out,
            max_shard_size=size,
            trust_remote_code=trust_remote_code,
            note=typer.echo,
            **options,
        )
    typer.echo(f"wrote {out}")


def export(
    adapter: Annotated[Path, typer.Argument(help="Directory of a saved adapter.")],
    out: Annotated[Path, typer.Argument(help="Directory for the exported adapter.")],
    layout: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="vllm|sglang|peft|per-expert",
            help="The server that reads it, or the layout.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory of the base model, if it is elsewhere by now."),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write an adapter in the layout that a server reads, and print the line that serves it."""
    from lema.convert.serving.export import export_adapter
    from lema.lora.consent import check_code_is_named
    from lema.lora.files import settings_file

    if trust_remote_code and base is None:
        check_code_is_named(settings_file(adapter))
    options: dict[str, Any] = {"layout": layout, "base_dir": base}  # checked there
    exported = export_adapter(
        adapter, out, trust_remote_code=trust_remote_code, note=typer.echo, **options
    )
    if exported.experts:
        typer.echo(f"{exported.experts:,} adapters of single experts")
    typer.echo(f"wrote {out}")
    if exported.line:
        typer.echo(f"next: {exported.line}")
