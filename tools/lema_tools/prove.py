"""`lema prove`: trains a model by streaming and whole, and certifies that the numbers are the
same.
"""

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.errors import ConfigError, MemoryLimitError
from lema.storage.regular import check_directory, check_separate

if TYPE_CHECKING:
    from lema_tools.proof.arms import Case

__all__ = ["prove", "write_model"]

LAYERS = 12
HIDDEN = 512
WORDS = 2048
DTYPES = "float32", "bfloat16", "float16"
# times the weights: what the whole model takes at least, with adapter, optimizer and activations
MORE = 1.2
SETTINGS = "sequence_chunk", "rope_parameters"


def prove(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|CONFIG]",
            help="Directory or cached hub id, or a YAML file of settings that names one. Default: "
            "make a small model.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Rows of a step, one at a time; 1 for models with dropout.")
    ] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 64,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 16,
    device: Annotated[
        str, typer.Option(help="Backend to run on, as `lema backends` lists them.")
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of rows and adapter.")] = 42,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the certificate.")
    ] = Path("lema-proof"),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the streamed run, sequence_chunk or rope_parameters; the same as "
            "--KEY VALUE. In place of the file's.",
        ),
    ] = None,
) -> None:
    """Train some steps streamed and with the whole model, and certify that the numbers are the
    same. Exit code 7: they differ; 4: the whole model, which the comparison needs, does not fit."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"there is no type {dtype!r} to prove in",
            where="--dtype",
            how=f"one of {', '.join(DTYPES)}",
        )
    from lema.backend import load
    from lema.config.printing import hush

    check_directory(output)
    model, chosen = _asked(model, settings)
    if model is not None:
        check_separate(output, [_resolved(model)])
    hush()
    load(device).close()  # before a model is made: a device that is not there is told at once
    from lema_tools.proof.arms import Case, run_in_subprocess
    from lema_tools.proof.certificate import (
        PromiseBroken,
        certify,
        check_replaceable,
        markdown,
        write,
    )

    check_replaceable(output)

    with tempfile.TemporaryDirectory() as scratch:
        model_path = write_model(Path(scratch) / "model") if model is None else _resolved(model)
        case = Case(
            *(str(model_path), scratch, device, dtype, steps, micro_batches, tokens, rank),
            seed=seed,
            **chosen,
        )
        check_memory(case)
        if model is None:
            typer.echo("this takes about three minutes of one CPU core", err=True)
        with _part(1, "training by streaming"):
            streamed = run_in_subprocess("streamed", case)
        # where a device is slow in the type of weights
        compared = replace(case, dtype=streamed.details["compute_dtype"])
        with _part(2, "training the whole model"):
            reference = run_in_subprocess("whole", compared)
        certificate = certify(case, streamed, reference, _command())
    certificate["case"]["model"] = model or "made"  # the path of what was made is gone
    files = write(certificate, output)
    typer.echo("\n".join(markdown(certificate)))
    typer.echo(f"\nwritten to {files[0]} and {files[1]}")
    if not certificate["holds"]:
        what = "the numbers of the streamed run differ from those of the whole model"
        raise PromiseBroken(
            what,
            where=str(files[0]),
            how="please report it, with that file and `lema doctor --json`",
        )


def _asked(source: str | None, assignments: list[str] | None) -> tuple[str | None, dict[str, Any]]:
    """Return the model and the settings of the streamed run that a proof may have; None: a small
    model is to be made.

    Raises:
        ConfigError: another setting is asked for, or chunks whose size only a plan knows.
    """
    from lema.cli.arguments import config_of, settings_of

    chosen: dict[str, Any] = settings_of(assignments)
    if unknown := sorted(chosen.keys() - set(SETTINGS)):
        raise ConfigError(
            f"a proof has no setting {unknown[0]}",
            where=f"--set {unknown[0]}",
            how=f"it takes {' and '.join(SETTINGS)}; `lema prove --help` has its other options",
        )
    if source is not None and source.endswith((".yaml", ".yml")) and Path(source).is_file():
        config = config_of(Path(source), None)
        chosen = {name: getattr(config, name) for name in SETTINGS} | chosen
        if others := sorted(config.model_fields_set - {*SETTINGS, "model_name_or_path"}):
            typer.echo(f"not part of the proof: {', '.join(others)}", err=True)
        source = config.model_name_or_path
    if chosen.get("sequence_chunk") == "auto":
        raise ConfigError(
            "a proof has chunks of a certain size",
            where="sequence_chunk: auto",
            how="give the tokens of one, such as --set sequence_chunk=16",
        )
    return source, chosen


@contextmanager
def _part(number: int, what: str) -> Iterator[None]:
    """Say which of the two parts runs: with a clock at a terminal, elsewhere by a line as it begins
    and one as it ends."""
    from rich.console import Console

    from lema.config.printing import draws
    from lema.config.units import human_duration

    console = Console(stderr=True)
    began = time.monotonic()
    text = f"part {number} of 2: {what}"
    if draws(console):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield
    else:
        typer.echo(text, err=True)
        yield
    typer.echo(f"{text}: done after {human_duration(time.monotonic() - began)}", err=True)


def check_memory(case: "Case") -> None:
    """Raise a MemoryLimitError where the weights alone leave the whole model no room, on the
    device or in the host.
    """
    from contextlib import closing

    from lema.backend.hostmemory import memory_available
    from lema.config.units import human_bytes
    from lema.model.partition import open_backend
    from lema.plan.planner import machine_state_of, planner_of

    config = case.settings
    planner = planner_of(config, machine_state=machine_state_of(config), strict=False)
    needed = int(MORE * planner.blueprint.model_bytes)
    with closing(open_backend(config)) as backend:
        stats = backend.memory()
        host = memory_available()
    free = host if stats.shared else min(host, stats.total if stats.free is None else stats.free)
    if needed > free:
        what = (
            f"the whole model takes {human_bytes(needed)} at least, and {human_bytes(free)} "
            "are free"
        )
        how = "the comparison needs the whole model in memory: use a smaller model of its kind"
        raise MemoryLimitError(what, where=case.model, how=how)


def write_model(directory: Path, *, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """Write a Llama with random weights, 150 MB in fp32 unless it is smaller, in several files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lema_tools.demo.run import without_bars

    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size="50MB")
    return directory


def _resolved(model: str) -> Path:
    from lema.storage import resolve_model

    return Path(resolve_model(model))


def _command() -> str:
    return shlex.join(["lema", *sys.argv[1:]])
