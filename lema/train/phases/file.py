"""A YAML file of phases: the settings of a run, the phases that override them, and the data sets
that both name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from lema.config import LemaConfig
from lema.config.adapter import AdapterSettings
from lema.config.backendsettings import backend_settings
from lema.config.batching import BatchSettings
from lema.config.data.sets import is_data_set
from lema.config.objective import OF_OBJECTIVES
from lema.config.problems import Problem, SettingsError, meant, unknown_setting
from lema.config.results import OF_PLAIN_RUNS
from lema.config.yaml import read_yaml
from lema.data.mixing.sampling import Style
from lema.data.sets.sources import local_paths
from lema.errors import ConfigError
from lema.storage.atomic import replace_file
from lema.storage.hubdata import is_hub
from lema.train.phases.phase import LENGTHS, Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.twophase import LoRATrainerConfig

if TYPE_CHECKING:
    from lema.data.mixture import Source
    from lema.model.files import ModelFiles

Made = TypeVar("Made", LemaConfig, LoRATrainerConfig, PhasePlan)
EVAL_ROWS = "eval_rows"
PHASES = "phases"
EVALUATIONS_NAME = "evaluations.json"
ONLY = "train"  # name of the data set where the file names none

# names of a two-phase trainer
STAGES = frozenset(
    f"{time}_lora_{what}" for time in ("pre", "post") for what in ("tokens", "dataset", "datasets")
)

# What phases of epochs have in common with a run without phases, and those of a mixture do not.
OF_ROWS = {
    "eval_split": "name files for validation with `eval_data`",
    **dict.fromkeys(("preshuffle",), "each phase has its `mixture`"),
    "packing": "use packed tokens in a mixture, with `style: PMD`",
    **dict.fromkeys(("shuffle", "data_seed"), "each phase has its `mixture`"),
    "gradient_accumulation_steps": (
        "`batch_size` is the rows of a step, `micro_batch_size` the rows computed at once"
    ),
    "group_by_length": "rows of phases have one length, and `batch_size` is their number",
    **dict.fromkeys(
        ("max_train_samples", "max_eval_samples", "label_smoothing_factor", "neftune_noise_alpha"),
        "only phases of `epochs` or `steps` on the rows of `train_data` have it",
    ),
}

# Settings that a phase has as tokens and mixture: next to those they would have no effect.
IDLE = {
    "num_train_epochs": "each phase has its `tokens`, `epochs` or `steps`",
    "max_steps": "each phase has its `tokens`, `epochs` or `steps`",
    "count_steps_by": "phases count the batches of epochs",
    "mixture": "each phase has its own",
    "cache_frozen_prefix": "leave it out",
    **dict.fromkeys(
        BatchSettings.model_fields,
        "rows of phases have one length, and `batch_size` is their number",
    ),
    **dict.fromkeys(
        OF_PLAIN_RUNS, "only runs without phases have it; phases always keep the best checkpoint"
    ),
    **OF_ROWS,
    "adapter_name_or_path": "start from it with --from",
    **dict.fromkeys(
        OF_OBJECTIVES,
        "phases train on the tokens of rows; use a separate run for a preference objective",
    ),
}

# Settings of the run that a phase has, too, and takes from the run where it does not say otherwise.
SHARED = {
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_rounding",
    *(key for keys in LENGTHS.values() for key in keys),
}
ONLY_OF_PHASES = SHARED - LemaConfig.model_fields.keys()
OF_ADAPTERS = frozenset(AdapterSettings.model_fields)

TRAINS = "trains"
# What a file without a list of phases may say of its one phase besides `SHARED`.
OF_ONE_PHASE = (
    *(TRAINS, "trainable", "layers", "tokens", "mixture", "save"),
    *("schedule_steps", "schedule_start"),
)


@dataclass(frozen=True)
class PhaseFile:
    """What a file says."""

    config: LemaConfig  # the settings of the run
    plan: PhasePlan  # the phases, each with what it overrides
    train_data: dict[str, Any]  # files, or a directory of packed tokens, of each data set, by name
    eval_data: dict[str, Any]  # the same of what is validated on; empty: there is no validation
    # rows of the batch that is validated on; None: as many as a step has
    eval_rows: int | None = None
    # Files of the data sets that are measured whole when the last phase has ended, by name.
    evaluations: dict[str, Any] = field(default_factory=dict)


def has_phases(path: str | PathLike[str]) -> bool:
    """Whether a file is one of phases. The code that reads it reports errors."""
    with suppress(ConfigError):
        return bool((STAGES | {PHASES, TRAINS}) & read_yaml(path).values.keys())
    return False


def read_phase_file(path: str | PathLike[str], **overrides: object) -> PhaseFile:
    """Read a YAML file of phases, whose settings those given here replace; a `ConfigError` names
    file, line and key.
    """
    yaml = read_yaml(path)
    try:
        return _read({**yaml.values, **overrides})
    except SettingsError as error:
        located_error = error.located(yaml.locations(), overrides)
        raise located_error.located({key: f"--set {key}" for key in overrides}) from error.__cause__


def _with_one_phase(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file that has `trains` in place of phases as those of a file of one
    phase, which has its name from what it trains.
    """
    if PHASES in values or STAGES & values.keys():
        how = "write it into an entry of phases, or leave the other keys out"
        raise SettingsError(
            [Problem(TRAINS, "trains belongs to a phase, and the file has a list of them", how)]
        )
    trains = values[TRAINS]
    if trains == "lora":
        what = "a run without phases trains adapters anyway"
        raise SettingsError([Problem(TRAINS, what, "leave trains out, or write a list of phases")])
    of_phase = {*OF_ONE_PHASE, *OF_ADAPTERS}
    phase = {key: values[key] for key in values if key in of_phase and values[key] is not None}
    steps = values.get("max_steps")
    epochs = values.get("num_train_epochs", LemaConfig.defaults()["num_train_epochs"])
    if "tokens" not in phase:
        phase |= {"epochs": epochs} if steps is None else {"steps": steps}
    name = trains if isinstance(trains, str) else None
    moved = {*of_phase, "num_train_epochs", "max_steps"}
    run = {key: value for key, value in values.items() if key not in moved}
    return {**run, PHASES: [{"name": name, **phase}]}


def _of_rows(entries: object) -> bool:
    """Whether a phase of a file trains on the rows of `train_data`, as far as it is a phase."""
    return isinstance(entries, list) and any(
        isinstance(entry, Mapping) and entry.get("tokens") is None and not entry.get("mixture")
        for entry in entries
    )


def _read(values: dict[str, Any]) -> PhaseFile:
    if TRAINS in values:
        values = _with_one_phase(values)
    staged = PHASES not in values
    problems = list(_unfit(values, staged=staged))
    values = {
        key: value
        for key, value in values.items()
        if key not in {problem.key for problem in problems}
    }
    stages = None
    plan = None
    rows = values.pop(EVAL_ROWS, None)
    entries = values.pop(PHASES, None)
    if staged:
        stage_values = {
            key: values.pop(key)
            for key in list(values)
            if key in LoRATrainerConfig.defaults() or key in STAGES
        }
        stages = _build(lambda: LoRATrainerConfig(**stage_values), problems)
        plan = None if stages is None else _build(stages.plan, problems)
    run = {key: value for key, value in values.items() if key not in ONLY_OF_PHASES}
    config = _build(lambda: LemaConfig(**run), problems)
    if not staged:
        plan = _build(lambda: _plan(entries, values, config), problems)
    if problems:
        raise SettingsError([_renamed(problem, staged=staged) for problem in problems])
    assert config is not None and plan is not None, "what could not be made has problems"
    return _file(config, plan, stages, rows)


def _build(make: Callable[[], Made], problems: list[Problem]) -> Made | None:
    """Return what is made; None: it could not be, and what is wrong with it is in `problems`,
    once for each key.
    """
    try:
        return make()
    except SettingsError as error:  # what is wrong with the run's own settings is so in the plan
        reported_keys = {problem.key for problem in problems}
        problems += [problem for problem in error.problems if problem.key not in reported_keys]
        return None


def _file(
    config: LemaConfig, plan: PhasePlan, stages: LoRATrainerConfig | None, rows: Any
) -> PhaseFile:
    mixes = any(not phase.is_of_rows for phase in plan.phases)
    # The rows of epochs are read as those of a run without phases, which knows more kinds of files.
    train_data = named_files(config.train_data) if mixes else {}
    eval_data = named_files(config.eval_data) if mixes else {}
    validates = bool(config.eval_data or config.eval_split)
    problems = list(_missing(config)) if mixes else []
    if not config.train_data:
        problems.append(
            Problem("train_data", "the file names no data sets", "add `train_data:` with files")
        )
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        problems.append(
            Problem(
                EVAL_ROWS, f"{EVAL_ROWS} is a number of rows, 1 or more, not {rows!r}", "correct it"
            )
        )
    for key, setting in ((EVAL_ROWS, rows), ("eval_steps", config.eval_steps)):
        if setting is not None and not validates:
            what = f"{key} is for validation, but there is nothing to validate on"
            problems.append(
                Problem(key, what, "add `eval_data:` with files of each data set, or leave it out")
            )
    problems += [] if mixes else _eval_rows_problems(rows)
    used = {sampling.full_name for phase in plan.phases for sampling in phase.mixture}
    for name in sorted(used - train_data.keys()) if train_data else ():
        how = meant(name, train_data) or "give its files"
        problems.append(
            Problem("train_data", f"train_data has no data set {name!r}, which a phase reads", how)
        )
    compared = bool(eval_data) and (stages is None or stages.validate)
    for name in sorted(used - eval_data.keys()) if compared else ():
        how = meant(name, eval_data) or "give its files, or leave eval_data out"
        problems.append(
            Problem(
                "eval_data", f"eval_data has no data set {name!r}, which a phase trains on", how
            )
        )
    measured = stages.evaluations if stages is not None else []
    for name in (evaluation for evaluation in measured if evaluation not in eval_data):
        problems.append(
            Problem(
                "evaluations",
                f"eval_data has no data set {name!r} to evaluate on",
                "give its files",
            )
        )
    if problems:
        raise SettingsError(problems)
    if stages is None:
        return PhaseFile(config, plan, train_data, eval_data, rows)
    validated = eval_data if stages.validate else {}
    rows = rows or stages.validation_steps
    evaluations = {name: eval_data[name] for name in measured}
    return PhaseFile(stages.settings_of_run(config), plan, train_data, validated, rows, evaluations)


def _eval_rows_problems(rows: object) -> list[Problem]:
    """Return what is wrong with `eval_rows` where no phase has a mixture."""
    if rows is None:
        return []
    what = f"{EVAL_ROWS} has no effect: phases of epochs validate on all rows of eval_data"
    return [Problem(EVAL_ROWS, what, "leave it out, or use max_eval_samples")]


def _unfit(values: Mapping[str, Any], *, staged: bool) -> Iterator[Problem]:
    """Yield the settings that say nothing in a file of phases, or what another one there says."""
    if not staged and (stage_keys := STAGES & values.keys()):
        yield Problem(
            min(stage_keys), f"{PHASES} and {min(stage_keys)} both define the phases", "keep one"
        )
    effective = OF_ROWS.keys() if _of_rows(values.get(PHASES)) else set()
    for key in (values.keys() & IDLE.keys()) - effective:
        yield Problem(key, f"{key} has no effect in a file of phases", IDLE[key])
    if not staged:
        return
    same = {
        "learning_rate": "lr",
        "max_length": "block_size",
        "micro_batch_size": "per_device_batch_size",
    }
    same |= {
        "lr_scheduler_type": "schedule",
        "warmup_ratio": "warmup_pct",
        "warmup_steps": "warmup_pct",
    }
    same |= dict.fromkeys(OF_ADAPTERS, "lora")
    for key in values.keys() & same.keys():
        how = f"use {same[key]}, the name of the same setting here"
        yield Problem(
            key, f"{key} has no effect together with pre_lora_tokens and post_lora_tokens", how
        )


def _plan(entries: Any, values: Mapping[str, Any], config: LemaConfig | None) -> PhasePlan:
    """Return the plan of `entries` over `values`, the settings of the run; `config`
    None: these are wrong.
    """
    # Because rows that are wrong are not those that are meant, no phase is then refused for having
    # too few tokens.
    run = LemaConfig("model", batch_size=1, max_length=1) if config is None else config
    alone = list(named_files(run.train_data)) if run.train_data is not None else []
    if isinstance(entries, list):
        entries = [
            _entry(entry, values, alone[0] if len(alone) == 1 else None) for entry in entries
        ]
    return PhasePlan(
        phases=entries,
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        seed=run.seed,
        **({} if run.max_length is None else {"max_length": run.max_length}),
    )


def _entry(entry: object, values: Mapping[str, Any], alone: str | None) -> object:
    """Return an entry of `phases` with the settings of the run below it; `alone` is the only
    data set, if one is.
    """
    if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
        return entry
    taken = SHARED | OF_ADAPTERS if entry.get("trains") == "lora" else SHARED
    above = {key: value for key, value in values.items() if key in taken}
    # a length in steps overrides one as a fraction, and the other way about
    for keys in LENGTHS.values():
        if entry.keys() & set(keys):
            above = {key: value for key, value in above.items() if key not in keys}
    if alone is not None and "mixture" not in entry and entry.get("tokens") is not None:
        above["mixture"] = {alone: 1.0}
    return {**above, **entry}


def _renamed(problem: Problem, *, staged: bool) -> Problem:
    """A problem with an unknown key, with the nearest of all names that the file may have."""
    if problem.what != f"unknown setting {problem.key!r}":
        return problem
    names = LoRATrainerConfig.defaults() if staged else [PHASES, *SHARED]
    return unknown_setting(
        problem.key, [*names, *LemaConfig.model_fields, *backend_settings(), EVAL_ROWS]
    )


def named_files(files: object) -> dict[str, Any]:
    """Return the files of each data set by name; one that has none is called `train`."""
    if files is None:
        return {}
    named = isinstance(files, Mapping) and not is_data_set(files)
    return dict(cast("Mapping[str, Any]", files)) if named else {ONLY: files}


def _missing(config: LemaConfig) -> Iterator[Problem]:
    for key in ("train_data", "eval_data"):
        for name, files in named_files(getattr(config, key)).items():
            for file in files if isinstance(files, list) else [files]:
                if isinstance(file, str) and not is_hub(file) and not local_paths(file):
                    yield Problem(
                        f"{key}.{name}" if name != ONLY else key,
                        f"there is no {file}",
                        "correct the path",
                    )


def with_model(config: LemaConfig, directory: Path) -> LemaConfig:
    """Return the settings of a run with the model in a directory for its own."""
    base = {"model_name_or_path": str(directory), "gbi_path": None, "revision": None}
    return LemaConfig(**{**config.to_dict(), **base})


def phase_named(plan: PhasePlan, named: str | None) -> int:
    """Return the place of the phase of that name, or of that number counted from 1; None: the
    last.
    """
    names = [str(phase.name) for phase in plan.phases]
    if named is None or named in names:
        return len(names) - 1 if named is None else names.index(named)
    if named.isdecimal() and 1 <= int(named) <= len(names):
        return int(named) - 1
    how = (
        meant(named, names)
        or f"name one of {', '.join(names)}, or give its number, from 1 to {len(names)}"
    )
    raise ConfigError(f"the file has no phase {named!r}", where="--phase", how=how)


def all_settings(file: PhaseFile, index: int | None = None) -> dict[str, Any]:
    """Return every setting of a file of phases, defaults included, as such a file has them; with an
    `index` those that are in force in this phase."""
    idle = IDLE.keys() - (OF_ROWS.keys() if file.plan.has_rows else set())
    of_phases = {*idle, *OF_ADAPTERS, *Phase.model_fields}
    run = {key: value for key, value in file.config.to_dict().items() if key not in of_phases}
    run |= {key: value for key, value in file.plan.to_dict().items() if key != PHASES}
    if not file.eval_data and not (file.config.eval_data or file.config.eval_split):
        run |= {"eval_steps": None}
    if file.eval_data:
        run |= {EVAL_ROWS: file.eval_rows}
    run |= {"evaluations": list(file.evaluations)} if file.evaluations else {}
    phases = [
        values | values.pop("overrides")
        for values in (phase.to_dict() for phase in file.plan.phases)
    ]
    return {**run, PHASES: phases} if index is None else {**run, **phases[index]}


Files = str | PathLike[str] | Mapping[str, Any] | list[str | Mapping[str, Any]]


def read_sources(
    config: LemaConfig,
    plan: PhasePlan,
    datasets: Mapping[str, Source | Files],
    split: Literal["train", "val"],
    *,
    also: Iterable[str] = (),
    report: Callable[[str], None] = lambda _: None,
    trust_remote_code: bool = False,
    files: ModelFiles | None = None,
) -> dict[str, Source]:
    """Return the rows of every data set that a plan uses, of the `datasets`, by name: rows, files
    or a directory. Text is read with the tokenizer of the model that the config names, whose
    directory may be opened already in `files`. `split` is the file of packed tokens, without its
    ending. Data sets that are `also` wanted are read, too. Raises `ConfigError` where a packed data
    set is no directory, `DataError` where files are missing or malformed."""
    from lema.data.packed import PackedTokens
    from lema.model.files import ModelFiles, read_data

    used = {
        sampling.full_name: sampling.style for phase in plan.phases for sampling in phase.mixture
    }
    used |= {name: Style.PADDED for name in also if name not in used}
    sources = {
        name: cast("Source", source)
        for name, source in datasets.items()
        if name in used and not _is_files(source)
    }
    names = sorted(used.keys() & datasets.keys() - sources.keys())
    if not names:
        return sources
    settings = LemaConfig(**{**config.to_dict(), "max_length": plan.max_length})
    opened = files or ModelFiles(settings, trust_remote_code=trust_remote_code)
    for name in names:
        paths: Any = datasets[name]
        if used[name] is Style.PMD:
            if not isinstance(paths, str | PathLike):
                what = "packed tokens are one directory, but this is a list or a mapping"
                raise ConfigError(what, where=name, how="name the directory")
            vocabulary = getattr(opened.config.get_text_config(), "vocab_size", None)
            sources[name] = PackedTokens(Path(paths) / f"{split}.bin", plan.max_length, vocabulary)
        else:
            named = [
                fspath(path) if isinstance(path, PathLike) else path for path in _listed(paths)
            ]
            sources[name] = read = read_data(settings, opened, named)
            report(f"{name}: {read.counts}")
    return sources


def _is_files(source: object) -> bool:
    """Whether files are named, rather than rows given; rows may be a list too."""
    items = _listed(source)
    return bool(items) and all(
        isinstance(entry, str | PathLike) or is_data_set(entry) for entry in items
    )


def _listed(source: object) -> list[Any]:
    return source if isinstance(source, list) else [source]


def evaluate_end(
    config: LemaConfig,
    plan: PhasePlan,
    end: Path,
    rows: Mapping[str, Source],
    *,
    trust_remote_code: bool = False,
) -> dict[str, dict[str, float]]:
    """Measure each data set whole on what the last phase has left in `end`; write that to
    `evaluations.json`, too.
    """
    if not rows:
        return {}
    from lema.backend.group import first_alone
    from lema.train.model import LemaModel
    from lema.train.phases.paths import PhasePaths

    if plan.phases[-1].trains == "lora":
        model = LemaModel.from_pretrained(end, trust_remote_code=trust_remote_code)
    else:
        trained = PhasePaths(Path(config.output_dir), plan).model_of(len(plan.phases) - 1)
        model = LemaModel(with_model(config, trained), trust_remote_code=trust_remote_code)
    with closing(model):
        evaluations = {
            name: dict(model.get_trainer().evaluate(source)) for name, source in rows.items()
        }
        file = Path(config.output_dir) / EVALUATIONS_NAME
        text = json.dumps(evaluations, indent=2) + "\n"
        first_alone(model.backend.replicas, lambda: replace_file(file, text.encode()))
    return evaluations
