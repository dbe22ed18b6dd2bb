"""A sampling: one data set of a mixture, with its rate, its form, and where in it a stage of
training begins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Strict

from lema.errors import ConfigError

__all__ = ["Sampling", "SamplingError", "Start", "Style", "check_rates", "rates_of"]

TOLERANCE = 1e-6  # of the sum of the rates; rates like 0.3333333 are meant to sum to 1


class Style(StrEnum):
    """How the rows of a data set fill blocks."""

    # one row to a block, padded at its end; the labels of the data count, padding does not
    PADDED = "PADDED"
    PMD = "PMD"  # packed tokens in a memory-mapped file, cut into whole blocks; every token counts


class SamplingError(ConfigError, ValueError):
    """A `Sampling` is malformed; a `ValueError` as well, so that pydantic lists it with a file's
    other problems.
    """


def _style(value: object) -> Style:
    """The style by its name, in capitals or not."""
    choices = ", ".join(Style)
    name = value.upper() if isinstance(value, str) else value
    if name == "CONTRASTIVE":
        what = "the style CONTRASTIVE is not supported, because LEMA has no loss for it"
        raise SamplingError(what, where="style", how=f"use one of {choices}")
    if name not in list(Style):
        raise SamplingError(
            f"{value!r} is not a style of sampling", where="style", how=f"use one of {choices}"
        )
    return Style(str(name))


@dataclass(frozen=True)
class Sampling:
    """One data set of a mixture; pydantic takes a dictionary, no unknown names. `SamplingError`:
    a bad value.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str  # of the data set
    # Its share of the samples, more than 0 and at most 1. The rates of a mixture sum to 1.
    rate: Annotated[float, Strict()]
    # how its rows fill blocks: a `Style`, or its name
    style: Annotated[Style, BeforeValidator(_style)] = Style.PADDED
    # is put after `name` for a variant of the data set, such as one packed for another tokenizer
    suffix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise SamplingError(
                f"{self.name!r} is no name of a data set", where="name", how="give its name"
            )
        if not isinstance(self.suffix, str):
            raise SamplingError(
                f"the suffix of {self.name} is {self.suffix!r}, not text", where="suffix"
            )
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not number or not 0 < self.rate <= 1 + TOLERANCE:  # also refuses NaN
            what = f"the rate of {self.name} is {self.rate!r}, not a share of the samples"
            how = "use more than 0 and at most 1; remove a data set that should not be read"
            raise SamplingError(what, where="rate", how=how)
        object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "style", _style(self.style))

    @property
    def full_name(self) -> str:
        """Name and suffix: what the data set is looked up by, and the name of its directory
        where it is packed.
        """
        return self.name + self.suffix


def rates_of(samplings: Sequence[Sampling]) -> dict[str, float]:
    """Return the rate of each data set, by its `full_name`."""
    return {sampling.full_name: sampling.rate for sampling in samplings}


def check_rates(samplings: Sequence[Sampling], where: str = "") -> None:
    """Check that the data sets of one stage make a mixture; messages name the key or the stage by
    `where`. `ConfigError`: there are none, one is given twice, or the rates do not sum to 1 within
    1e-6."""
    if not samplings:
        raise ConfigError(
            "the mixture has no data sets", where=where, how="give at least one, with rate: 1.0"
        )
    names = [sampling.full_name for sampling in samplings]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        what = f"a mixture has {', '.join(twice)} more than once"
        raise ConfigError(
            what, where=where, how="give each data set once, with the sum of its rates"
        )
    total = math.fsum(sampling.rate for sampling in samplings)
    if abs(total - 1) > TOLERANCE:
        rates = ", ".join(f"{sampling.full_name} {sampling.rate:g}" for sampling in samplings)
        what = f"the rates of a mixture sum to {total:.9g}, not to 1: {rates}"
        raise ConfigError(what, where=where, how="change the rates so that they sum to 1")


class Start(NamedTuple):
    """A place in the order of a data set's rows, of all its epochs."""

    stage: int  # of whose order it is
    taken: int  # rows that have been given in this order
