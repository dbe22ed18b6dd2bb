"""The commands that rewrite files: prepare a model, merge an adapter, consolidate or cut up shards."""

import contextlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import Revision, Trust
from lema.errors import ConfigError

__all__ = ["consolidate", "merge", "prepare", "shard"]

FORMATS = sorted(point.name for point in entry_points(group="lema.shard_formats"))


def prepare(
    model: Annotated[str, typer.Argument(help="Model directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="A directory, or one .safetensors file.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="int8|fp8|nf4", help="Store the layers' linear weights quantised.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Rewrite a model as one file in the order in which layers are visited."""
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
    adapter: Annotated[Path, typer.Argument(help="Directory of a saved adapter, or of a delta.")],
    out: Annotated[Path, typer.Argument(help="Directory for the merged model.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest file, e.g. 5GB.")] = "5GB",
    rounding: Annotated[
        str, typer.Option(metavar="nearest|stochastic", help="How merged weights are rounded.")
    ] = "nearest",
    seed: Annotated[int, typer.Option(min=0, help="Seed of stochastic rounding.")] = 0,
    base: Annotated[str | None, typer.Option(metavar="DIR", help="Where a delta's base is now.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write the model with an adapter merged into its weights, or with a delta's tensors, in the hub's format."""
    from lema.config.units import parse_memory

    size = parse_memory(max_shard_size, 0)
    from lema.convert import apply_delta
    from lema.convert.delta import is_delta

    if is_delta(adapter):
        if rounding != "nearest":
            raise ConfigError("a delta holds weights as they are", where="--rounding", how="leave it out")
        apply_delta(adapter, out, base, size, trust_remote_code=trust_remote_code)
    else:
        if base is not None:
            how = "leave it out, or change model_name_or_path in its lema_config.json"
            raise ConfigError("an adapter names its base itself", where="--base", how=how)
        from lema.convert import merge_adapter

        drawn: dict[str, Any] = {"rounding": rounding, "seed": seed}  # checked there
        merge_adapter(adapter, out, max_shard_size=size, trust_remote_code=trust_remote_code, **drawn)
    typer.echo(f"wrote {out}")


def consolidate(
    shards: Annotated[Path, typer.Argument(metavar="IN", help="Directory of a sharded adapter, or above it.")],
    out: Annotated[Path, typer.Argument(help="Directory for the adapter in PEFT's format.")],
    kv_layout: Annotated[
        str | None, typer.Option(metavar="tile|interleave", help="How replicas of keys lie, if the shards do not say.")
    ] = None,
    take_first: Annotated[
        bool, typer.Option("--take-first", help="Where replicas differ, take the first rank's; it is told where.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The base model it must fit, if not the one it names.")] = None,
) -> None:
    """Put the shards of an adapter together, as files that PEFT loads."""
    from lema.lora.consolidate import consolidate_adapter

    made = consolidate_adapter(shards, out, kv_layout=kv_layout, check=not take_first, model=model)
    for name, found in made.differing.items():
        typer.echo(f"replicas differ in {name}: {'; '.join(map(str, found))}", err=True)
    fits = f"of the shapes of {made.base}" if made.base else "not compared with the base model, which is not here"
    typer.echo(f"wrote {out}: {made.num_tensors} tensors, of {made.tp} ranks, {fits}")


def shard(
    adapter: Annotated[Path, typer.Argument(metavar="IN", help="Directory of an adapter in PEFT's format.")],
    out: Annotated[Path, typer.Argument(help="Directory for the shards.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the tensor-parallel group.")],
    kv_layout: Annotated[
        str, typer.Option(metavar="tile|interleave", help="How keys lie that are replicated for want of heads.")
    ] = "tile",
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model; by default the one the adapter names.")
    ] = None,
    format: Annotated[str, typer.Option(metavar="|".join(FORMATS), help="Whose shards they are to be.")] = "lema",
    trust_remote_code: Trust = False,
) -> None:
    """Cut an adapter up for a tensor-parallel group, along the plan of its base model."""
    from lema.lora.consolidate import shard_adapter

    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    shard_adapter(adapter, out, tp, kv_layout=kv_layout, model=model, format=format, **trust)
    typer.echo(f"wrote {out}: {tp} ranks")
