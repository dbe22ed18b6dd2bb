"""`lema consolidate` and `lema shard`: an adapter's shards become PEFT's files, and the reverse;
names of one class.
"""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import Trust

__all__ = ["consolidate", "shard"]

FORMATS = sorted(point.name for point in entry_points(group="lema.shard_formats"))


def consolidate(
    shards: Annotated[
        Path, typer.Argument(metavar="IN", help="Directory of a sharded adapter, or its parent.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the adapter in PEFT's format.")],
    kv_layout: Annotated[
        str | None,
        typer.Option(metavar="tile|interleave", help="Order of replicated keys, if not recorded."),
    ] = None,
    take_first: Annotated[
        bool,
        typer.Option(
            "--take-first",
            help="If replicas differ, take the first rank's and list the differences.",
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Base model. Default: the one that the adapter names.")
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="both|published|text",
            help=(
                "Write an adapter in PEFT's format again, with the names of one class, or of both."
            ),
        ),
    ] = None,
) -> None:
    """Convert the shards of an adapter into files that PEFT loads."""
    from lema_tools.shards.convert import consolidate_adapter, rename_adapter

    if names is not None:
        rename_adapter(shards, out, names, model=model)
        typer.echo(
            f"wrote {out}: with the names of "
            f"{'each class' if names == 'both' else f'the {names} class'}"
        )
        return
    consolidated = consolidate_adapter(
        shards, out, kv_layout=kv_layout, check=not take_first, model=model
    )
    for name, differences in consolidated.differing.items():
        typer.echo(f"replicas differ in {name}: {'; '.join(map(str, differences))}", err=True)
    fits = (
        f"with the shapes of {consolidated.base}"
        if consolidated.base
        else "not compared with the base model, which was not found"
    )
    typer.echo(
        f"wrote {out}: {consolidated.num_tensors} tensors, of {consolidated.tp} ranks, {fits}"
    )


def shard(
    adapter: Annotated[
        Path, typer.Argument(metavar="IN", help="Directory of an adapter in PEFT's format.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the shards.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the tensor-parallel group.")],
    kv_layout: Annotated[
        str, typer.Option(metavar="tile|interleave", help="Order of keys that are replicated.")
    ] = "tile",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model. Default: the one that the adapter names."),
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="|".join(FORMATS), help="Format of the shards.")
    ] = "lema",
    trust_remote_code: Trust = False,
) -> None:
    """Divide an adapter into shards for a tensor-parallel group, along the plan of its base
    model.
    """
    from lema_tools.shards.convert import shard_adapter

    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    shard_adapter(adapter, out, tp, kv_layout=kv_layout, model=model, format=format, **trust)
    typer.echo(f"wrote {out}: {tp} ranks")
