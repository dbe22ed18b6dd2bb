"""A YAML file of phases: the plan, the data sets it names, and the settings of a run.

The rows of a plan's data sets: those that are given, and those that are read from files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lema.config import LemaConfig
from lema.config.backendsettings import backend_settings
from lema.config.nested import placed
from lema.config.problems import SettingsError, unknown_setting
from lema.config.yaml import read_yaml, yaml_places
from lema.data.mixture import Source
from lema.data.packed import PackedTokens
from lema.data.sampling import Style
from lema.errors import ConfigError
from lema.train.phases.plan import PhasePlan
from lema.train.phases.twophase import LoRATrainerConfig

if TYPE_CHECKING:
    from lema.model.files import ModelFiles

__all__ = ["DATASETS", "HELD_OUT", "Files", "PhaseFile", "clipped", "has_phases", "read_phase_file", "read_sources"]


DATASETS, HELD_OUT = "datasets", "held_out"
EVAL_ROWS, EVAL_STEPS = "eval_rows", "eval_steps"
PHASES = "phases"
MAX_GRAD_NORM = 1.0

STAGES = frozenset(
    f"{time}_lora_{what}" for time in ("pre", "post") for what in ("tokens", "dataset", "datasets")
)  # names of a two-phase trainer

# What a phase, or the plan, says itself: beside them these would be read and do nothing.
OF_PHASES = frozenset(
    [
        "train_data",
        "eval_data",
        "eval_split",
        "num_train_epochs",
        "max_steps",
        "max_length",
        "shuffle",
        "gradient_accumulation_steps",
        "lr_scheduler_type",
        "warmup_steps",
        "warmup_ratio",
        "learning_rate",
        *(key for key in LemaConfig.model_fields if key.startswith("lora_")),
        "cache_frozen_prefix",
    ]
)


@dataclass(frozen=True)
class PhaseFile:
    """What a file says.

    Attributes:
        config: the settings of the run that no phase has of its own.
        plan: the phases.
        datasets: files, or a directory of packed tokens, of each data set, by name.
        held_out: likewise, of what is validated on; empty: there is no validation.
        eval_rows: rows of the batch that is validated on; None: as many as a step has.
    """

    config: LemaConfig
    plan: PhasePlan
    datasets: dict[str, Any]
    held_out: dict[str, Any]
    eval_rows: int | None = None


def has_phases(path: str | PathLike[str]) -> bool:
    """Whether a file is one of phases. What is wrong with it is said by whoever reads it."""
    try:
        return bool((STAGES | {PHASES}) & read_yaml(path).values.keys())
    except ConfigError:
        return False


def read_phase_file(path: str | PathLike[str], **overrides: Any) -> PhaseFile:
    """Read a YAML file of phases; settings given here replace those of the file.

    Raises:
        ConfigError: it is not YAML, or a setting is wrong; names file, line and key.
    """
    values = {**read_yaml(path).values, **overrides}
    places = {key: place for key, place in yaml_places(path).items() if key not in overrides}
    if PHASES in values and (both := STAGES & values.keys()):
        raise ConfigError(
            f"{PHASES} and {min(both)} both say what the phases are",
            where=places.get(PHASES, str(path)),
            how="keep one",
        )
    kind = PhasePlan if PHASES in values else LoRATrainerConfig
    own = {key: values.pop(key) for key in list(values) if key in kind.model_fields or key in STAGES}
    if idle := sorted(OF_PHASES & values.keys()):
        raise ConfigError(
            f"{idle[0]} says nothing in a file of phases",
            where=places.get(idle[0], f"--set {idle[0]}" if idle[0] in overrides else str(path)),
            how="leave it out: each phase has its own data, tokens, learning rate, schedule and adapters",
        )
    found = {key: _named(values.pop(key, None), key, places.get(key, str(path))) for key in (DATASETS, HELD_OUT)}
    if not found[DATASETS]:
        raise ConfigError(
            "the file names no data sets", where=str(path), how="add `datasets:` with a file for each name"
        )
    rows = _rows(values.pop(EVAL_ROWS, None), places.get(EVAL_ROWS, str(path)))
    for key, given in ((EVAL_ROWS, rows), (EVAL_STEPS, values.get(EVAL_STEPS))):
        if given is not None and not found[HELD_OUT]:
            raise ConfigError(
                f"{key} is of validation, and there is nothing to validate on",
                where=places.get(key, f"--set {key}"),
                how=f"add `{HELD_OUT}:` with a file for each data set, or leave it out",
            )
    try:
        made = kind(**own)
        plan = made if isinstance(made, PhasePlan) else made.plan()
        config = clipped(LemaConfig(**values))
    except SettingsError as error:
        known = [
            *kind.model_fields,
            *LemaConfig.model_fields,
            *backend_settings(),
            DATASETS,
            HELD_OUT,
            EVAL_ROWS,
            PHASES,
        ]
        problems = [
            unknown_setting(one.key, known) if one.what == f"unknown setting {one.key!r}" else one
            for one in error.problems
        ]
        raise placed(SettingsError(problems), places, overrides) from error.__cause__
    return PhaseFile(config, plan, found[DATASETS], found[HELD_OUT], rows)


def clipped(config: LemaConfig) -> LemaConfig:
    """Return the settings of a run of phases: gradients are clipped to a norm of 1, unless `max_grad_norm` is given.

    Weights of a whole model are seldom trained without; `max_grad_norm: null` says not to clip.
    """
    if "max_grad_norm" in config.model_fields_set:
        return config
    return LemaConfig(**{**config.model_dump(exclude_unset=True), "max_grad_norm": MAX_GRAD_NORM})


def _rows(value: Any, where: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ConfigError(f"{EVAL_ROWS} is a number of rows, 1 or more, not {value!r}", where=where, how="correct it")


def _named(value: Any, key: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(one, str | list) for one in value.values()):
        raise ConfigError(
            f"{key} is a name and its files for each data set", where=where, how=f"{key}: {{text: data/text.txt}}"
        )
    for name, files in value.items():
        for file in [files] if isinstance(files, str) else files:
            if not any(sign in file for sign in "*?[") and not Path(file).exists():
                raise ConfigError(f"there is no {file}", where=f"{where}: {name}", how="correct the path")
    return dict(value)


Files = str | PathLike[str] | list[str]


def read_sources(
    config: LemaConfig,
    plan: PhasePlan,
    given: Mapping[str, Source | Files],
    split: Literal["train", "val"],
    *,
    say: Callable[[str], None] = lambda _: None,
    trust_remote_code: bool = False,
    files: ModelFiles | None = None,
) -> dict[str, Source]:
    """Return the rows of every data set that a plan uses, of those that are given.

    Args:
        config: names the model, whose tokenizer reads text.
        plan: says which data sets are used, and which of them are packed tokens.
        given: by name, rows; or files, or a directory of packed tokens.
        split: the file of packed tokens, without its ending.
        say: is told what was read.
        trust_remote_code: run code that comes with the model.
        files: the model's directory, opened; None: the one that `config` names.

    Raises:
        ConfigError: files of a packed data set are given, rather than its directory.
        DataError: files are missing or malformed.
    """
    from lema.model.files import ModelFiles
    from lema.train.run import read_data

    used = {one.full_name: one.style for phase in plan.phases for one in phase.mixture}
    found = {name: cast(Source, one) for name, one in given.items() if name in used and not _is_files(one)}
    wanted = sorted(used.keys() & given.keys() - found.keys())
    if not wanted:
        return found
    settings = LemaConfig(**{**config.to_dict(), "max_length": plan.block_size})
    opened = files or ModelFiles(settings, trust_remote_code=trust_remote_code)
    for name in wanted:
        paths: Any = given[name]
        if used[name] is Style.PMD:
            if isinstance(paths, list):
                raise ConfigError(
                    "packed tokens are one directory, and this is a list", where=name, how="name the directory"
                )
            vocabulary = getattr(opened.config.get_text_config(), "vocab_size", None)
            found[name] = PackedTokens(Path(paths) / f"{split}.bin", plan.block_size, vocabulary)
        else:
            each = [fspath(one) for one in paths] if isinstance(paths, list) else fspath(paths)
            read = read_data(settings, opened, each)
            say(f"{name}: {read.counts}")
            found[name] = read
    return found


def _is_files(given: Any) -> bool:
    """Whether files are named, rather than rows given; rows may be a list too."""
    if isinstance(given, list):
        return bool(given) and all(isinstance(one, str | PathLike) for one in given)
    return isinstance(given, str | PathLike)
