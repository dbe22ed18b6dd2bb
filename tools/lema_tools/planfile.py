"""What of a run's `plan.json` is shown, with the type of each: a directory may come from
anybody.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from lema.errors import DataError

__all__ = ["MOST", "check_plan"]

MOST = 10**18  # what no number of steps, bytes or seconds of a run reaches

Amount = Annotated[int, Field(ge=0, lt=MOST)]


class _Strict(BaseModel, strict=True):
    pass


class _Memory(_Strict):
    device: dict[str, Amount]
    host: dict[str, Amount]
    device_limit: Amount | None = None
    host_limit: Amount | None = None


class _Spent(_Strict):
    parts: _Memory


class _Rates(_Strict):
    peak: float


class _Phase(_Strict):
    name: str
    trains: str
    trainable: Amount
    first_step: Amount
    last_step: Amount
    rates: _Rates
    memory: _Spent


class _Plan(_Strict):
    machine: str | dict[str, Any] | None = None
    memory: _Memory | Annotated[dict[str, Any], Field(max_length=0)] | None = None
    phases: list[_Phase] | None = None
    device_memory: Amount | None = None
    host_memory: Amount | None = None


class _About(_Strict):
    steps: Amount | None = None
    used: Amount | None = None
    settings: dict[str, Any] | None = None
    given: list[str] | None = None
    versions: dict[str, Any] | None = None
    plan: _Plan | None = None


def check_plan(about: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return what the file says, as it is. `DataError`: something in it is not of its type; the
    first is named.
    """
    try:
        _About.model_validate(about)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key_path = ".".join(map(str, first["loc"][:4]))
        how = "delete it, or copy it again: the run itself does not read it"
        raise DataError(
            f"{key_path} is not as `lema train` writes it: {first['msg']}", where=str(file), how=how
        ) from error
    return about
