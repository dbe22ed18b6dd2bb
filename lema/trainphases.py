"""`lema train` of a file of phases: from its data sets to what the last phase leaves on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from lema.opened import open_backend
from lema.phasedata import read_sources
from lema.phasefile import PhaseFile
from lema.phasereport import phase_report
from lema.phases import run_phases
from lema.phasetable import show_report
from lema.stop import STOP_FILE, StopOnSignal
from lema.trace import NO_TRACE, NoTrace

__all__ = ["train_phases"]

Say = Callable[[str], None]


def train_phases(
    file: PhaseFile,
    *,
    resume: bool = False,
    start: str | Path | None = None,
    callbacks: Sequence[Any] = (),
    console: Console | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
) -> Path:
    """Train as a file of phases says; return the directory that the last phase ends with.

    Args:
        file: what it says.
        resume: go on where an earlier run in `output_dir` stopped.
        start: a checkpoint, or a model, to go on from, as `lema.phases.run_phases` takes it.
        callbacks: `transformers.TrainerCallback`s.
        console: what to print on; None: standard output.
        trust_remote_code: run code that comes with the model.
        trace: records what is read, uploaded and computed, and when.

    Raises:
        Stopped: SIGINT, SIGTERM or SIGUSR1 came, or a file `stop` into `output_dir`; the last whole step is saved.
        LemaError: of the kind that says what is wrong.
    """
    shown, plan, config = console or Console(highlight=False), file.plan, file.config

    def say(line: str) -> None:  # one line is one record, whatever the terminal's width, and a path may hold brackets
        shown.print(line, soft_wrap=True, markup=False, emoji=False)

    # The first backend that is opened holds the group of processes together until the last phase has ended.
    with closing(open_backend(config)) as backend:
        first = backend.replicas.first
        shown.quiet = shown.quiet or not first
        if backend.replicas.size > 1:
            say(f"{backend.replicas.num_processes} processes, each with its share of every batch")
        reading: dict[str, Any] = {"say": say, "trust_remote_code": trust_remote_code}
        sources = read_sources(config, plan, file.datasets, "train", **reading)
        held_out = read_sources(config, plan, file.held_out, "val", **reading) or None
        size = backend.replicas.size
        report = phase_report(config, plan, sources, processes=size, trust_remote_code=trust_remote_code)
        show_report(report, shown)
        with StopOnSignal(Path(config.output_dir) / STOP_FILE) as stop:
            end = run_phases(
                config,
                plan,
                sources,
                held_out=held_out,
                eval_rows=file.eval_rows,
                resume=resume,
                start=start,
                on_step=lambda row: _tell(row, say),
                at_layer=stop.why,
                callbacks=callbacks if first else (),
                trust_remote_code=trust_remote_code,
                trace=trace,
                say=say,
            )
        say(f"the last phase ended in {end}")
    return end


def _tell(row: dict[str, Any], say: Say) -> None:
    """Say what happened at a boundary; the steps between are the callbacks' to show."""
    match row.get("event"):
        case "phase_begin":
            say(f"phase {row['phase']} begins: {row['trains']}")
        case "phase_resumed":
            say(f"phase {row['phase']} goes on after {row['step_in_phase']} of its steps: {row['trains']}")
        case "phase_end":
            loss = "" if row["final_eval_loss"] is None else f", loss on what was held out {row['final_eval_loss']:.4f}"
            say(f"phase {row['phase']} has ended after step {row['step']}{loss}")
