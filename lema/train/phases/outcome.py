"""What the phases of a file have left: the model of one, opened with its adapter, and what it is measured on."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.config.problems import meant
from lema.data.mixture import Source
from lema.errors import ConfigError
from lema.train.model import LemaModel
from lema.train.phases.file import EVAL_ROWS, IDLE, OF_ADAPTERS, PHASES, PhaseFile, read_sources, with_model
from lema.train.phases.phase import Phase
from lema.train.phases.places import Places
from lema.train.phases.plan import PhasePlan

__all__ = ["Outcome", "evaluate_end"]

EVALUATIONS_NAME = "evaluations.json"
OF_PLAN = ("batch_size", "micro_batch_size", "max_length", "seed")


@dataclass(frozen=True)
class Outcome:
    """One phase of a file, by its number from 0."""

    file: PhaseFile
    index: int

    @classmethod
    def of(cls, file: PhaseFile, named: str | None) -> Self:
        """Return the phase of that name, or of that number counted from 1; None: the last one."""
        names = [str(phase.name) for phase in file.plan.phases]
        if named is None or named in names:
            return cls(file, len(names) - 1 if named is None else names.index(named))
        if named.isdecimal() and 1 <= int(named) <= len(names):
            return cls(file, int(named) - 1)
        how = meant(named, names) or f"name one of {', '.join(names)}, or give its number, from 1 to {len(names)}"
        raise ConfigError(f"the file has no phase {named!r}", where="--phase", how=how)

    @property
    def phase(self) -> Phase:
        """What it trains, and how."""
        return self.file.plan.phases[self.index]

    @property
    def _places(self) -> Places:
        return Places(Path(self.file.config.output_dir), self.file.plan)

    def open(self, *, say: Callable[[str], None], trust_remote_code: bool = False) -> LemaModel:
        """Return the model as the phase has left it: with the adapters of its newest checkpoint, or with the weights
        that it ended with. Before its first checkpoint it is the model that it begins with, which `say` tells, as it
        tells of a phase that has not ended. `ConfigError`: the phase leaves no model, or has nothing to begin with."""
        places, phase, config = self._places, self.phase, self.file.config
        if phase.trains != "lora" and places.is_begun(self.index):
            return self._based_on(with_model(config, self._model_left()), trust_remote_code=trust_remote_code)
        if phase.trains == "lora" and (saved := places.saved(self.index)):
            if saved[-1] != places.end_of(self.index):
                say(f"phase {phase.name} has not ended: this is {saved[-1].name} of it")
            own = {*OF_ADAPTERS, "model_name_or_path", "gbi_path", "revision"}
            given = config.model_dump(exclude_unset=True, exclude=own) | self._steps
            return LemaModel.from_pretrained(saved[-1], trust_remote_code=trust_remote_code, **given)
        begins = config
        if under := places.based(self.index):
            if not places.has_model(under - 1):
                before = self.file.plan.phases[under - 1].name
                what = (
                    f"phase {phase.name} has not begun, and phase {before}, whose model it begins with, has not ended"
                )
                raise ConfigError(what, where=str(places.directory), how="train first: `lema train` with this file")
            begins = with_model(config, places.model_of(under - 1))
        say(f"phase {phase.name} has no checkpoint yet: this is the model that it begins with")
        return self._based_on(begins, trust_remote_code=trust_remote_code)

    def _based_on(self, config: LemaConfig, *, trust_remote_code: bool) -> LemaModel:
        return LemaModel(LemaConfig(**{**config.to_dict(), **self._steps}), trust_remote_code=trust_remote_code)

    @property
    def _steps(self) -> dict[str, Any]:
        rows = {name: getattr(self.file.plan, name) for name in OF_PLAN}
        return {**rows, **self.phase.overrides, "output_dir": str(self._places.place(self.index))}

    def _model_left(self) -> Path:
        places, name = self._places, self.phase.name
        model = places.model_of(self.index)
        if not places.leaves_model(self.index):
            after = self.file.plan.phases[self.index + 1].name
            what = f"phase {name} leaves no model, because phase {after} trains its weights further"
            raise ConfigError(what, where=str(places.place(self.index)), how=f"--phase {after}")
        if self.phase.save == "delta":
            how = f"`lema merge {model} OUT` writes the model; name that directory as model_name_or_path"
            raise ConfigError(f"phase {name} leaves a delta, not a model", where=str(model), how=how)
        if not places.has_model(self.index):
            what = f"phase {name} has begun, and leaves its model when it ends"
            raise ConfigError(what, where=str(model), how="go on with it: `lema train --resume` with this file")
        return model

    def held_out(self, model: LemaModel) -> dict[str, Source]:
        """Return the rows to evaluate on of each data set that the phase reads, by its name."""
        plan, used = self.file.plan, {one.full_name for one in self.phase.mixture}
        given = {name: files for name, files in self.file.eval_data.items() if name in used}
        of_phase = plan.model_copy(update={"phases": [self.phase]})
        return read_sources(self.file.config, of_phase, given, "val", files=model.files)

    def settings(self) -> dict[str, Any]:
        """Return every setting of the run as it is in this phase, the phase's own among them."""
        return {**_of_run(self.file), **_of_phase(self.phase)}

    @staticmethod
    def all_settings(file: PhaseFile) -> dict[str, Any]:
        """Return every setting of a file of phases, defaults included, as such a file has them."""
        return {**_of_run(file), PHASES: [_of_phase(phase) for phase in file.plan.phases]}


def _of_run(file: PhaseFile) -> dict[str, Any]:
    of_phases = {*IDLE, *OF_ADAPTERS, *Phase.model_fields}
    run = {key: value for key, value in file.config.to_dict().items() if key not in of_phases}
    run |= {name: getattr(file.plan, name) for name in OF_PLAN}
    run |= {EVAL_ROWS: file.eval_rows} if file.eval_data else {"eval_steps": None}
    return run | ({"evaluations": list(file.evaluations)} if file.evaluations else {})


def _of_phase(phase: Phase) -> dict[str, Any]:
    values: dict[str, Any] = phase.to_dict()
    overrides: dict[str, Any] = values.pop("overrides")
    return values | overrides


def evaluate_end(
    config: LemaConfig, plan: PhasePlan, end: Path, rows: Mapping[str, Source], *, trust_remote_code: bool = False
) -> dict[str, dict[str, float]]:
    """Measure each data set whole on what the last phase has left in `end`; write that to `evaluations.json`, too."""
    if not rows:
        return {}
    if plan.phases[-1].trains == "lora":
        model = LemaModel.from_pretrained(end, trust_remote_code=trust_remote_code)
    else:
        trained = Places(Path(config.output_dir), plan).model_of(len(plan.phases) - 1)
        model = LemaModel(with_model(config, trained), trust_remote_code=trust_remote_code)
    with closing(model):
        found = {name: dict(model.get_trainer().evaluate(one)) for name, one in rows.items()}
        file, text = Path(config.output_dir) / EVALUATIONS_NAME, json.dumps(found, indent=2) + "\n"
        first_alone(model.backend.replicas, lambda: file.write_text(text, encoding="utf-8"))
    return found
