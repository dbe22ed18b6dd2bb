"""One phase of a run: its settings, its rows, what trains in it, its checkpoints, and the model
that it leaves.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from lema.backend.group import first_alone
from lema.config import LemaConfig, MemoryStrategy
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert import merge_adapter
from lema.data.mixture import Mixture, Source
from lema.engine.head.loss import split_batch
from lema.engine.optim import follow
from lema.errors import AdapterError, ConfigError, DiskError
from lema.model.skeleton import find_layers, find_towers, is_in
from lema.plan.machine import Memory
from lema.plan.planner import fitted_planner
from lema.plan.trainable_bytes import trained_bytes
from lema.storage.atomic import commit, replacing
from lema.storage.diskspace import disk_errors
from lema.storage.regular import open_regular
from lema.storage.rendering import carry_rendering
from lema.train.checkpoint.format import read_state
from lema.train.evaluate import evaluate, passes_of_mixture
from lema.train.events import Position, RunEvents
from lema.train.full.checkpoint import save_delta, save_trained
from lema.train.full.training import FullTraining
from lema.train.health.signs import is_sound
from lema.train.loop import Drawn, Pending
from lema.train.metrics import NO_SUMS
from lema.train.model import LemaModel
from lema.train.phases.paths import PhasePaths
from lema.train.phases.phase import Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.selection import layer_selection
from lema.train.steps import Steps
from lema.train.trainer import LemaTrainer

__all__ = ["PhaseRun", "chosen_by", "copy_adapter", "mixture_of", "settings_of_phase", "trainer_of"]


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
        }
    return lora.adapter_settings()


def mixture_of(
    plan: PhasePlan,
    index: int,
    sources: Mapping[str, Source],
    eval_sources: Mapping[str, Source] | None = None,
) -> Mixture:
    """Return the rows of a phase, `eval_sources` those to validate on; `ConfigError` where the
    data sets do not fit it.
    """
    options: dict[str, Any] = {"stage": index, "eval_sources": eval_sources}
    options |= {"fade": plan.fade(index), "starts": plan.starts()[index]}
    return Mixture(plan.phases[index].mixture, sources, plan.seed, plan.max_length, **options)


class PhaseRun:
    """A phase that is being trained; see `lema.train.loop.Stage`. Without `eval_rows` there is
    no validation.
    """

    def __init__(
        self,
        paths: PhasePaths,
        index: int,
        steps: Steps,
        mixture: Mixture,
        eval_rows: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._paths = paths
        self._index = index
        self._plan = paths.plan
        self._phase = paths.plan.phases[index]
        self._boundary = paths.plan.boundaries()[index]
        self.steps = steps
        self._mixture = mixture
        self._eval_rows = eval_rows
        self.evaluates = eval_rows is not None
        self.data = dict(data or {})
        self.trains: str | None = self._phase.trains
        self._replicas = steps.model.backend.replicas
        self.num_steps = self._plan.steps(index).steps
        self.done = 0
        self.best: dict[str, Any] | None = None
        self.pending: Pending | None = None
        self.carried: Mapping[str, Any] = {}
        self.saved: int | None = None
        self.sound: int | None = None
        self.eval_loss: float | None = None

    @cached_property
    def schedule(self) -> LRScheduler:
        """The schedule of the learning rate, at the phase's step when it is first used."""
        return follow(
            self.steps.ready(), self._plan.factor(self._index), self._phase.learning_rate, self.done
        )

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of this phase; `AdapterError` where it is damaged, or of
        another kind of training.
        """
        about = self.steps.restore(checkpoint)
        self.done = int(about["step"])
        self.eval_loss = about["eval_loss"]
        self.best = about["best"]
        self.pending = about["left"]
        self.saved = self.done
        self.carried = {"window": about.get("window") or about["unlogged"]}  # its earlier name
        self.carried |= {"whole": about.get("whole", NO_SUMS), "signs": about.get("signs")}
        self.sound = self.done if is_sound(self.carried) else None
        # of another run: this one has one of its own
        if checkpoint != self._paths.checkpoint(self._index, self.done):
            if self.best is not None and self.best["step"] != self.done:
                self.best = None  # that checkpoint stayed behind
            self.save(None, self.pending)
        else:
            self._note()

    def count_on(self, before: Path) -> None:
        """Go on to count tokens where the phase before has ended, in a checkpoint that the phase
        may do without.
        """
        with suppress(AdapterError):
            self.carried = {
                "whole": [*NO_SUMS[:3], read_state(before)["extra"].get("whole", NO_SUMS)[3]]
            }

    def position(self, done: int) -> Position:
        """Return where the run is after so many steps of the phase."""
        step = self._boundary.first_step + done
        per_step = self._plan.batch_size * self._plan.max_length
        tokens = self._boundary.first_token + done * per_step
        name = self._boundary.name
        where = self._paths.checkpoint(self._index, done)
        row = {
            "phase": name,
            "stage": self._index,
            "step": step,
            "step_in_phase": done,
            "tokens": tokens,
        }
        return Position(step, None, row, f"step {done} of phase {name}", where)

    def draw(self, step: int) -> Drawn:
        """Return this process's rows of a step of the phase, counted from 0."""
        count = self._plan.batch_size
        size = self.steps.config.micro_batch_size
        replicas = self._replicas
        drawn = self._mixture.rows(step * count, count, replicas.rank, replicas.size, size)
        batch = self._mixture.collated(drawn, replicas.size)
        where = f", rows {', '.join(f'{sample.row} of {sample.source}' for sample in drawn)}"
        return Drawn([] if batch is None else split_batch(batch, size), where, {})

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the rows to validate on."""
        assert self._eval_rows is not None, "there is no validation"
        size = self.steps.config.micro_batch_size
        arguments = (self._mixture, self._eval_rows, self._replicas)
        passes = passes_of_mixture(*arguments, at_once=self._plan.batch_size, micro_batch_size=size)
        return evaluate(self.steps.model, passes)

    def save(self, events: RunEvents | None, pending: Pending | None) -> None:
        """Write a checkpoint of the step just taken and note it; `events` None: callbacks know
        nothing yet.
        """
        base = Path(self.steps.config.model_name_or_path)
        about = {
            "plan": self._plan.numbers(self._index + 1),
            "data": self.data,
            "phase": self._phase.name,
            "kind": self.trains,
            "step": self.done,
            "ended": self.done == self.num_steps and pending is None,
            "left": pending,
            "base": str(base.absolute()) if base.exists() else str(base),
            "eval_loss": self.eval_loss,
            "best": self.best,
            **(self.carried if events is None else events.carried),
        }
        directory = self._paths.checkpoint(self._index, self.done)
        self.steps.save_checkpoint(directory, about, [] if events is None else [events.save_state])
        self._note()

    def _note(self) -> None:
        keep = self.steps.config.save_total_limit
        first_alone(
            self._replicas,
            partial(self._paths.note, self._index, self.done, self.best, keep, self.sound),
        )

    def leave_model(self, model: LemaModel) -> None:
        """Write the start of the next phase: the trained weights, or the base with the adapters.
        Or `DiskError`.
        """
        out = self._paths.model_of(self._index)
        end = self._paths.end_of(self._index)
        phases = self._plan.phases
        write: Callable[[Path], object]
        if isinstance(self.steps, FullTraining):
            write = partial(
                save_delta if self._phase.save == "delta" else save_trained,
                model,
                self.steps.master_store,
            )
        else:
            rounding = (
                phases[self._index + 1].rounding if self._index + 1 < len(phases) else None
            ) or "nearest"
            options: dict[str, Any] = {
                "seed": model.config.seed,
                "trust_remote_code": model.trusted,
            }
            write = partial(merge_adapter, end, rounding=rounding, **options)

        def written() -> None:
            # of a run that was killed while it wrote a model
            for left in out.parent.glob(f"..{out.name}.*.part"):
                shutil.rmtree(left, ignore_errors=True)
            with disk_errors(out):
                commit(out, write)

        first_alone(self._replicas, written)
