"""The commands that rewrite files: prepare a model, merge an adapter, export it to a server."""

import contextlib
import sys
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
    adapter: Annotated[
        Path, typer.Argument(help="Directory of a saved adapter; for gguf also of a model.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory for what is exported.")],
    layout: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="vllm|sglang|peft|per-expert|gguf",
            help="The server that reads it, or the layout.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory of the base model, if it is elsewhere by now."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="f32|f16|bf16|q8_0|q4_k_m|...",
            help="The type of weights in GGUF. Default: the 16-bit type nearest to the model's.",
        ),
    ] = None,
    adapter_alone: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter alone as GGUF, for --lora.")
    ] = False,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of llama.cpp. Default: that of LLAMA_CPP, or the PATH."
        ),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write an adapter in the layout that a server reads, and print the line that serves it; with
    `--for gguf` the merged model, or the adapter alone, for llama.cpp and Ollama.
    """
    from lema.convert.delta import DELTA_NAME, is_delta
    from lema.convert.serving.export import LAYOUTS
    from lema.lora.consent import check_code_is_named
    from lema.lora.files import settings_file

    if layout not in (*LAYOUTS, "gguf"):
        what = f"there is no layout {layout!r}"
        raise ConfigError(what, where="--for", how=f"choose {', '.join(LAYOUTS)}, gguf")
    naming = adapter / DELTA_NAME if is_delta(adapter) else settings_file(adapter)
    # a model in the place of the adapter is named by the user
    if trust_remote_code and base is None and (layout != "gguf" or naming != adapter):
        check_code_is_named(naming)
    if layout == "gguf":
        _export_gguf(
            adapter,
            out,
            quantize=quantize or "auto",
            adapter_alone=adapter_alone,
            llama_cpp=llama_cpp,
            base_dir=base,
            trust_remote_code=trust_remote_code,
        )
        return
    gguf_options = {
        "--quantize": quantize,
        "--adapter": adapter_alone or None,
        "--llama-cpp": llama_cpp,
    }
    if named := [name for name, value in gguf_options.items() if value is not None]:
        what = f"{named[0]} is an option of --for gguf"
        raise ConfigError(what, where=named[0], how="leave it out, or choose --for gguf")
    _export_layout(adapter, out, layout, base, trust_remote_code=trust_remote_code)


def _export_layout(
    adapter: Path, out: Path, layout: str, base: str | None, *, trust_remote_code: bool
) -> None:
    from lema.convert.serving.export import export_adapter

    options: dict[str, Any] = {"layout": layout, "base_dir": base}  # checked there
    exported = export_adapter(
        adapter, out, trust_remote_code=trust_remote_code, note=typer.echo, **options
    )
    if exported.experts:
        typer.echo(f"{exported.experts:,} adapters of single experts")
    typer.echo(f"wrote {out}")
    if exported.line:
        typer.echo(f"next: {exported.line}")


def _export_gguf(source: Path, out: Path, **options: Any) -> None:
    from lema.config.units import human_bytes
    from lema.convert.gguf.export import export_gguf

    def show(line: str) -> None:
        # the steps of a progress bar are for a terminal
        if not line.endswith("\r") or sys.stderr.isatty():
            typer.echo(line, nl=False, err=True)

    exported = export_gguf(source, out, note=typer.echo, show=show, **options)
    for note in exported.notes:
        typer.echo(note)
    size = human_bytes(exported.file.stat().st_size)
    typer.echo(f"wrote {out}: {exported.file.name} ({size}) and Modelfile")
    for line in exported.lines:
        typer.echo(f"next: {line}")
