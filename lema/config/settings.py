"""What every group of settings has in common: all that is wrong is told at once, in one error,
whatever is nested.

Each setting says in its type what becomes of a run that is resumed with another value of it. A
change that would make it another run is refused: other shapes, rows, batches or draws. A change of
numbers that a user may reasonably want, such as a lower learning rate, takes effect and is
reported. A setting that changes no number may change freely: where the run is computed, how much
memory it takes, what it writes and how often.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from os import PathLike
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

from lema.config.problems import Problem, SettingsError, Several, problems_of
from lema.config.yaml import read_yaml

__all__ = ["Change", "OfAdapter", "OfData", "Refused", "Reported", "Settings", "Silent", "part"]


class Change(Enum):
    """What becomes of a run that goes on with another value of a setting."""

    REFUSED = "it would be another run"
    ADAPTER = "LEMA compares what it means for PEFT, and refuses a difference"
    DATA = "the fingerprint of the rows decides; shown if that differs"
    REPORTED = "later numbers change, sometimes only in their last bits; a line says so"
    SILENT = (
        "no number changes, or LEMA compares something else: the files of the model, the "
        "content of the checkpoint"
    )


Value = TypeVar("Value")

Refused = Annotated[Value, Change.REFUSED]
OfAdapter = Annotated[Value, Change.ADAPTER]
OfData = Annotated[Value, Change.DATA]
Reported = Annotated[Value, Change.REPORTED]
Silent = Annotated[Value, Change.SILENT]


class Settings(BaseModel):
    """Settings by name. Unknown names, wrong types and contradictions are one `SettingsError`
    that lists them all.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    _spellings: ClassVar[Mapping[str, str]] = {}  # other names in a file, each with the setting's

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(problems_of(error, self.defaults())) from error

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting, by its name."""
        return {
            field.alias or name: field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
        }

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **overrides: Any) -> Self:
        """Read a YAML file.

        Args:
            path: the file.
            overrides: settings that replace those of the file.

        Returns:
            The settings.

        Raises:
            ConfigError: the file cannot be read, or a setting is wrong; it names file, line and
                key.
        """
        file = read_yaml(path)
        try:
            return cls(**{**file.values, **overrides})
        except SettingsError as error:
            raise error.located(file.locations(cls._spellings), overrides) from error.__cause__

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain JSON types."""
        return self.model_dump(mode="json", by_alias=True)

    @field_validator("*", mode="before")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        for path, what in _unreasonable(value):
            raise Several([Problem(path, f"{path} {what}")]) if path else ValueError(what)
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if problems := list(self.disagreements()):
            raise Several(problems)
        return self

    def disagreements(self) -> Iterator[Problem]:
        """Yield problems between settings that are each valid alone."""
        yield from ()


LARGEST = 10**18  # a number that 64 bits hold, and 32 bits of floating point with room to compute
SMALLEST = 2.0**-126  # that 32 bits of floating point hold in full


def _unreasonable(value: Any, path: str = "", depth: int = 32) -> Iterator[tuple[str, str]]:
    """Yield where, and what, no setting can be, whichever it is: system calls and tensors fail
    on it in their words.
    """
    if depth == 0:
        yield path, "is nested too deep"
    elif isinstance(value, str) and (
        "\0" in value or value.encode(errors="ignore").decode() != value
    ):
        yield path, "must not contain a NUL character or half of a character"
    elif isinstance(value, int | float) and LARGEST < abs(value) < float("inf"):
        yield (
            path,
            f"must be at most {LARGEST:,}" if value > 0 else f"must be at least {-LARGEST:,}",
        )
    elif isinstance(value, float) and 0 < abs(value) < SMALLEST:
        yield (
            path,
            (
                f"must be 0 or at least {SMALLEST:g} in size: numbers are computed in float32, "
                "in which this is 0"
            ),
        )
    elif isinstance(value, Mapping | list | tuple):
        for key, nested in value.items() if isinstance(value, Mapping) else enumerate(value):
            inner = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")
            yield from (
                *_unreasonable(key, path, depth - 1),
                *_unreasonable(nested, inner, depth - 1),
            )


def part(
    kind: type, make: Callable[..., Any] | None = None, *, optional: bool = False
) -> BeforeValidator:
    """Return a validator that makes a mapping a `kind`, by `make` or itself; one passes as is,
    None if `optional`.
    """

    def as_kind(value: Any) -> Any:
        if isinstance(value, kind) or (optional and value is None):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Several(
                [
                    Problem(
                        "", f"this must have settings, not {value!r}", "write them as `key: value`"
                    )
                ]
            )
        try:
            return (make or kind)(**value)
        except SettingsError as error:
            raise Several(error.problems) from error

    return BeforeValidator(as_kind)
