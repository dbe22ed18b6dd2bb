"""`lema profile CONFIG`: what the time of a step is spent on, and how near each part is to its
own limit.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.cli.arguments import ConfigFile, Settings, Trust, config_of, phase_file_of
from lema.cli.libraries import import_libraries
from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.train.phases.file import PhaseFile
    from lema_tools.profile.stepparts import StepProfile

__all__ = ["profile"]

HEADERS = ("part", "seconds", "share", "limit s", "of the limit")


def profile(
    context: typer.Context,
    config: ConfigFile,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps to measure; each runs twice, once with every operation recorded."
        ),
    ] = 2,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="The phase to profile, in a file of phases.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Run some steps of a config and print where their time goes. Nothing is saved."""
    from lema.train.phases.file import has_phases

    file = None
    if has_phases(config):
        file, index = _phase_of(config, phase, settings)
        checked = file.config
    elif phase is not None:
        raise ConfigError(
            "the file has no phases", where=f"--phase {phase}", how="leave --phase out"
        )
    else:
        checked = config_of(config, settings)
    if checked.torch_compile:
        what = "compiled layers do not show their operations"
        raise ConfigError(what, where="torch_compile", how="--set torch_compile=false")
    import_libraries(context, checked, trusted=trust_remote_code)
    from rich.console import Console

    from lema.config.printing import print_table
    from lema.train import LemaModel
    from lema_tools.profile.stepparts import PhaseSteps, Spans, profile_steps

    steps_of = None if file is None else PhaseSteps(file, index)
    checked = checked if steps_of is None else steps_of.settings
    spans = Spans()
    with contextlib.closing(
        LemaModel(checked, trust_remote_code=trust_remote_code, trace=spans)
    ) as model:
        step_profile = profile_steps(model, spans, steps, steps_of)
        first = model.backend.replicas.first
    if not first:
        return
    if as_json:
        typer.echo(json.dumps(step_profile.to_dict(), indent=2))
        return
    console = Console(highlight=False)
    print_table(_rows(step_profile), console, headers=HEADERS, amounts=True)
    for line in _lines(step_profile):
        console.print(line)


def _phase_of(path: Path, name: str | None, settings: Any) -> tuple["PhaseFile", int]:
    """Return a file of phases, and the number of the one that is named; `ConfigError`: it trains
    no adapters.
    """
    file = phase_file_of(path, settings)
    able = {
        str(phase.name): index
        for index, phase in enumerate(file.plan.phases)
        if phase.trains == "lora"
    }
    if name is None or name not in able:
        what = (
            "phases have steps of several kinds"
            if name is None
            else f"no phase {name} trains adapters"
        )
        how = (
            f"choose one: --phase {' or '.join(able)}"
            if able
            else "give a file of a run whose adapters train"
        )
        raise ConfigError(what, where=str(path), how=how)
    return file, able[name]


def _rows(step_profile: "StepProfile") -> Any:
    for name, part in step_profile.parts.items():
        limit = part.limit_seconds
        near = part.of_limit
        cells = "-" if limit is None else f"{limit:.3f}", "-" if near is None else f"{near:.2f}"
        yield name, f"{part.seconds:.3f}", f"{part.seconds / step_profile.step_seconds:.1%}", *cells
    limit = step_profile.limit_seconds
    yield (
        "a step",
        f"{step_profile.step_seconds:.3f}",
        "100%",
        f"{limit:.3f}",
        f"{limit / step_profile.step_seconds:.2f}",
    )


def _lines(step_profile: "StepProfile") -> Any:
    took = f"watched, one took {step_profile.watched_seconds:.3f} s"
    yield (
        f"{step_profile.steps} steps of {step_profile.tokens:,.0f} tokens on "
        f"{step_profile.device}; {took}"
    )
    reached = f"the fastest one reaches {step_profile.flops_per_second / 1e9:,.0f} GFLOP/s alone"
    yield f"products of a step: {step_profile.flops / 1e9:,.2f} GFLOP, {reached}"
    read = (
        f"{step_profile.bytes_read / 1e6:,.1f} MB of weights a step from a disk of "
        f"{step_profile.disk_speed / 1e9:.2f} GB/s"
    )
    yield f"memory: {step_profile.memory_speed / 1e9:.1f} GB/s; read: {read}"
