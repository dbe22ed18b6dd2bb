"""The two-phase trainer: full parameters first, then adapters, under the names that two-phase
trainers use.

It runs the phases of `lema.train.phases`, and counts what each trains on a model without weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from lema.config import LemaConfig
from lema.convert.delta import is_delta
from lema.data.mixture import Source
from lema.errors import AdapterError, ConfigError
from lema.lora import count_lora_params, inject_lora_params
from lema.lora.attach import configured_lora
from lema.model import meta_model
from lema.model.files import ModelFiles
from lema.train.checkpoint.format import STATE, read_state
from lema.train.phases.file import Files, evaluate_end, read_sources, with_model
from lema.train.phases.paths import PhasePaths, find_point, find_start
from lema.train.phases.phase import Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.run import date_then, run_phases
from lema.train.phases.stage import chosen_by, of_kind
from lema.train.phases.twophase import LoRATrainerConfig

__all__ = ["LoRATrainState", "LoRATrainer", "trainable_in", "transition_to_lora"]


def trainable_in(
    config: LemaConfig, phase: Phase, *, trust_remote_code: bool = False
) -> tuple[int, int]:
    """Return how many parameters train in a phase, and how many the model has without adapters;
    tied ones are one.
    """
    files = ModelFiles(config, trust_remote_code=trust_remote_code)
    model = meta_model(files.config, torch.float32, trust_remote_code=trust_remote_code)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if phase.trains != "lora":
        chosen = chosen_by(phase, model)
        return sum(
            weight.numel() for name, weight in model.named_parameters() if chosen(name)
        ), num_parameters
    settings = LemaConfig(**{**config.to_dict(), **of_kind(phase)})
    lora = configured_lora(model, settings)
    return count_lora_params(
        inject_lora_params(model, lora, torch.device("cpu"), seed=None)
    ), num_parameters


Kind = Literal["full", "lora"]
KINDS: Mapping[str, Kind] = {"full": "full", "adapters": "lora"}  # as checkpoints say them


@dataclass(frozen=True)
class LoRATrainState:
    """Where a run is."""

    kind: Kind  # `full`: weights train. `lora`: adapters train, and the weights are frozen
    phase: str  # its name
    stage: int  # its number in the plan, from 0
    step: int  # optimizer steps of the run that were taken
    tokens: int  # of these steps, padding included
    checkpoint: Path | None  # where this is on disk; None: nothing was trained yet
    lora_rank: int | None  # of the phase's adapters; None: it has none
    lora_alpha: float | None  # in the same way; they are scaled by alpha / rank
    num_trainable: int  # parameters that train in this phase
    num_parameters: int  # those of the model without adapters


@dataclass(frozen=True)
class _Rows:
    """What a trainer reads, by the names of the data sets."""

    train: Mapping[str, Source]
    validation: Mapping[str, Source] | None  # None: there is no validation
    evaluated: Mapping[str, Source]  # after the last stage


@dataclass(frozen=True)
class _Origin:
    """Where the next call of `train` begins."""

    path: Path | None = None  # a checkpoint or a model outside `output_dir`; None: there is none
    state: LoRATrainState | None = None  # where a trainer was put; None: where the run is
    is_own: bool = False  # the run in `output_dir` goes on


class LoRATrainer:
    """Trains all parameters of a model in some stages, then adapters in other stages.

    It also runs any plan of phases. Everything is in `output_dir`: `train(resume=True)` continues a
    run that was stopped anywhere, bitwise as if it had not been stopped. After the last stage,
    `evaluated` and the file `evaluations.json` have the loss and perplexity of the config's
    `evaluations`.

    Args:
        config: the stages, or a plan of phases.
        model: the model, the device, `output_dir`, and settings that the stages do not have;
            gradients are clipped to 1 unless it sets another norm.
        datasets: by name, rows of tokens or files (a directory of packed tokens for PMD).
        eval_data: rows or files of these for validation and for the config's `evaluations`; None:
            no validation.
        eval_rows: the number of these rows; None: the config's `validation_steps`, or the rows of a
            step of the plan.
        callbacks: `transformers.TrainerCallback`s.
        on_step: is called with the metrics of each step.
        stop: returns the reason to stop, or None; it is called before each layer.
        trust_remote_code: run the model's own code.

    Raises:
        ConfigError: a data set or a setting is wrong.
        DataError: files cannot be read.
    """

    def __init__(
        self,
        config: LoRATrainerConfig | PhasePlan,
        model: LemaConfig,
        datasets: Mapping[str, Source | Files],
        *,
        eval_data: Mapping[str, Source | Files] | None = None,
        eval_rows: int | None = None,
        callbacks: Sequence[Any] = (),
        on_step: Callable[[dict[str, Any]], None] = lambda _: None,
        stop: Callable[[], str | None] = lambda: None,
        trust_remote_code: bool = False,
    ) -> None:
        self.config = config
        stages = config if isinstance(config, LoRATrainerConfig) else None
        self.plan = config if isinstance(config, PhasePlan) else config.plan()
        if self.plan.has_rows:
            what = "a phase without a mixture trains on the files of a run, and this has data sets"
            how = (
                "give it a mixture with tokens or steps, or use lema.train.phases.run.train_phases"
            )
            raise ConfigError(what, where="phases", how=how)
        model = model if stages is None else stages.settings_of_run(model)
        files = ModelFiles(model, trust_remote_code=trust_remote_code)
        self._paths = PhasePaths(Path(model.output_dir), self.plan)
        # Of a run that has begun there, because its rows are those of its first day.
        self.model = model = files.dated(model, date_then(self._paths))
        self._trust = trust_remote_code
        self._rows = self._read(stages, datasets, eval_data or {}, files)
        self.evaluated: dict[str, dict[str, float]] = {}
        if eval_rows is None and stages is not None:
            eval_rows = stages.validation_steps
        self._options: dict[str, Any] = {
            "eval_rows": eval_rows,
            "callbacks": callbacks,
            "on_step": on_step,
            "stop": stop,
            "trust_remote_code": trust_remote_code,
        }
        self._origin = _Origin()
        # parameters that train in a phase, and those of the model
        self._counted: dict[int, tuple[int, int]] = {}

    def _read(
        self,
        stages: LoRATrainerConfig | None,
        datasets: Mapping[str, Source | Files],
        eval_data: Mapping[str, Source | Files],
        files: ModelFiles,
    ) -> _Rows:
        """Read all data; `ConfigError` where there is nothing to evaluate on."""
        sources = read_sources(self.model, self.plan, datasets, "train", files=files)
        evaluated_names = stages.evaluations if stages is not None and stages.evaluate else []
        if missing := [name for name in evaluated_names if name not in eval_data]:
            what = f"there is no data set {missing[0]!r} to evaluate on"
            raise ConfigError(what, where="evaluations", how="add it to eval_data")
        eval_sources = read_sources(
            self.model, self.plan, eval_data, "val", also=evaluated_names, files=files
        )
        validated = {
            sampling.full_name for phase in self.plan.phases for sampling in phase.mixture
        } & eval_sources.keys()
        validates = validated and (stages is None or stages.validate)
        return _Rows(
            sources,
            {name: eval_sources[name] for name in validated} if validates else None,
            {name: eval_sources[name] for name in evaluated_names},
        )

    def train(self, *, until: Literal["lora"] | None = None, resume: bool = False) -> Path:
        """Train through all stages, from where the run is.

        Args:
            until: "lora" ends at the boundary, before the first stage of adapters.
            resume: go on where an earlier run in `output_dir` stopped, as is done in any case after
                `restore_from_path` and another call.

        Returns:
            The directory that the last stage ends with.

        Raises:
            ConfigError: nothing is before the boundary, or `output_dir` has another run.
            Stopped: `stop` returned a reason.
            LemaError: as in `lema.train.phases.run.run_phases`.
        """
        plan = self.plan
        if until == "lora":
            first = self._first_lora()
            if first == 0:
                raise ConfigError(
                    "no stage comes before the adapters", where="until", how="leave it out"
                )
            plan = plan.model_copy(update={"phases": plan.phases[:first]})
        origin = self._origin
        self._origin = _Origin(origin.path, is_own=True)
        end = run_phases(
            self.model,
            plan,
            self._rows.train,
            held_out=self._rows.validation,
            resume=resume or origin.is_own,
            start=origin.path,
            **self._options,
        )
        if self._rows.evaluated and until is None:
            self.evaluated = evaluate_end(
                self.model, plan, end, self._rows.evaluated, trust_remote_code=self._trust
            )
        return end

    @property
    def state(self) -> LoRATrainState:
        """The position of the run: where it was restored, or its newest valid checkpoint."""
        if self._origin.state is not None:
            return self._origin.state
        point = find_point(self._paths, lambda _: None)
        return self._state(0, None) if point is None else self._state(point.index, point.checkpoint)

    def transition_to_lora(self) -> LoRATrainState:
        """Go over to adapters.

        Nothing is trained or written: the first stage of adapters opens the model that the stage
        before has left, without an optimizer. `train()` goes over by itself as well.

        Returns:
            Where the run is then: at the first step of the first stage that trains adapters.

        Raises:
            ConfigError: steps are left before the boundary, no stage trains adapters, or they train
                already.
            ModelError: no module matches the targets.
        """
        first = self._first_lora()
        state = self.state
        boundary = self.plan.boundaries()[first]
        if state.stage > first or (state.stage == first and state.step > boundary.first_step):
            what = f"the run is already past it: it is at step {state.step}, in stage {state.phase}"
            raise ConfigError(what, how="continue with train()")
        if left := boundary.first_step - state.step:
            what = (
                f"{left} step{'s' * (left > 1)} of the {boundary.first_step} before the "
                "adapters are left"
            )
            how = (
                "call train(until='lora') first, or restore_from_path with a later checkpoint "
                "or a model"
            )
            raise ConfigError(what, where=f"step {state.step}, in stage {state.phase}", how=how)
        here = replace(self._state(first, None), checkpoint=state.checkpoint)
        self._origin = replace(self._origin, state=here)
        return here

    def restore_from_path(self, path: str | PathLike[str]) -> LoRATrainState:
        """Let the run go on from a checkpoint of weights, of adapters or of a boundary, or from a
        model.

        What a checkpoint is, is recorded in it. With a model, the first stage of adapters begins on
        that.

        Args:
            path: the checkpoint or the model's directory. In this run's `output_dir` it must be the
                run's last checkpoint.

        Returns:
            Where the run is then; `train()` goes on from there.

        Raises:
            ConfigError: `path` is none of these, or of another plan.
            AdapterError: the checkpoint is damaged.
        """
        directory = Path(path).absolute()
        if is_delta(directory):
            what = "this is a delta, which has only the weights that trained"
            raise ConfigError(
                what, where=str(directory), how="make a model of it first: `lema merge DELTA OUT`"
            )
        if (directory / "adapter_config.json").is_file() and not (directory / STATE).is_file():
            what = "this is an adapter without the state of a run (optimizer and step)"
            how = (
                "choose a checkpoint-<step> directory, or merge the adapter (`lema merge`) and "
                "name the model"
            )
            raise ConfigError(what, where=str(directory), how=how)
        if (
            not (directory / STATE).is_file()
            and (directory / "config.json").is_file()
            and self._first_lora() == 0
        ):
            self.model = with_model(self.model, directory)
            self._counted.clear()
            here = self._state(0, None)
            self._origin = _Origin(state=here)
            return here
        start = find_start(directory, self._paths)
        here = self._state(start.index, start.checkpoint)
        is_own = False
        if start.checkpoint is not None:
            if (
                kind := KINDS.get(str(read_state(start.checkpoint).get("kind", "adapters")))
            ) != here.kind:
                what = (
                    f"the checkpoint is of kind {kind}, and phase {here.phase} of kind {here.kind}"
                )
                raise AdapterError(
                    what, where=str(start.checkpoint / STATE), how="name another checkpoint"
                )
            is_own = self._is_last(start.checkpoint, start.index)
        self._origin = _Origin(None if is_own else directory, here, is_own)
        return here

    def _first_lora(self) -> int:
        for index, phase in enumerate(self.plan.phases):
            if phase.trains == "lora":
                return index
        raise ConfigError(
            "no stage trains adapters", where="post_lora_tokens", how="set the tokens of one"
        )

    def _state(self, index: int, checkpoint: Path | None) -> LoRATrainState:
        """Return the state at a checkpoint of a phase; None: at its beginning."""
        step = 0 if checkpoint is None else int(read_state(checkpoint)["extra"]["step"])
        phase = self.plan.phases[index]
        boundary = self.plan.boundaries()[index]
        if index not in self._counted:
            self._counted[index] = trainable_in(self.model, phase, trust_remote_code=self._trust)
        lora = phase.adapters
        num_trainable, num_parameters = self._counted[index]
        return LoRATrainState(
            kind="full" if lora is None else "lora",
            phase=boundary.name,
            stage=index,
            step=boundary.first_step + step,
            tokens=boundary.first_token + step * self.plan.batch_size * self.plan.max_length,
            checkpoint=checkpoint,
            lora_rank=None if lora is None else lora.lora_rank,
            lora_alpha=None if lora is None else lora.lora_alpha,
            num_trainable=num_trainable,
            num_parameters=num_parameters,
        )

    def _is_last(self, checkpoint: Path, index: int) -> bool:
        """Whether a checkpoint is this run's own, and its last; no run goes on from an earlier
        one of its own.
        """
        paths = self._paths
        if checkpoint.parent.resolve() != paths.phase_directory(index).resolve():
            return False
        later = any(paths.is_begun(number) for number in range(index + 1, len(self.plan.phases)))
        if later or checkpoint.name != paths.saved(index)[-1].name:
            what = "the run in that directory has continued since this checkpoint"
            how = "continue in another output_dir, or choose the last checkpoint"
            raise ConfigError(what, where=str(checkpoint), how=how)
        return True


def transition_to_lora(trainer: LoRATrainer) -> LoRATrainState:
    """Go over to adapters; return where the run of the trainer is then:
    `LoRATrainer.transition_to_lora`.
    """
    return trainer.transition_to_lora()
