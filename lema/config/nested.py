"""Settings inside settings: every problem of every level is told at once, each under the path that leads to it.

A path is written as one would in Python: `phases[1].mixture[0].rate`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails

from lema.config.problems import Problem, SettingsError, nearest, problems_of
from lema.config.types import Count
from lema.errors import ConfigError

__all__ = [
    "PhaseSettings",
    "Several",
    "Tokens",
    "as_problem",
    "every_problem",
    "must_name",
    "part",
    "placed",
    "prefixed",
    "unknown_part",
]


# Names other trainers use for the same thing.
_ELSEWHERE = {
    "block_size": ("block", "sequence_length", "seq_len", "max_length", "max_seq_length"),
    "batch_size": ("global_batch", "global_batch_size"),
    "mixture": ("data", "dataset", "datasets", "train_data", "samplings"),
    "micro_batch_size": ("per_device_batch_size",),
    "trains": ("train", "mode", "kind", "type"),
    "warmup": ("warmup_pct", "warmup_ratio", "warmup_steps"),
    "decay": ("decay_pct", "decay_ratio", "decay_steps"),
    "tail": ("constant_pct",),
    "schedule": ("lr_scheduler_type", "schedule_type", "scheduler"),
    "rank": ("r",),
    "target_modules": ("targets",),
    "init": ("init_lora_weights",),
    "learning_rate": ("lr",),
    "rate": ("weight", "ratio", "proportion"),
}

_MEANT = {other: name for name, others in _ELSEWHERE.items() for other in others}


class Several(ValueError):
    """Problems found by a validator, with keys as seen from what it validates."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


def as_problem(error: ConfigError, key: str) -> Problem:
    """Return what a function refused as a problem of a setting."""
    return Problem(key, f"{key}: {error.what}", error.how)


def prefixed(problem: Problem, path: str) -> Problem:
    """Return a problem as it is called where `path` leads to what it is of."""
    if not path:
        return problem
    key = _joined(path, problem.key)
    head = problem.what.partition(": ")[0]  # a path of the problem already, or its words
    begins = problem.key and (problem.what.startswith(problem.key) or problem.key.startswith((f"{head}.", f"{head}[")))
    what = _joined(path, problem.what) if begins else f"{path}: {problem.what}"
    return Problem(key, what, problem.how, problem.place)


def _joined(path: str, rest: str) -> str:
    return path + rest if not rest or rest.startswith("[") else f"{path}.{rest}"


def part(kind: type, make: Callable[..., Any] | None = None, *, optional: bool = False) -> BeforeValidator:
    """Return a validator that makes a mapping a `kind`, and lets one that is made already pass.

    Args:
        kind: of the part.
        make: makes one from settings by name, and raises `SettingsError`; None: `kind` itself.
        optional: whether None passes too.
    """

    def made(value: Any) -> Any:
        if isinstance(value, kind) or (optional and value is None):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Several([Problem("", f"settings are wanted here, not {value!r}", "write them as `key: value`")])
        try:
            return (make or kind)(**value)
        except SettingsError as error:
            raise Several(error.problems) from error

    return BeforeValidator(made)


def unknown_part(key: str, known: Iterable[str]) -> Problem:
    """Return the problem of a key that is no setting, with the nearest name."""
    known, lowered = list(known), key.lower().replace("-", "_")
    bare = lowered.removeprefix("lora_")  # as adapters are set where they have no settings of their own
    meant = bare if bare != lowered and bare in known else _MEANT.get(lowered)
    near = [meant] if meant in known else nearest(key, known)
    how = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return Problem(key, f"unknown setting {key!r}", how)


def every_problem(error: ValidationError, kind: type[BaseModel]) -> list[Problem]:
    """Return what pydantic complained of in `kind`, and in all that is inside it."""
    known = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    problems: list[Problem] = []
    rest: list[InitErrorDetails] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Several):
            problems += [prefixed(problem, _path(detail["loc"])) for problem in cause.problems]
        elif detail["type"] == "extra_forbidden":
            problems.append(unknown_part(str(detail["loc"][0]), known))
        else:
            rest.append(
                InitErrorDetails(
                    type=detail["type"], loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {})
                )
            )
    if rest:
        problems += problems_of(ValidationError.from_exception_data(kind.__name__, rest), known)
    return problems


def _path(loc: Sequence[str | int]) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in loc).removeprefix(".")


def placed(error: SettingsError, places: Mapping[str, str], apart: Iterable[str] = ()) -> SettingsError:
    """Return the error with the place of each setting, or of what it would stand in where it is not there.

    Args:
        error: with keys that are paths.
        places: where each path stands.
        apart: settings at the top that do not stand there.
    """
    found, elsewhere = {}, set(apart)
    for problem in error.problems:
        key = problem.key
        if key.partition(".")[0].partition("[")[0] in elsewhere:
            continue
        while key and key not in places:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        if key in places:
            found[problem.key] = places[key]
    return error.located(found)


class PhaseSettings(BaseModel):
    """Settings that say every problem at once, those of what is inside them too, as one `SettingsError`."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(every_problem(error, type(self))) from error


def must_name(value: Any) -> Any:
    """Return a list of names, or one; refuse an empty one.

    Raises:
        ValueError: it names nothing.
    """
    if value in ([], (), ""):
        raise ValueError("must name something that trains, and is empty; name modules, or leave it out")
    return value


def _tokens(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():  # YAML reads 1e9 as a float
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError(f"must be at least 1, not {value}; leave out what is not trained on")
    return value


Tokens = Annotated[Count, BeforeValidator(_tokens)]
