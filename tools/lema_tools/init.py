"""`lema init`: writes a file of settings for a model and a device, with what the plan chose and
why.
"""

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from lema.cli.libraries import import_libraries
from lema.errors import ConfigError, LemaError, MemoryLimitError

__all__ = ["init"]


def init(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Directory, cached hub id, or name of docs/coverage.md."
        ),
    ],
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of the device, such as 24GB.")
    ],
    data: Annotated[Path, typer.Option(metavar="FILE", help="Rows to train on.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("my.yaml"),
    profile: Annotated[
        str | None,
        typer.Option(
            help="Machine profile for the speeds. Default: the one that is most like the device."
        ),
    ] = None,
) -> None:
    """Write a file of settings for a model and a device, with the plan's choices. Exit code 4:
    nothing fits.
    """
    if output.exists() or output.is_symlink():
        raise ConfigError(
            "this file exists already", where=str(output), how="choose another one: --output FILE"
        )
    # a byte of a name, as Python has it
    if any("\udc80" <= letter <= "\udcff" for letter in f"{model}{data}{output}"):
        raise ConfigError(
            "a name is no UTF-8, and the file of settings would have it", where=f"--output {output}"
        )
    if not data.exists():
        raise ConfigError(
            "there is no such file", where=f"--data {data}", how="use an existing file"
        )
    import_libraries(context, trusted=False)
    from lema.config.units import memory_bytes
    from lema.plan.machine import profile as find_profile
    from lema.storage.regular import check_separate

    if profile is not None:
        find_profile(profile)
    try:
        memory = memory_bytes(device_memory, 0)
    except ValueError as error:
        raise ConfigError(
            str(error), where=f"--device-memory {device_memory}", how="a size such as 24GB"
        ) from error
    from lema_tools.models.choices import choices, yaml_lines

    with contextlib.ExitStack() as stack:
        directory, name, needs = _model(model, stack)
        check_separate(output, [directory, data])
        (choice,) = choices(directory, [memory], profile)
    if isinstance(choice, MemoryLimitError):
        raise choice
    command = shlex.join(["lema", *sys.argv[1:]])
    lines = yaml_lines(choice, name, str(data), f"output/{output.stem}", command, needs)
    with output.open("x", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
    typer.echo(
        f"{output}: {choice.device_bytes / 1e9:.1f} GB of {device_memory}, "
        f"{choice.residents} layers stay there;"
    )
    typer.echo(
        f"{choice.tokens_per_second:,.0f} tokens/s predicted with the profile {choice.profile}"
    )
    typer.echo(f"next: lema train {shlex.quote(str(output))}")


def _model(model: str, stack: contextlib.ExitStack) -> tuple[Path, str, str]:
    """Return where the model is described, what the settings call it, and what has to be done to
    it first.
    """
    from lema.storage import resolve_model
    from lema_tools.models.checkpoints import named
    from lema_tools.models.published import write_hollow

    try:
        return Path(resolve_model(model, download=False)), model, ""
    except LemaError:
        if (checkpoint := named(model)) is None:
            raise
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return write_hollow(checkpoint, scratch / "model"), checkpoint.hub_id, checkpoint.needs
