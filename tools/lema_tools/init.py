"""`lema init`: writes a file of settings for a model and a machine, with what the plan chose and
why.

What is not given it reads of this machine, and asks of a user at a terminal.
"""

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lema.cli.libraries import import_libraries
from lema.errors import ConfigError, LemaError, MemoryLimitError

if TYPE_CHECKING:
    from lema_tools.models.choices import Choice
    from lema_tools.starting.machine import Here
    from lema_tools.starting.rows import DataRows

__all__ = ["init"]

MODEL = "Qwen/Qwen3-8B"  # that is proposed where the hub's cache has none
DATA = ("*.jsonl", "*.parquet", "*.csv", "*.json", "*.txt")  # what is proposed of files here
HOW = "`lema init MODEL --data FILE`; at a terminal `lema init` asks"


def init(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory, cached hub id, or name of docs/coverage.md. Default: it is asked.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows to train on. Default: it is asked."),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the device, such as 24GB. Default: this machine's."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory of a run. Default: what is free here."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("my.yaml"),
    max_length: Annotated[
        int | None,
        typer.Option(min=2, metavar="TOKENS", help="Longest row. Default: 1024."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Machine profile for the speeds. Default: the one that is most like the device."
        ),
    ] = None,
) -> None:
    """Write a file of settings for a model and a machine, with the plan's choices. Exit code 4:
    nothing fits.
    """
    if output.exists() or output.is_symlink():
        raise ConfigError(
            "this file exists already", where=str(output), how="choose another one: --output FILE"
        )
    asks = at_terminal()
    if model is None:
        model = _asked("Model (a directory, or a hub id)", _proposed_model(), "MODEL", asks=asks)
    if data is None:
        proposed = _proposed_data()
        data = Path(_asked("Data (a file of rows)", proposed, "--data", asks=asks))
    # a byte of a name, as Python has it
    if any("\udc80" <= letter <= "\udcff" for letter in f"{model}{data}{output}"):
        raise ConfigError(
            "a name is no UTF-8, and the file of settings would have it", where=f"--output {output}"
        )
    if not data.exists():
        raise ConfigError(
            "there is no such file", where=f"--data {data}", how="use an existing file"
        )
    sizes = [
        None if size is None else _size(option, size)
        for option, size in (("--device-memory", device_memory), ("--host-memory", host_memory))
    ]
    import_libraries(context, trusted=False)
    from lema.plan.machine import profile as find_profile
    from lema.storage.modelfiles import has_processor
    from lema.storage.regular import check_separate

    if profile is not None:
        find_profile(profile)
    from lema_tools.starting.machine import here
    from lema_tools.starting.rows import look_at

    machine = here(output)
    typer.echo(machine.line)
    with contextlib.ExitStack() as stack:
        directory, name, needs = _model(model, stack)
        check_separate(output, [directory, data])
        rows = look_at(data, sees_images=has_processor(directory))
        typer.echo(f"{data}: {rows.line}")
        choice, host_reason = _choice(
            directory,
            machine,
            sizes[0],
            sizes[1],
            profile,
            has_images=rows.has_images,
            max_length=max_length,
        )
    _write(output, choice, (name, needs), data, rows, host_reason)
    for line in _summary(output, choice, machine):
        typer.echo(line)


def at_terminal() -> bool:
    """Whether a user can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _asked(question: str, proposed: str | None, where: str, *, asks: bool) -> str:
    """Return what a user answers; where nobody can be asked, a `ConfigError` names the option."""
    if not asks:
        raise ConfigError(f"{where} is not given", where=where, how=HOW)
    answer: str = typer.prompt(question, default=proposed)
    return answer


def _proposed_model() -> str:
    from lema_tools.starting.names import cached_ids

    demo = Path("lema-demo/model")
    return str(demo) if demo.is_dir() else next(iter(cached_ids()), MODEL)


def _proposed_data() -> str | None:
    """Return the first file of rows in this directory, or of the demo; None: there is none."""
    folders = (Path(), Path("data"), Path("lema-demo/data"))
    files = (
        file for folder in folders for pattern in DATA for file in sorted(folder.glob(pattern))
    )
    return next((str(file) for file in files if file.is_file()), None)


def _size(option: str, size: str) -> int:
    from lema.config.units import memory_bytes

    try:
        return memory_bytes(size, 0)
    except ValueError as error:
        raise ConfigError(
            str(error), where=f"{option} {size}", how="a size such as 24GB"
        ) from error


def _choice(
    directory: Path,
    machine: "Here",
    device_memory: int | None,
    host_memory: int | None,
    profile: str | None,
    *,
    has_images: bool,
    max_length: int | None,
) -> "tuple[Choice, str]":
    """Return what is chosen for a model, and where the limit of host memory is from."""
    from lema.config.units import human_bytes
    from lema_tools.models.choices import choices, size_text

    if device_memory is None:
        device_memory = machine.device_memory
        profile = profile or machine.profile
    host = size_text(host_memory or machine.host_memory)
    reason = "This is what --host-memory says."
    if host_memory is None:
        reason = (
            f"Of the {human_bytes(machine.host_total)} of this machine, "
            f"{human_bytes(machine.host_free)} were free."
        )
    modalities: Literal["text", "all"] = "all" if has_images else "text"
    (choice,) = choices(directory, [device_memory], profile, host, modalities, max_length)
    if isinstance(choice, MemoryLimitError):
        raise choice
    return choice, reason


def _write(
    output: Path,
    choice: "Choice",
    model: tuple[str, str],
    data: Path,
    rows: "DataRows",
    host_reason: str,
) -> None:
    """Write the file of settings, and the schema by which an editor completes it. `model` is its
    name, and what has to be done to it first."""
    from lema.cli.schemafiles import MODELINE, write_schema
    from lema.config import LemaConfig
    from lema_tools.models.choices import yaml_lines

    name, needs = model
    command = shlex.join(["lema", *sys.argv[1:]])
    lines = yaml_lines(
        choice,
        name,
        str(data),
        f"output/{output.stem}",
        command,
        needs,
        rows=rows.setting_lines(),
        host_reason=host_reason,
        learning_rate=LemaConfig(name, **rows.settings).learning_rate,
    )
    write_schema(output.absolute().parent)
    with output.open("x", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in (MODELINE, *lines))


def _summary(output: Path, choice: "Choice", machine: "Here") -> list[str]:
    """Return what a user is told of the choice."""
    from lema.config.units import human_bytes

    stay = (
        f"{choice.residents} of {choice.layers} layers stay on the device."
        if choice.residents
        else "No layer has to stay on the device, and layers stream."
    )
    lines = [
        f"{output}: the plan takes {human_bytes(choice.device_bytes)} of "
        f"{choice.settings['device_memory']} of device memory. {stay}",
        f"It predicts {choice.tokens_per_second:,.0f} tokens/s with the speeds of the profile "
        f"{choice.profile}; `lema plan {shlex.quote(str(output))}` measures this machine.",
    ]
    if machine.disk_free is not None and choice.model_bytes > machine.disk_free:
        lines.append(
            f"The model's files take {human_bytes(choice.model_bytes)}, and "
            f"{human_bytes(machine.disk_free)} of the disk are free: a model that is not here yet "
            "does not fit."
        )
    lines += [f"note: {note}" for note in choice.notes]
    return [*lines, f"next: lema train {shlex.quote(str(output))}"]


def _model(model: str, stack: contextlib.ExitStack) -> tuple[Path, str, str]:
    """Return where the model is described, what the settings call it, and what has to be done to
    it first. Errors name models that may be meant.
    """
    from lema.storage import resolve_model
    from lema_tools.models.checkpoints import named
    from lema_tools.models.published import write_hollow
    from lema_tools.starting.names import where_to_look

    try:
        return Path(resolve_model(model, download=False)), model, ""
    except LemaError as error:
        if (checkpoint := named(model)) is None:
            error.explain(where_to_look(model))
            raise
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return write_hollow(checkpoint, scratch / "model"), checkpoint.hub_id, checkpoint.needs
