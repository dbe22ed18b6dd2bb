"""Runs the phases of a plan, one after the other: `lema train` of a file of phases, up to the last
model.

Between phases everything goes through the disk: each ends with a checkpoint, which is a PEFT
adapter where adapters train, and with a model in the hub's format where the next one builds on its
weights; and each opens what it starts from. So a run that was stopped anywhere continues as if it
had not been, and no phase leaves anything in memory.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lema.backend import Backend
from lema.backend.group import check_alike, first_alone
from lema.backend.interrupt import Stop, agreed
from lema.backend.trace import NO_TRACE, NoTrace
from lema.config import LemaConfig
from lema.config.printing import line_printer
from lema.data.mixture import Source
from lema.errors import ConfigError, Stopped
from lema.model.files import ModelFiles
from lema.model.partition import open_backend
from lema.storage.locks import one_run
from lema.train.checkpoint.format import read_state
from lema.train.checkpoint.resume import (
    as_begun,
    check_same_run,
    report_changes,
    report_regrouped,
    settings_then,
)
from lema.train.events import NotePlan, RunEvents
from lema.train.full.training import FullTraining
from lema.train.inputs import check_output_dir
from lema.train.loop import RunLoop
from lema.train.metrics import METRICS_NAME, check_unused, read_metrics, step_of
from lema.train.model import LemaModel
from lema.train.phases.file import PhaseFile, evaluate_end, read_sources, with_model
from lema.train.phases.paths import PhasePaths, Start, begin_at, find_start, go_on
from lema.train.phases.plan import PhasePlan
from lema.train.phases.report import PhaseReport, check_fits, phase_report, show_report
from lema.train.phases.rows import ROWS, count_steps, read_rows
from lema.train.phases.stage import (
    PhaseData,
    check_rows,
    copy_adapter,
    phase_policy,
    rows_of,
    settings_of_phase,
    tokens_counted,
    trainer_of,
)
from lema.train.stage import Progress, Stage
from lema.train.stop import STOP_FILE, StopOnSignal
from lema.train.trainer import LemaTrainer

__all__ = ["Phases", "date_then", "plan_of", "plan_with_steps", "run_phases", "train_phases"]

Log = Callable[[dict[str, Any]], None]


def run_phases(
    config: LemaConfig,
    plan: PhasePlan,
    sources: Mapping[str, Source],
    *,
    resume: bool = False,
    start: str | Path | None = None,
    callbacks: Sequence[Any] = (),
    on_step: Log = lambda _: None,
    backend: Backend | None = None,
    **options: Any,
) -> Path:
    """Run every phase of a plan; return the directory of the last one's end. Adapters are copied to
    `output_dir`, too.

    Args:
        resume: go on where an earlier run in `output_dir` stopped.
        start: a checkpoint of one of these phases that lies anywhere, to go on from; or a model's
            directory, with which the first adapters begin. With `resume`, of no further use once a
            phase has been begun in `output_dir`.
        callbacks: `transformers.TrainerCallback`s; one that sets `should_training_stop` stops the
            run.
        on_step: called with every line of metrics.
        options: the other fields of `Phases`.

    Raises `Stopped`, with a checkpoint of the last step there, where `stop`, `at_layer` or a
    callback said so; `ConfigError` where a phase of an earlier run is in `output_dir` and `resume`
    is false, or it is of another plan, or `start` is, or a selection matches nothing, or another
    run writes there; `AdapterError` of a damaged checkpoint; `DiskFull` where there is no space for
    two checkpoints, or, at the end of a phase or of the run, for the last.
    """
    check_rows(plan, sources)
    if config.context_parallel_size is not None:
        what = "processes do not divide rows in phases"
        how = "leave it out, or train without phases"
        raise ConfigError(what, where="context_parallel_size", how=how)
    if not plan.has_steps:
        trusted = options.get("trust_remote_code", False)
        files = options.get("opened") or ModelFiles(config, trust_remote_code=trusted)
        plan = plan_with_steps(config, plan, sources[ROWS], files)
    with ExitStack() as stack:
        device = backend or stack.enter_context(closing(open_backend(config)))
        run = Phases(config, plan, sources, device, **options)
        inside = [run.paths.phase_directory(index) for index in range(len(plan.phases))]
        stack.enter_context(one_run(device.replicas, run.paths.directory, inside))
        return run.train(run.prepare(resume=resume, start=start), callbacks, on_step)


def plan_of(file: PhaseFile, *, trust_remote_code: bool = False) -> PhasePlan:
    """Return the plan of a file with the steps of its epochs, for which its rows are read.

    Args:
        file: the file.
        trust_remote_code: run the model's own code.

    Raises:
        DataError: the rows are missing or malformed.
    """
    if file.plan.has_steps:
        return file.plan
    files = ModelFiles(file.config, trust_remote_code=trust_remote_code)
    rows, _ = read_rows(file.config, files)
    return plan_with_steps(file.config, file.plan, rows, files)


def plan_with_steps(
    config: LemaConfig, plan: PhasePlan, rows: Source, files: ModelFiles
) -> PhasePlan:
    """Return a plan with the steps of its epochs.

    Args:
        config: the settings of the run.
        plan: the phases.
        rows: those of `train_data`.
        files: the model's directory.

    Raises:
        SettingsError: a phase has fewer steps than something in it needs.
    """
    return plan.with_steps(
        lambda index: count_steps(rows, settings_of_phase(config, plan, plan.phases[index]), files)
    )


@dataclass(frozen=True)
class Phases:
    """A plan and what its phases run on."""

    # The model, the device, the optimizer's other settings, `output_dir`, and the steps of the run
    # between checkpoints (`save_steps`), validations (`eval_steps`; each phase ends with both,
    # whatever these say) and lines of metrics (`logging_steps`). What a plan says (learning rate,
    # batch, adapters, seed) is the plan's.
    config: LemaConfig
    plan: PhasePlan
    sources: Mapping[str, Source]  # the rows of every data set, by name
    backend: Backend
    # rows to validate on; None: there is no validation
    held_out: Mapping[str, Source] | None = None
    eval_rows: int | None = None  # how many of them; None: as many as a step has
    stop: Stop = lambda: None  # asked after each step; returns why to stop, None: go on
    # The same, asked before each layer: the step or validation under way is given up then. Of
    # several processes all give one, or none.
    at_layer: Stop | None = None
    trust_remote_code: bool = False
    trace: NoTrace = NO_TRACE
    say: Callable[[str], None] = print
    opened: ModelFiles | None = None  # the model's directory; None: it is opened here

    @cached_property
    def _files(self) -> ModelFiles:
        return self.opened or ModelFiles(self.config, trust_remote_code=self.trust_remote_code)

    @property
    def paths(self) -> PhasePaths:
        """Where the phases are on disk."""
        return PhasePaths(Path(self.config.output_dir), self.plan)

    def _events(self, callbacks: Sequence[Any], on_row: Log) -> RunEvents:
        plan = self.plan
        replicas = self.backend.replicas
        steps: dict[str, Any] = {
            "batch_size": plan.batch_size,
            "max_steps": plan.num_steps,
            "seed": plan.seed,
        }
        steps["learning_rate"] = max(phase.learning_rate for phase in plan.phases)
        seen = LemaConfig(**{**self.config.to_dict(), **steps})
        return RunEvents(
            seen,
            plan.num_steps,
            replicas,
            callbacks,
            evaluates=self.held_out is not None,
            on_row=on_row,
        )

    def prepare(self, *, resume: bool, start: str | Path | None) -> Start | None:
        """Look at what is in `output_dir`; return where else the run begins, None: there, or at
        the beginning.
        """
        paths = self.paths
        replicas = self.backend.replicas
        if replicas.num_processes > 1:
            options = {"phases": self.plan.to_dict(), "start": start and str(start)}
            check_alike(replicas, self.config.to_dict() | options | self._rows)
        begun = any(paths.saved(index) for index in range(len(self.plan.phases)))
        if resume and (begun or start is None):
            return go_on(replicas, paths, self.config, self.say)
        check_output_dir(self.config)
        if not begun:
            check_unused(self.config)
        if begun or start is None:
            paths.check_new()
        # of a run that was killed before its first checkpoint
        first_alone(replicas, paths.cut_record)
        if start is None:
            return None
        start_point = find_start(start, paths)
        first_alone(replicas, lambda: begin_at(start_point, paths))
        if replicas.first:
            self.say(f"phase {self.plan.phases[start_point.index].name} begins at {start}")
        return start_point

    def train(self, begin: Start | None, callbacks: Sequence[Any], on_row: Log) -> Path:
        """Run every phase that has not ended, from `begin` on; return the checkpoint the last
        one ends with.
        """
        paths = self.paths
        last = len(self.plan.phases) - 1
        with closing(self._events(callbacks, on_row)) as events:
            try:
                self._train_all(events, begin)
            except Stopped:
                events.draw()
                raise
            events.draw()
        end = paths.end_of(last)
        if self.plan.phases[last].trains == "lora":
            first_alone(self.backend.replicas, lambda: copy_adapter(end, paths.directory))
        return end

    def _train_all(self, events: RunEvents, begin: Start | None) -> None:
        first = begin.index if begin else 0
        paths = self.paths
        # so that what does not fit is told before any phase begins
        check_rows(self.plan, self.sources, self.held_out, first)
        if begin is not None and (below := begin.rebuilt) is not None:
            self._train(below, events, Start(below, paths.end_of(below), {}, here=True))
            gc.collect()
        # a kill may have come before its last checkpoint was noted
        if begin is not None and begin.ended:
            assert begin.checkpoint is not None
            about = read_state(begin.checkpoint)["extra"]
            keep = self.config.save_total_limit
            first_alone(
                self.backend.replicas,
                partial(paths.note, first, about["step"], about["best"], keep),
            )
        for index in range(first, len(self.plan.phases)):
            here = begin is not None and begin.here
            if (begin and index == first and begin.ended) if here else paths.is_done(index):
                continue
            why = (
                agreed(self.backend.replicas, self.at_layer())
                if index > first and self.at_layer
                else None
            )
            if why is not None:
                events.end()
                what = f"stopped by {why} before phase {self.plan.phases[index].name}"
                raise Stopped(
                    what, where=str(paths.phase_directory(index - 1)), how="continue with --resume"
                )
            self._train(index, events, begin)
            # objects of a phase must be freed before the next begins, even those that refer to
            # themselves
            gc.collect()

    def _train(self, index: int, events: RunEvents, start: Start | None) -> None:
        phase = self.plan.phases[index]
        paths = self.paths
        under = self.paths.based(index)
        base = with_model(self.config, paths.model_of(under - 1)) if under else self.config
        config = settings_of_phase(
            base, self.plan, phase, output_dir=str(paths.phase_directory(index))
        )
        config = as_begun(
            config, start.checkpoint if start is not None and start.index == index else None
        )
        with ExitStack() as stack:
            files = None if under else self._files  # else the model that an earlier phase has left
            opened: dict[str, Any] = {"backend": self.backend, "files": files, "trace": self.trace}
            model = LemaModel(config, trust_remote_code=self.trust_remote_code, **opened)
            stack.callback(model.close, keep_backend=True)
            # Those of the phases before as well, which another process may have trained.
            phases = self.plan.phases[: index + 1]
            used = dict.fromkeys(name for past in phases for name in past.data_sets)
            for name in used:
                if name in self.sources:
                    model.files.note_rows(self.sources[name])
            trainer = trainer_of(
                model, phase, phase.overrides.get("device_memory", self.config.device_memory)
            )
            if isinstance(trainer, FullTraining):
                stack.callback(trainer.close)
            stack.callback(events.release)
            rows = rows_of(trainer, self.plan, index, self.sources, self.held_out, self.eval_rows)
            fingerprint_names = {f"data set {name}" for name in used}
            data = {
                name: list(about) for name, about in self._rows.items() if name in fingerprint_names
            }
            about = PhaseData(paths, index, trainer.config, trainer.model, rows, data)
            stage = self._begin(about, trainer, start)
            if not stage.has_taken_all or stage.progress.pending is not None:
                self._take_past(stage, events)
                trainer.require_room(2 if config.save_steps and not stage.progress.done else 1)
                schedule = about.schedule(trainer.ready(), stage.progress.done)
                asked: dict[str, Any] = {"at_layer": self.at_layer, "after_step": self.stop}
                RunLoop(stage, schedule, events, **asked).run()
            if paths.leaves_model(index) and not paths.model_of(index).exists():
                about.leave_model(trainer, model)
            if index == len(self.plan.phases) - 1:
                events.end()

    def _take_past(self, stage: Stage, events: RunEvents) -> None:
        """Have callbacks know of the lines that an earlier process has written."""
        file = self.paths.directory / METRICS_NAME
        step = stage.position.step
        if not events.begun and step and file.is_file():
            rows = read_metrics(file)
            log = [row for row in rows if "event" not in row and step_of(row) <= step]
            events.take_past({"log_history": log})

    def _begin(
        self, about: PhaseData, trainer: LemaTrainer | FullTraining, start: Start | None
    ) -> Stage:
        """Return the stage of a phase, as far as a checkpoint has it, or where it begins."""
        paths = self.paths
        index = about.index
        replicas = trainer.model.backend.replicas
        policy = phase_policy(about.phase)
        torch.manual_seed(self.plan.seed + index + len(self.plan.phases) * replicas.rank)
        if start is not None and start.index == index and start.checkpoint is not None:
            checkpoint = start.checkpoint
            computed = trainer.model.split.dtype
            identity = {**about.fingerprints, **about.rows.about}
            changed = check_same_run(checkpoint, trainer.config, None, identity, computed)
            if replicas.first:
                report_changes(changed, self.say)
                report_regrouped(checkpoint, trainer.config, trainer.model.split.model, self.say)
            stage = Stage(
                trainer, about, policy, about.resumed(checkpoint, trainer.restore(checkpoint))
            )
            progress = stage.progress
            # of another run: this one has one of its own
            if about.is_foreign(checkpoint, progress.done):
                stage.save(None, progress.pending)
            else:
                about.retain(progress, progress.sound)
            # the learning rate is the plan's
            trainer.take_settings({change.name for change in changed})
            return stage
        carried = tokens_counted(paths.end_of(index - 1)) if index else {}
        if isinstance(trainer, FullTraining) and paths.carries_moments(index):
            trainer.carry_moments(paths.end_of(index - 1))
        elif index and not paths.has_own_base(index):
            trainer.restore(paths.end_of(index - 1))
            if isinstance(trainer, LemaTrainer) and about.phase.optimizer == "reset":
                trainer.drop_optimizer()
        return Stage(trainer, about, policy, Progress(carried=carried))

    @cached_property
    def _rows(self) -> dict[str, Any]:
        """What tells the rows of two processes, or of two runs, apart."""
        fingerprints = {}
        for name, source in self.sources.items():
            fingerprint = getattr(source, "fingerprint", None)
            fingerprints[f"data set {name}"] = (
                len(source),
                fingerprint() if callable(fingerprint) else None,
            )
        return fingerprints


def train_phases(
    file: PhaseFile,
    *,
    resume: bool = False,
    start: str | Path | None = None,
    callbacks: Sequence[Any] = (),
    console: Console | None = None,
    trust_remote_code: bool = False,
    trace: NoTrace = NO_TRACE,
    verbose: bool = False,
) -> Path:
    """Train as a file of phases says, otherwise as `lema.train.run.train`; return the directory of
    the last end. With `verbose` the whole forecast is shown, and not a sentence of it."""
    shown = console or Console(highlight=False)
    plan = file.plan
    config = file.config
    report_line = line_printer(shown)
    # The one backend holds the group of processes together until the last phase has ended.
    with closing(open_backend(config)) as backend:
        first = backend.replicas.first
        shown.quiet = shown.quiet or not first
        _report_processes(backend, report_line)
        shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, "backend": backend}
        # Now, because what does not fit should be known before any data is read.
        options = {"processes": backend.replicas.size, **shared}
        if plan.has_steps:
            report = phase_report(config, plan, **options)
            _show_forecast(report, shown, verbose=verbose)
        else:
            check_fits(config, plan, **options)
        files = ModelFiles(config, trust_remote_code=trust_remote_code)
        then = date_then(PhasePaths(Path(config.output_dir), plan)) if resume else None
        config = first_alone(backend.replicas, partial(files.dated, config, then))
        read = partial(read_sources, config, plan, report=report_line, files=files)
        sources = read(file.train_data, "train")
        eval_sources = read(file.eval_data, "val") or None
        measured = read(file.evaluations, "val", also=file.evaluations)
        if plan.has_rows:
            eval_sources = _add_rows(sources, eval_sources, config, files, report_line)
        if not plan.has_steps:
            plan = plan_with_steps(config, plan, sources[ROWS], files)
            report = phase_report(config, plan, **options)
            _show_forecast(report, shown, verbose=verbose)
        with StopOnSignal(Path(config.output_dir) / STOP_FILE) as stop:
            rows: dict[str, Any] = {"held_out": eval_sources, "eval_rows": file.eval_rows}
            rows["opened"] = files
            asked: dict[str, Any] = {"resume": resume, "start": start, "at_layer": stop.why}
            about = {"given": sorted(config.model_fields_set), "used": backend.memory().used}
            note = NotePlan(config, report.to_dict(), **about)
            reporting = _reporting(report_line, [*callbacks, note] if first else ())
            end = run_phases(
                config, plan, sources, **rows, **asked, **reporting, trace=trace, **shared
            )
        report_line(f"the last phase ended in {end}")
        _report_model(PhasePaths(Path(config.output_dir), plan), report_line)
        evaluations = evaluate_end(config, plan, end, measured, trust_remote_code=trust_remote_code)
        _report_evaluations(evaluations, report_line)
    return end


def _report_processes(backend: Backend, report: Callable[[str], None]) -> None:
    """Say how many processes share each batch, if several do."""
    if backend.replicas.size > 1:
        report(f"{backend.replicas.num_processes} processes, each with its share of every batch")


def _reporting(report: Callable[[str], None], callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the options of `run_phases` by which it reports."""
    on_step = partial(_report_event, report)
    return {"on_step": on_step, "callbacks": callbacks, "say": report}


def _add_rows(
    sources: dict[str, Source],
    eval_sources: dict[str, Source] | None,
    config: LemaConfig,
    files: ModelFiles,
    report: Callable[[str], None],
) -> dict[str, Source] | None:
    """Read the rows of phases of epochs into the sources; return what is validated on."""
    rows, eval_rows = read_rows(config, files)
    sources[ROWS] = rows
    report(f"training data: {getattr(rows, 'counts', len(rows))}")
    return eval_sources if eval_rows is None else {**(eval_sources or {}), ROWS: eval_rows}


def _report_model(paths: PhasePaths, report: Callable[[str], None]) -> None:
    """Say where the weights are that the last phase has trained, if it has trained any."""
    last = len(paths.plan.phases) - 1
    if paths.plan.phases[last].trains != "lora":
        report(f"{paths.model_of(last).name}: {paths.model_of(last)}")


def _show_forecast(report: PhaseReport, console: Console, *, verbose: bool) -> None:
    """Print what a run of phases is going to be: the whole forecast, or a sentence of it."""
    if verbose:
        show_report(report, console)
        return
    notes = (f"note: {warning}" for warning in report.warnings)
    line_printer(console)("\n".join((f"plan: {report.verdict}", *notes)))


def _report_evaluations(
    evaluations: Mapping[str, Mapping[str, float]], report: Callable[[str], None]
) -> None:
    for name, numbers in evaluations.items():
        loss = f"loss {numbers['eval_loss']:.4f}"
        report(f"{name}: {loss}, perplexity {numbers['eval_perplexity']:.4g}")


def date_then(paths: PhasePaths) -> str | None:
    """Return the date that the chat template was told when the run began; None: it was told
    none.
    """
    saved = [
        checkpoint for index in range(len(paths.plan.phases)) for checkpoint in paths.saved(index)
    ]
    return settings_then(saved[-1]).get("template_date") if saved else None


def _report_event(report: Callable[[str], None], row: dict[str, Any]) -> None:
    """Say what happened at a boundary; the steps between are the callbacks' to show."""
    match row.get("event"):
        case "phase_begin":
            report(f"phase {row['phase']} begins: {row['trains']}")
        case "phase_end":
            loss = (
                ""
                if row["final_eval_loss"] is None
                else f", loss on held-out rows {row['final_eval_loss']:.4f}"
            )
            dead = (
                "" if (why := row.get("dead")) is None else f"; it may have learnt nothing: {why}"
            )
            report(f"phase {row['phase']} has ended after step {row['step']}{loss}{dead}")
