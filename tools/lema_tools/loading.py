"""The models that `lema eval` and `lema generate` are asked for: of an adapter, of a run's
settings, or of a phase.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lema.cli.arguments import config_of, phase_of, settings_of
from lema.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from lema.config import LemaConfig
    from lema.data.mixture import Source
    from lema.train.model import LemaModel
    from lema.train.phases.file import PhaseFile
    from lema.train.phases.paths import PhasePaths
    from lema.train.phases.phase import Phase

__all__ = ["Outcome", "model_of", "outcome_of"]

OF_PLAN = ("batch_size", "micro_batch_size", "max_length", "seed")


def outcome_of(source: Path, settings: list[str] | None, phase: str | None) -> "Outcome | None":
    """Return the phase that is meant of a file of phases, the last if none is named; None: it is
    no such file.
    """
    return (
        None
        if (file_and_index := phase_of(source, settings, phase)) is None
        else Outcome(*file_and_index)
    )


def model_of(
    source: Path,
    settings: list[str] | None,
    trust_remote_code: bool,
    outcome: "Outcome | None",
    unread: "Container[str]" = (),
) -> "LemaModel":
    """Return the model of an adapter directory; of a config with the adapter in its `output_dir`,
    if any; of a model directory or a hub id, without an adapter; or of a phase, as that has left
    it. `unread`: settings that the command has no use for,
    as in `from_pretrained`."""
    if outcome is not None:
        return outcome.open(
            report=partial(typer.echo, err=True), trust_remote_code=trust_remote_code
        )
    if _names_model(source):
        return _base_model(source, settings, trust_remote_code)
    overrides = settings_of(settings) if source.is_dir() else {}
    config = None if source.is_dir() else config_of(source, settings)
    # after the settings, because importing these takes seconds
    from lema.lora.consent import check_code_is_named
    from lema.lora.files import settings_file
    from lema.train import LemaModel

    if config is None:
        if trust_remote_code and "model_name_or_path" not in overrides:
            check_code_is_named(settings_file(source))
        return LemaModel.from_pretrained(
            source, trust_remote_code=trust_remote_code, unread=unread, **overrides
        )
    if (Path(config.output_dir) / "adapter_config.json").is_file():
        options = {"unread": unread, **config.model_dump(exclude_unset=True)}
        return LemaModel.from_pretrained(
            config.output_dir, trust_remote_code=trust_remote_code, **options
        )
    typer.echo(f"no adapter in {config.output_dir} yet: this is the base model", err=True)
    return LemaModel(config, trust_remote_code=trust_remote_code)


def _names_model(source: Path) -> bool:
    """Whether a source is a model without an adapter: a directory with a config and no adapter, or
    a hub id."""
    if source.is_dir():
        adapters = ("adapter_config.json", "lema_config.json")
        return (source / "config.json").is_file() and not any(
            (source / name).exists() for name in adapters
        )
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) is not None
    return is_id and source.suffix not in (".yaml", ".yml", ".json") and not source.exists()


def _base_model(source: Path, settings: list[str] | None, trust_remote_code: bool) -> "LemaModel":
    from lema.config import LemaConfig

    config = LemaConfig(**{"model_name_or_path": str(source), **settings_of(settings)})
    from lema.train import LemaModel

    return LemaModel(config, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class Outcome:
    """One phase of a file, by its number from 0, and what it has left."""

    file: "PhaseFile"
    index: int

    @property
    def phase(self) -> "Phase":
        """What it trains, and how."""
        return self.file.plan.phases[self.index]

    @property
    def _paths(self) -> "PhasePaths":
        from lema.train.phases.paths import PhasePaths

        return PhasePaths(Path(self.file.config.output_dir), self.file.plan)

    def open(self, *, report: "Callable[[str], None]", trust_remote_code: bool) -> "LemaModel":
        """Return the model as the phase has left it: with the adapters of its newest checkpoint, or
        with the weights that it ended with. Before its first checkpoint it is the model that it
        begins with, which `report` tells, as it tells of a phase that has not ended. `ConfigError`:
        the phase leaves no model, or has nothing to begin with."""
        from lema.train.model import LemaModel
        from lema.train.phases.file import OF_ADAPTERS, with_model

        paths = self._paths
        phase = self.phase
        config = self.file.config
        if phase.trains != "lora" and paths.is_begun(self.index):
            return self._based_on(
                with_model(config, self._model_left()), trust_remote_code=trust_remote_code
            )
        if phase.trains == "lora" and (saved := paths.saved(self.index)):
            if self.phase.steps is None and self.phase.epochs is not None:
                report(f"phase {phase.name}: this is {saved[-1].name}")
            elif saved[-1] != paths.end_of(self.index):
                report(f"phase {phase.name} has not ended: this is {saved[-1].name} of it")
            excluded = {*OF_ADAPTERS, "model_name_or_path", "gbi_path", "revision"}
            options = config.model_dump(exclude_unset=True, exclude=excluded) | self._steps
            return LemaModel.from_pretrained(
                saved[-1], trust_remote_code=trust_remote_code, **options
            )
        begins = config
        if under := paths.based(self.index):
            if not paths.has_model(under - 1):
                before = self.file.plan.phases[under - 1].name
                what = (
                    f"phase {phase.name} has not begun, and phase {before}, whose model it "
                    "begins with, has not ended"
                )
                raise ConfigError(
                    what, where=str(paths.directory), how="train first: `lema train` with this file"
                )
            begins = with_model(config, paths.model_of(under - 1))
        report(f"phase {phase.name} has no checkpoint yet: this is the model that it begins with")
        return self._based_on(begins, trust_remote_code=trust_remote_code)

    def _based_on(self, config: "LemaConfig", *, trust_remote_code: bool) -> "LemaModel":
        from lema.config import LemaConfig
        from lema.train.model import LemaModel

        return LemaModel(
            LemaConfig(**{**config.to_dict(), **self._steps}), trust_remote_code=trust_remote_code
        )

    @property
    def _steps(self) -> dict[str, Any]:
        rows = {name: getattr(self.file.plan, name) for name in OF_PLAN}
        if self.phase.is_of_rows:
            rows["max_length"] = self.file.config.max_length
        return {
            **rows,
            **self.phase.overrides,
            "output_dir": str(self._paths.phase_directory(self.index)),
        }

    def _model_left(self) -> Path:
        paths = self._paths
        name = self.phase.name
        model = paths.model_of(self.index)
        if not paths.leaves_model(self.index):
            after = self.file.plan.phases[self.index + 1].name
            what = f"phase {name} leaves no model, because phase {after} trains its weights further"
            raise ConfigError(
                what, where=str(paths.phase_directory(self.index)), how=f"--phase {after}"
            )
        if self.phase.save == "delta":
            how = (
                f"`lema merge {model} OUT` writes the model; name that directory as "
                "model_name_or_path"
            )
            raise ConfigError(
                f"phase {name} leaves a delta, not a model", where=str(model), how=how
            )
        if not paths.has_model(self.index):
            what = f"phase {name} has begun, and leaves its model when it ends"
            raise ConfigError(
                what, where=str(model), how="go on with it: `lema train --resume` with this file"
            )
        return model

    def eval_sources(self, model: "LemaModel") -> "dict[str, Source]":
        """Return the rows to evaluate on of each data set that the phase reads, by its name."""
        from lema.train.phases.file import read_sources

        if self.phase.is_of_rows:
            from lema.train.phases.rows import read_rows

            eval_rows = read_rows(self.file.config, model.files)[1]
            return {} if eval_rows is None else {"": eval_rows}

        plan = self.file.plan
        used = {sampling.full_name for sampling in self.phase.mixture}
        files_by_name = {name: files for name, files in self.file.eval_data.items() if name in used}
        of_phase = plan.model_copy(update={"phases": [self.phase]})
        return read_sources(self.file.config, of_phase, files_by_name, "val", files=model.files)
