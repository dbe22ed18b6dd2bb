"""One phase of a run: its settings, its rows, what trains in it, its checkpoints, and the model
that it leaves.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from lema.backend import Replicas
from lema.backend.group import first_alone
from lema.config import LemaConfig, MemoryStrategy
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert import merge_adapter
from lema.data.mixture import Mixture, Source
from lema.engine import StreamedModel
from lema.engine.optim import follow
from lema.errors import AdapterError, ConfigError, DiskError
from lema.model.inputs import add_noise
from lema.model.skeleton import find_layers, find_towers, is_in
from lema.plan.machine import Memory
from lema.plan.planner import fitted_planner
from lema.plan.work.trainable_bytes import trained_bytes
from lema.storage.atomic import commit, replacing
from lema.storage.diskspace import disk_errors
from lema.storage.regular import open_regular
from lema.storage.rendering import carry_rendering
from lema.train.checkpoint.format import read_state
from lema.train.events import Position
from lema.train.full.checkpoint import save_delta, save_trained
from lema.train.full.training import FullTraining
from lema.train.health.signs import is_sound
from lema.train.metrics import NO_SUMS
from lema.train.model import LemaModel
from lema.train.phases.paths import PhasePaths
from lema.train.phases.phase import Phase
from lema.train.phases.plan import Boundary, PhasePlan
from lema.train.phases.rows import ROWS, EpochRows, MixtureRows, PhaseRows
from lema.train.phases.selection import layer_selection
from lema.train.plain.stage import plain_data
from lema.train.stage import Drawn, Pending, Progress, StagePolicy
from lema.train.trainer import LemaTrainer

__all__ = [
    "PhaseData",
    "check_rows",
    "chosen_by",
    "copy_adapter",
    "mixture_of",
    "phase_policy",
    "rows_of",
    "settings_of_phase",
    "tokens_counted",
    "trainer_of",
]


def trainer_of(
    model: LemaModel, phase: Phase, device_memory: Memory = None
) -> LemaTrainer | FullTraining:
    """Return what takes the steps of a phase on an opened model, which has no adapters yet. Weights
    that train have `device_memory` for their limit, as the plan of the phases has it, and as many
    rows are computed at once as fit."""
    if phase.trains == "lora":
        model.initialize_lora()
        return model.get_trainer()
    model.skeleton.train()
    chosen = chosen_by(phase, model.skeleton)
    model.keep_whole(chosen, "weights of the model train")
    opened = model.opened
    trained = trained_bytes(model.skeleton, opened.blueprint.layers, chosen)
    blueprint = replace(opened.blueprint, trained=trained, adapter_bytes=trained.on_device)
    planner = fitted_planner(
        replace(opened, blueprint=blueprint, device_memory=device_memory), trains=True
    )
    model.choose_settings(planner.chosen)
    if (alpha := model.config.neftune_noise_alpha) is not None:
        add_noise(model.skeleton, alpha)
    adapter = model.adapter  # which settles what settings leave open
    adapter.add_router_loss(model.config, model.directory, "weights that train themselves")
    return FullTraining(model.adapter, model.config, chosen, model.gbi)


def copy_adapter(end: Path, out: Path) -> None:
    """Copy the adapter that a run ends with to where every run has it, or raise `DiskError`."""
    try:
        for file in (*end.glob("adapter_*"), end / CONFIG_NAME):
            with open_regular(file) as source, replacing(out / file.name) as copy:
                shutil.copyfileobj(source, copy)
        carry_rendering(end, out)
    except OSError as error:
        raise DiskError(
            f"the adapter cannot be copied: {error.strerror}", where=str(out)
        ) from error


def chosen_by(phase: Phase, model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a parameter's name whether it trains in a phase; `ConfigError` where
    none does.
    """
    layers_name, stack = find_layers(model)
    selection = None if phase.layers is None else layer_selection(phase.layers, len(stack))
    embeddings, head = (set(), set()) if selection is None else (_embeddings(model), _head(model))
    named = {"embeddings", "head"} & set(phase.layers or ())
    chosen_names = set()
    unmatched = set(phase.trainable or ())
    towers = find_towers(model)
    for name, parameter in model.named_parameters():
        inside = name.startswith(f"{layers_name}.")
        module = name.rpartition(".")[0]
        if is_in(module, towers):
            is_chosen = False
        elif phase.trains == "full":
            is_chosen = True
        elif inside:
            number = int(name.removeprefix(f"{layers_name}.").partition(".")[0])
            within = selection is None or number in selection
            matches = {end for end in phase.trainable or () if f".{module}".endswith(f".{end}")}
            unmatched -= matches
            is_chosen = within and (phase.trainable is None or bool(matches))
        else:
            # A tied head is the embeddings' weight, which trains with either, as it does in the
            # whole model.
            is_chosen = ("embeddings" in named and id(parameter) in embeddings) or (
                "head" in named and (id(parameter) in head or id(parameter) not in embeddings)
            )
        if is_chosen:
            chosen_names.add(name)
    if unmatched and chosen_names:
        what = f"no module of the layers ends with {min(unmatched)}"
        raise ConfigError(what, where="trainable", how="correct it, or leave it out")
    if not chosen_names:
        what = f"no weight of the model is selected by phase {phase.name} trains"
        how = "name the ends of modules' names, such as those that `lema models DIRECTORY` prints"
        raise ConfigError(what, where="trainable" if phase.trainable else "layers", how=how)
    return chosen_names.__contains__


def tied_note(phase: Phase, model: PreTrainedModel) -> str:
    """Say that embeddings and head are one weight, where a phase selects one of them by name;
    empty: they are not.
    """
    named = {"embeddings", "head"} & set(phase.layers or ())
    if len(named) != 1 or not _embeddings(model) & _head(model):
        return ""
    (name,) = named
    tied_name = "the embeddings" if name == "head" else "the head"
    return (
        f"phase {phase.name}: {name} trains {tied_name} too, because the model has one weight "
        "for both (they are tied)"
    )


def _head(model: PreTrainedModel) -> set[int]:
    head = model.get_output_embeddings()
    return set() if head is None else {id(parameter) for parameter in head.parameters()}


def _embeddings(model: PreTrainedModel) -> set[int]:
    try:
        return {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    except NotImplementedError as error:  # of a model whose code does not say
        what = f"the model does not name its embeddings: {error}"
        raise ConfigError(
            what, where="layers", how="remove layers, and name modules with `trainable`"
        ) from error


def settings_of_phase(
    config: LemaConfig, plan: PhasePlan, phase: Phase, **more: object
) -> LemaConfig:
    """Return the settings of a phase: the run's, but for what the plan and the phase say, and
    for `more`.
    """
    rows = {
        name: getattr(plan, name)
        for name in ("batch_size", "micro_batch_size", "max_length", "seed")
    }
    phase_settings = {
        "gradient_accumulation_steps": 1,
        "learning_rate": phase.learning_rate,
        **phase.overrides,
    }
    if phase.is_of_rows:
        rows["max_length"] = config.max_length
        phase_settings |= {
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "num_train_epochs": phase.epochs or 1.0,
            "max_steps": phase.steps if phase.epochs is None else None,
        }
    settings = {**config.to_dict(), **rows, **phase_settings, **of_kind(phase), **more}
    if phase.adapters is None and settings["compute_dtype"] == "auto":
        settings["compute_dtype"] = "weights"  # because they are written to as they are stored
    return LemaConfig(**settings)


def of_kind(phase: Phase) -> dict[str, Any]:
    """Return the settings that go with what a phase trains."""
    if (lora := phase.adapters) is None:
        # The weights change: they are kept where they can be written to.
        return {
            "strategy": MemoryStrategy.RESIDENT,
            "device_memory": None,
            "lora_target_modules": None,
            "quantize_base": None,
        }
    return lora.adapter_settings()


def mixture_of(
    plan: PhasePlan,
    index: int,
    sources: Mapping[str, Source],
    eval_sources: Mapping[str, Source] | None = None,
) -> Mixture:
    """Return the mixture of a phase, `eval_sources` those to validate on; `ConfigError` where the
    data sets do not fit it.
    """
    options: dict[str, Any] = {"stage": index, "eval_sources": eval_sources}
    options |= {"fade": plan.fade(index), "starts": plan.starts()[index]}
    return Mixture(plan.phases[index].mixture, sources, plan.seed, plan.max_length, **options)


def rows_of(
    steps: LemaTrainer | FullTraining,
    plan: PhasePlan,
    index: int,
    sources: Mapping[str, Source],
    eval_sources: Mapping[str, Source] | None,
    eval_rows: int | None = None,
) -> PhaseRows:
    """Return the rows of a phase.

    Args:
        steps: what trains in it.
        plan: the phases of the run.
        index: of the phase, from 0.
        sources: the rows of every data set, by name; those of `train_data` in epochs are called
            `ROWS`.
        eval_sources: rows to validate on, in the same way; None: there is no validation.
        eval_rows: how many of these a mixture takes; None: as many as a step has.

    Raises:
        ConfigError: the data sets do not fit the phase.
    """
    if plan.phases[index].is_of_rows:
        rows_to_validate = None if eval_sources is None else eval_sources.get(ROWS)
        return EpochRows(plain_data(steps, sources[ROWS], rows_to_validate))
    validated = eval_sources if eval_sources is None or eval_sources.keys() - {ROWS} else None
    return MixtureRows(
        mixture_of(plan, index, sources, validated),
        plan,
        plan.boundaries()[index].first_token,
        steps.config,
        steps.model,
        None if validated is None else eval_rows or plan.batch_size,
    )


def check_rows(
    plan: PhasePlan,
    sources: Mapping[str, Source],
    eval_sources: Mapping[str, Source] | None = None,
    first: int = 0,
) -> None:
    """Refuse data sets that do not fit a phase, from the `first` on, with `ConfigError`, before
    any begins.
    """
    validated = eval_sources if eval_sources is None or eval_sources.keys() - {ROWS} else None
    for index, phase in enumerate(plan.phases):
        if index < first:
            continue
        if not phase.is_of_rows:
            mixture_of(plan, index, sources, validated)
        elif ROWS not in sources:
            what = f"phase {phase.name} trains on the rows of {ROWS}, and there are none"
            raise ConfigError(what, where=f"phases[{index}]", how="give it a mixture, or rows")


def phase_policy(phase: Phase) -> StagePolicy:
    """Return how the stage of a phase goes: it begins and ends with a line of metrics, and a
    callback that ends training stops the run."""
    return StagePolicy(
        has_epochs=False,
        trains=phase.trains,
        completes_last_step=True,
        stops_for_callbacks=True,
        keeps_best=True,
        schedule_counts_dropped=True,
    )


@dataclass(frozen=True)
class PhaseData:
    """The rows of a phase; see `lema.train.stage.StageData`."""

    paths: PhasePaths
    index: int  # of the phase, from 0
    config: LemaConfig  # settings of the phase
    model: StreamedModel
    rows: PhaseRows
    fingerprints: Mapping[str, Any] = field(default_factory=dict)  # of the data sets, by name

    @property
    def plan(self) -> PhasePlan:
        """The phases of the run."""
        return self.paths.plan

    @property
    def phase(self) -> Phase:
        """The phase."""
        return self.plan.phases[self.index]

    @property
    def replicas(self) -> Replicas:
        """The processes that share each batch."""
        return self.model.backend.replicas

    @property
    def num_steps(self) -> int:
        """How many steps the phase has."""
        return self.plan.steps(self.index).steps

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to validate on."""
        return self.rows.evaluates

    @cached_property
    def _boundary(self) -> Boundary:
        return self.plan.boundaries()[self.index]

    def schedule(self, optimizer: Optimizer, done: int) -> LRScheduler:
        """Return the schedule of the learning rate, after so many steps of the phase."""
        return follow(optimizer, self.plan.factor(self.index), self.phase.learning_rate, done)

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps of the phase."""
        step = self._boundary.first_step + done
        name = self._boundary.name
        where = self.paths.checkpoint(self.index, done)
        row: dict[str, Any] = {
            "phase": name,
            "stage": self.index,
            "step": step,
            "step_in_phase": done,
            **self.rows.row(done),
        }
        return Position(step, row.get("epoch"), row, f"step {done} of phase {name}", where)

    def begin_epoch(self, done: int) -> None:
        """Do nothing, because a phase has no epochs."""

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""
        return self.rows.draw(step)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the rows to validate on."""
        return self.rows.evaluate()

    def saved_state(self, progress: Progress, pending: Pending | None) -> dict[str, Any]:
        """Return what a checkpoint keeps: the plan so far, the position in it, and what is
        `pending`.
        """
        base = Path(self.config.model_name_or_path)
        return {
            "plan": self.plan.numbers(self.index + 1),
            "data": {**self.fingerprints, **self.rows.about},
            "phase": self.phase.name,
            "kind": self.phase.trains,
            "step": progress.done,
            "ended": progress.done == self.num_steps and pending is None,
            "left": pending,
            "base": str(base.absolute()) if base.exists() else str(base),
            "eval_loss": progress.eval_loss,
            "best": progress.best,
        }

    def resumed(self, checkpoint: Path, state: Mapping[str, Any]) -> Progress:
        """Return how far the phase is in a checkpoint, which has this `saved_state`."""
        done = int(state["step"])
        # `unlogged` is the earlier name of `window`
        carried = {
            "window": state.get("window") or state["unlogged"],
            "whole": state.get("whole", NO_SUMS),
            "signs": state.get("signs"),
        }
        best = state["best"]
        if self.is_foreign(checkpoint, done) and best is not None and best["step"] != done:
            best = None  # that checkpoint stayed behind
        return Progress(
            done,
            best=best,
            eval_loss=state["eval_loss"],
            pending=state["left"],
            carried=carried,
            saved=done,
            sound=done if is_sound(carried) else None,
        )

    def is_foreign(self, checkpoint: Path, done: int) -> bool:
        """Whether a checkpoint of so many steps of the phase is another run's."""
        return checkpoint != self.paths.checkpoint(self.index, done)

    def retain(self, progress: Progress, sound: int | None) -> None:
        """Note the checkpoint of the last step and the best one, and delete old ones."""
        keep = self.config.save_total_limit
        first_alone(
            self.replicas,
            partial(self.paths.note, self.index, progress.done, progress.best, keep, sound),
        )

    def leave_model(self, trainer: LemaTrainer | FullTraining, model: LemaModel) -> None:
        """Write the start of the next phase: the trained weights, or the base with the adapters.
        Or `DiskError`.
        """
        out = self.paths.model_of(self.index)
        end = self.paths.end_of(self.index)
        phases = self.plan.phases
        write: Callable[[Path], object]
        if isinstance(trainer, FullTraining):
            save = save_delta if self.phase.save == "delta" else save_trained
            write = partial(save, model, trainer.master_store)
        else:
            following = phases[self.index + 1 : self.index + 2]
            rounding = next((phase.rounding for phase in following), None) or "nearest"
            write = partial(
                merge_adapter,
                end,
                rounding=rounding,
                seed=model.config.seed,
                trust_remote_code=model.trusted,
            )

        def written() -> None:
            # of a run that was killed while it wrote a model
            for left in out.parent.glob(f"..{out.name}.*.part"):
                shutil.rmtree(left, ignore_errors=True)
            with disk_errors(out):
                commit(out, write)

        first_alone(self.replicas, written)


def tokens_counted(before: Path) -> dict[str, Any]:
    """Return what `RunEvents` carries into a phase that begins: the tokens counted where the phase
    before has ended, in a checkpoint that the phase may do without.
    """
    with suppress(AdapterError):
        tokens = read_state(before)["extra"].get("whole", NO_SUMS)[3]
        return {"whole": [*NO_SUMS[:3], tokens]}
    return {}
