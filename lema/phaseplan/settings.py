"""Settings of which every problem is told at once, those of settings inside them too."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from lema.phaseplan.nested import every_problem
from lema.problems import SettingsError
from lema.settingtypes import Count

__all__ = ["PhaseSettings", "Tokens", "must_name"]


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
