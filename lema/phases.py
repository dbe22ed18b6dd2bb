"""Runs the phases of a plan, one after the other: full parameters, adapters, and what was trained as the next base.

Between phases everything goes through the disk. A phase of weights ends with a checkpoint and, where the next one
builds on its weights, with a model in the hub's format; a phase of adapters with a checkpoint that is a PEFT adapter,
merged into a model where the next one says so. Each phase opens what it starts from. So a run that was stopped
anywhere goes on as the run that was not, and nothing of one phase is in memory in the next.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lema.checkpoint import checkpoints, forget_old_checkpoints, read_state
from lema.config import CONFIG_NAME, LemaConfig
from lema.data.mixture import Mixture, Source
from lema.errors import ConfigError, DiskError, Stopped
from lema.loss import split_batch
from lema.metrics import METRICS_NAME, MetricsLog
from lema.model import LemaModel
from lema.phasekinds import Adapters, Weights, of_kind
from lema.phaseplan import PhasePlan
from lema.schedules import follow

__all__ = ["PhaseRun", "run_phases"]

Log = Callable[[dict[str, Any]], None]


def run_phases(
    config: LemaConfig,
    plan: PhasePlan,
    sources: Mapping[str, Source],
    *,
    held_out: Mapping[str, Source] | None = None,
    resume: bool = False,
    on_step: Log = lambda _: None,
    stop: Callable[[], str | None] = lambda: None,
) -> Path:
    """Run every phase of a plan; return the directory of the last one's end. Adapters are copied to `output_dir`, too.

    Args:
        config: the model, the device, the optimizer's other settings, `output_dir`, `save_steps`. What a plan says
            (learning rate, batch, adapters, seed) is the plan's.
        plan: the phases.
        sources: the rows of every data set, by name.
        held_out: rows to validate on at the end of each phase; None: there is no validation.
        resume: go on where an earlier run in `output_dir` stopped.
        on_step: called with what is logged.
        stop: asked after each step; returns why to stop, None: go on.

    Raises:
        Stopped: `stop` said so; a checkpoint of the last step was written.
        ConfigError: a phase of an earlier run is in `output_dir` and `resume` is false, or it is of another plan; a
            selection matches nothing; or several processes were started.
    """
    run = PhaseRun(config, plan, sources, held_out)
    run.check_place(resume=resume)
    with MetricsLog(run.directory / METRICS_NAME) as metrics:

        def log(row: dict[str, Any]) -> None:
            metrics.write(row)
            on_step(row)

        for index in range(len(plan.phases)):
            if not run.is_done(index):
                run.train(index, log, stop)
    end = run.end_of(len(plan.phases) - 1)
    if plan.phases[-1].trains == "lora":
        _copy_adapter(end, run.directory)
    return end


def _copy_adapter(end: Path, out: Path) -> None:
    """Have the adapter that a run ends with where every run has it."""
    try:
        for file in (*end.glob("adapter_*"), end / CONFIG_NAME):
            part = out / f".{file.name}.partial"
            shutil.copyfile(file, part)
            part.replace(out / file.name)
    except OSError as error:
        raise DiskError(f"the adapter cannot be copied: {error.strerror}", where=str(out)) from error


@dataclass(frozen=True)
class PhaseRun:
    """A plan and where its phases are on disk; see `run_phases`."""

    config: LemaConfig
    plan: PhasePlan
    sources: Mapping[str, Source]
    held_out: Mapping[str, Source] | None = None

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return Path(self.config.output_dir)

    def place(self, index: int) -> Path:
        """Where a phase writes."""
        return self.directory / str(self.plan.phases[index].name)

    def end_of(self, index: int) -> Path:
        """The checkpoint that a phase ends with; the directory is there when the phase has ended."""
        return self.place(index) / f"checkpoint-{self.plan.steps(index).steps}"

    def is_done(self, index: int) -> bool:
        """Whether a phase has ended, with all that the next one needs of it."""
        return self.end_of(index).is_dir() and (not self._leaves_model(index) or self._model_of(index).is_dir())

    def check_place(self, *, resume: bool) -> None:
        """Refuse a directory with the phases of another run, or of another plan.

        Raises:
            ConfigError: there are some; AdapterError: a checkpoint is damaged.
        """
        begun = [index for index in range(len(self.plan.phases)) if self.place(index).exists()]
        if begun and not resume:
            raise ConfigError(
                f"phase {self.plan.phases[begun[0]].name} has been begun there",
                where=str(self.place(begun[0])),
                how="resume, or choose another output_dir",
            )
        for index in begun:
            if found := checkpoints(self.place(index)):
                about = read_state(found[-1])["extra"]
                self.plan.check_same(about["plan"], str(found[-1]), index + 1)

    def train(self, index: int, log: Log, stop: Callable[[], str | None] = lambda: None) -> None:
        """Run a phase from where it stopped, or from its beginning, to its end."""
        phase, place = self.plan.phases[index], self.place(index)
        config = self._config(index)
        mixture = Mixture(
            phase.mixture,
            self.sources,
            self.plan.seed,
            self.plan.block_size,
            stage=index,
            held_out=self.held_out,
        )
        model = LemaModel(config)
        try:
            if model.backend.replicas.size > 1:
                raise ConfigError("phases run in one process only", how="start one process")
            trains = Adapters(model) if phase.trains == "lora" else Weights(model, phase)
            first = self._start(index, trains)
            schedule = follow(trains.optimizer, self.plan.factor(index), phase.learning_rate, first)
            for step, row in self._steps(index, first, trains, mixture):
                schedule.step()
                log({**row, "learning_rate": self.plan.learning_rate(index, step)})
                done, every, why = step + 1, self.config.save_steps, stop()
                if why or done == self.plan.steps(index).steps or (every and done % every == 0):
                    trains.save(place / f"checkpoint-{done}", self._about(index, done))
                    forget_old_checkpoints(place, place / f"checkpoint-{done}", self.config.save_total_limit)
                if why:
                    raise Stopped(
                        f"stopped by {why} after step {done} of phase {phase.name}",
                        where=str(place / f"checkpoint-{done}"),
                        how="go on from there with --resume",
                    )
            if self.held_out is not None:
                log({"phase": phase.name, "eval_loss": self._validated(model, mixture)})
            if self._leaves_model(index) and not self._model_of(index).exists():
                trains.save_model(self.end_of(index), self._model_of(index))
        finally:
            model.close()

    def _config(self, index: int) -> LemaConfig:
        """Return the settings of a phase: the run's, but for what the plan says and where the phase begins."""
        phase = self.plan.phases[index]
        settings: dict[str, Any] = {
            "output_dir": str(self.place(index)),
            "seed": self.plan.seed,
            "learning_rate": phase.learning_rate,
            **of_kind(phase),
        }
        if under := self._based(index):
            base = str(self._model_of(under - 1))
            settings |= {"model_name_or_path": base, "gbi_path": None, "revision": None}
        return LemaConfig(**{**self.config.to_dict(), **settings})

    def _steps(
        self, index: int, first: int, trains: Adapters | Weights, mixture: Mixture
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        boundary, rows = self.plan.boundaries()[index], self.plan.batch_size
        per_step = rows * self.plan.block_size
        for step in range(first, self.plan.steps(index).steps):
            batch = mixture.batch(step * rows, rows)
            assert batch is not None
            loss = trains.step(split_batch(batch, self.plan.micro_batch_size))
            yield (
                step,
                {
                    "phase": boundary.name,
                    "step": boundary.first_step + step + 1,
                    "tokens": boundary.first_token + (step + 1) * per_step,
                    "loss": loss,
                },
            )

    def _validated(self, model: LemaModel, mixture: Mixture) -> float:
        batch = mixture.validation(self.plan.batch_size)
        assert batch is not None
        model.skeleton.eval()
        loss, _ = model.adapter.evaluate(split_batch(batch, self.plan.micro_batch_size))
        model.skeleton.train()
        return float(loss)

    def _start(self, index: int, trains: Adapters | Weights) -> int:
        """Put a phase where it stopped, or where the one before has left it; return its next step."""
        torch.manual_seed(self.plan.seed + index)
        if found := checkpoints(self.place(index)):
            return int(trains.load(found[-1])["step"])
        if index and not self._begins_anew(index):
            trains.load(self.end_of(index - 1))
            if self.plan.phases[index].optimizer == "reset":
                trains.reset_optimizer()
        return 0

    def _about(self, index: int, step: int) -> dict[str, Any]:
        return {"plan": self.plan.numbers(index + 1), "phase": self.plan.phases[index].name, "step": step}

    def _begins_anew(self, index: int) -> bool:
        """Whether a phase begins with a base of its own, rather than in the midst of the one before."""
        if index == 0:
            return True
        before, phase = self.plan.phases[index - 1], self.plan.phases[index]
        if phase.merge or (before.trains == "lora") != (phase.trains == "lora"):
            return True
        return phase.trains != "lora" and phase.optimizer == "reset"

    def _leaves_model(self, index: int) -> bool:
        """Whether a phase ends with a model: weights do at the last, and before a phase that begins with them."""
        last = index == len(self.plan.phases) - 1
        if last:
            return self.plan.phases[index].trains != "lora"
        return self._begins_anew(index + 1)

    def _model_of(self, index: int) -> Path:
        return self.place(index) / "model"

    def _based(self, index: int) -> int:
        """How many phases are under the base of a phase."""
        while not self._begins_anew(index):
            index -= 1
        return index
