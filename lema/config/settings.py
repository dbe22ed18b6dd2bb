"""What every group of settings has in common: all that is wrong is told at once, in one error, whatever is nested."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from lema.config.problems import Problem, SettingsError, Several, problems_of

__all__ = ["Settings", "part"]


class Settings(BaseModel):
    """Settings by name. Unknown names, wrong types and contradictions are one error that lists every problem.

    Raises:
        SettingsError: a setting is unknown, missing, of the wrong type, out of range, or contradicts another.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(problems_of(error, self.defaults())) from error

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting, by the name it is given by."""
        return {
            field.alias or name: field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
        }

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if problems := list(self.disagreements()):
            raise Several(problems)
        return self

    def disagreements(self) -> Iterator[Problem]:
        """Yield what is wrong between settings, each of which is right by itself."""
        yield from ()


def part(kind: type, make: Callable[..., Any] | None = None, *, optional: bool = False) -> BeforeValidator:
    """Return a validator that makes a mapping a `kind` by calling `make` (None: `kind` itself) with its settings.

    An object of that kind passes as it is, and None passes if it is `optional`.
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
