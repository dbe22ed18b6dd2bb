"""The `lema` command: each verb reads its arguments and calls the library; errors become exit
codes.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lema.cli import info as tellcommands
from lema.cli.arguments import (
    ConfigFile,
    Settings,
    Trust,
    Verb,
    Verbs,
    check_written,
    config_of,
    phase_file_of,
)
from lema.cli.exitcodes import run
from lema.cli.interrupts import ending_on_interrupt
from lema.cli.kernels import hide_kernels
from lema.cli.libraries import import_libraries
from lema.cli.threads import let_threads_sleep
from lema.config.printing import hush
from lema.errors import ConfigError, MemoryLimitError, Stopped

if TYPE_CHECKING:
    from rich.console import Console

    from lema.config import LemaConfig
    from lema.train.phases.file import PhaseFile

__all__ = ["app", "main"]

app: typer.Typer  # the whole command line, which is put together when it is first asked for
_core_app = typer.Typer(
    name="lema",
    cls=Verbs,
    help="Fine-tune language models larger than the device's memory.",
    epilog="Exit codes: 0 done, 2 config, 3 data, 4 memory, 5 non-finite or nothing learnt, 6 "
    "disk, 7 `lema prove` "
    "found a difference, 75 stopped with a checkpoint, 130 Ctrl-C.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    name="config",
    cls=Verbs,
    help="Show the settings of a run, list all settings, or translate a file of another trainer.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_core_app.add_typer(config_app)


def main() -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    let_threads_sleep()
    hide_kernels()
    hush()  # `peft` and `transformers` import any optional package that is installed
    with ending_on_interrupt():
        sys.exit(run(_command_line(sys.argv[1:]), sys.argv[1:], by="main"))


def _command_line(words: Sequence[str]) -> typer.Typer:
    """Return the command line with the verb that is asked for; with all verbs, if it is none of
    those that there are.

    Verbs of other packages take as long to find and import as its own.
    """
    verb = words[0] if words else ""
    if verb == config_app.info.name and words[1:2] not in OWN_OF_CONFIG:
        _add_verbs_of_config()
    if verb in OWN:
        return _core_app
    if not (points := entry_points(group="lema.verbs", name=verb)):
        return _full_app()
    for point in points:
        _add_verb(point)
    return _core_app


def _full_app() -> typer.Typer:
    """Return the command line with the verbs of other packages."""
    for point in sorted(entry_points(group="lema.verbs"), key=lambda point: point.name):
        _add_verb(point)
    _add_verbs_of_config()
    return _core_app


@cache
def _add_verbs_of_config() -> None:
    """Add the verbs of `lema config` that other packages have, once."""
    for point in sorted(entry_points(group="lema.config_verbs"), key=lambda point: point.name):
        config_app.command(name=point.name, cls=Verb)(point.load())


@cache
def _add_verb(point: EntryPoint) -> None:
    """Add a verb of another package, once."""
    _core_app.command(name=point.name, cls=Verb)(point.load())


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _full_app()


def _print_version(is_requested: bool) -> None:
    if is_requested:
        import lema

        typer.echo(f"lema {lema.__version__}")
        raise typer.Exit


@_core_app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Fine-tune language models larger than the device's memory."""


TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Record every read, upload and computation, for ui.perfetto.dev."
    ),
]


def train(
    context: typer.Context,
    config: ConfigFile,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest valid checkpoint.")
    ] = False,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="With --resume: continue with an empty optimizer."),
    ] = False,
    settings: Settings = None,
    trust_remote_code: Trust = False,
    trace: TraceFile = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Phases: start from this checkpoint, or train adapters on this model.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the whole plan instead of one sentence.")
    ] = False,
) -> None:
    """Fine-tune with the settings of a YAML file. If it has `phases`, run them in order."""
    from lema.backend.trace import BEGIN
    from lema.train.phases.file import has_phases

    phased = has_phases(config)
    _check_options(phased=phased, resume=resume, weights_only=weights_only, start=start)
    if phased:
        file = phase_file_of(config, settings)
    else:
        checked = config_of(config, settings)
    named = file.config if phased else checked
    check_written("--trace", trace, named, config, begins=[BEGIN.encode()])
    import_libraries(context, named, trusted=trust_remote_code)
    from rich.console import Console

    from lema.backend.trace import tracing
    from lema.cli.progress import ProgressDisplay, progress_callback

    console = Console(highlight=False)  # one for both: a bar makes room for the lines
    with contextlib.closing(ProgressDisplay(console)) as display, tracing(trace) as recorded:
        begin = (
            _run_of_phases(file, start, verbose=verbose)
            if phased
            else _plain_run(checked, console if verbose else None, weights_only=weights_only)
        )
        try:
            begin(
                resume=resume,
                console=console,
                callbacks=[progress_callback(display)],
                trust_remote_code=trust_remote_code,
                trace=recorded,
            )
        except Stopped as stopped:
            trust = ["--trust-remote-code"] if trust_remote_code else []
            stopped.explain(resume_command(config, settings, trust))
            raise


def resume_command(
    config: Path, settings: Sequence[str] | None = None, options: Sequence[str] = ()
) -> str:
    """Return the command line that goes on with a run, as a shell reads it."""
    sets = [word for assignment in settings or () for word in ("--set", assignment)]
    return shlex.join(["lema", "train", str(config), *sets, *options, "--resume"])


def _run_of_phases(
    file: "PhaseFile", start: Path | None, *, verbose: bool
) -> Callable[..., object]:
    """Return what trains as a file of phases says."""
    from lema.train.phases.run import train_phases

    return partial(train_phases, file, start=start, verbose=verbose)


def _plain_run(
    config: "LemaConfig", plan_console: "Console | None", *, weights_only: bool
) -> Callable[..., object]:
    """Return what trains with a config, and shows the whole plan on a console, if there is one."""
    from lema.cli.tables import show_run
    from lema.train import train as train_model

    show = None if plan_console is None else partial(show_run, console=plan_console)
    return partial(train_model, config, weights_only=weights_only, show=show)


def _check_options(*, phased: bool, resume: bool, weights_only: bool, start: Path | None) -> None:
    """Refuse options of `lema train` that do not go together, or not with what the file holds."""
    if weights_only and not resume:
        raise ConfigError(
            "only a resumed run can do this", where="--weights-only", how="add --resume"
        )
    if weights_only and phased:
        how = "leave it out: if the newest checkpoint is damaged, LEMA takes an older one"
        raise ConfigError(
            "a run of phases resumes with its optimizer", where="--weights-only", how=how
        )
    if start is not None and not phased:
        how = "use --resume for the newest checkpoint in output_dir"
        raise ConfigError(
            "only a run of phases can start from another checkpoint",
            where=f"--from {start}",
            how=how,
        )


def plan(
    context: typer.Context,
    config: ConfigFile,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Machine to plan for (t4, 4090, h100, h200, trn1, cpu). Default: measure this one."
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a machine-hour, to price an epoch.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time against tokens per step.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every part instead of sums.")
    ] = False,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Plan for rows of so many tokens, in chunks if the device needs them."
        ),
    ] = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Predict memory, time and the limit of a run or its phases. It reads no weights. Exit code
    4: does not fit.
    """
    from lema.train.phases.file import has_phases

    if phased := has_phases(config):
        if max_length is not None:
            what = "phases have lengths of their own"
            raise ConfigError(what, where="--max-length", how="set max_length in the file")
        if plot is not None:
            raise ConfigError("a plan of phases has no plot", where="--plot", how="leave it out")
        file = phase_file_of(config, settings)
    else:
        checked = config_of(config, settings)
        if max_length is not None:
            checked = _with_rows(checked, max_length)
        check_written("--plot", plot, checked, config, begins=PICTURES)
    import_libraries(context, file.config if phased else checked, trusted=trust_remote_code)
    from lema.plan.machine import profile as find_profile

    shared: dict[str, Any] = {"price": price, "trust_remote_code": trust_remote_code}
    shared["machine"] = None if profile is None else find_profile(profile)
    if phased:
        _plan_phases(file, as_json=as_json, **shared)
    else:
        _plan_run(checked, plot, as_json=as_json, verbose=verbose, **shared)


def _with_rows(config: "LemaConfig", length: int) -> "LemaConfig":
    """Return the settings for rows of a length, in chunks where whole rows do not fit, unless they
    say otherwise."""
    changes: dict[str, Any] = {"max_length": length}
    divided = config.context_parallel_size is not None  # in as few chunks as there are processes
    if "sequence_chunk" not in config.model_fields_set and not divided:
        changes["sequence_chunk"] = "auto"
    return type(config)(**{**config.model_dump(exclude_unset=True), **changes})


def _plan_phases(file: "PhaseFile", *, as_json: bool, **options: Any) -> None:
    from lema.train.phases.report import phase_report, show_report
    from lema.train.phases.run import plan_of

    plan = plan_of(file, trust_remote_code=options["trust_remote_code"])
    report = phase_report(file.config, plan, measure=True, **options)
    _print(report.to_dict, partial(show_report, report), as_json=as_json)


def _plan_run(
    config: "LemaConfig", plot: Path | None, *, as_json: bool, verbose: bool, **options: Any
) -> None:
    """Plan a plain run; end with the code of `MemoryLimitError` where it does not fit."""
    from lema.cli.tables import draw, show_plan
    from lema.plan import make_plan

    run_plan, planner = make_plan(config, **options)
    _print(run_plan.to_dict, partial(show_plan, run_plan, verbose=verbose), as_json=as_json)
    if plot is not None:
        draw(run_plan, planner, plot)
    if not run_plan.fits:
        raise typer.Exit(MemoryLimitError.exit_code)


def _print(
    contents: Callable[[], dict[str, Any]], show: Callable[["Console"], None], *, as_json: bool
) -> None:
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(contents(), indent=2))
    else:
        show(Console(highlight=False))


PICTURES = b"\x89PNG", b"%PDF", b"<?xml"  # as matplotlib writes them, and a plan replaces them
VERBS = train, plan, tellcommands.backends
OWN = {"config", *(verb.__name__ for verb in VERBS)}
for verb in VERBS:
    _core_app.command(name=verb.__name__, cls=Verb)(verb)
VERBS_OF_CONFIG = tellcommands.show, tellcommands.schema
OWN_OF_CONFIG = [[verb.__name__] for verb in VERBS_OF_CONFIG]
for verb_of_config in VERBS_OF_CONFIG:
    config_app.command(cls=Verb)(verb_of_config)
