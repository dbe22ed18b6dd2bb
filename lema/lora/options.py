"""PEFT configs with other options. A config is its owner's, so it is copied, not written to."""

import re
from collections.abc import Iterable, Mapping
from copy import copy
from typing import TypeVar

from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key

__all__ = ["as_integer", "pattern_value", "with_options", "without_modules"]

Config = TypeVar("Config", bound=PeftConfig)
Number = TypeVar("Number", int, float)


def as_integer(alpha: float) -> float:
    """Return a whole number as one; PEFT asks for that, and scales by a float as well."""
    return int(alpha) if float(alpha).is_integer() else alpha


def pattern_value(patterns: Mapping[str, Number], name: str, usual: Number) -> Number:
    """Return what PEFT takes from patterns for a module: a rank or an alpha."""
    return patterns.get(get_pattern_key(list(patterns), name), usual)


def with_options(config: Config, **options: object) -> Config:
    """Return a config with other values of some options, as they are: PEFT checks and converts
    values only where a config is made.

    Args:
        config: PEFT's config.
        options: names of its options, and their values.

    Returns:
        A copy, which shares the values of all other options.
    """
    changed = copy(config)
    vars(changed).update(options)
    return changed


def without_modules(config: LoraConfig, modules: Iterable[str]) -> LoraConfig:
    """Return a config that leaves out modules with all that is in them, besides what it leaves out
    already. They are in an expression, because a list would have to name each linear.
    """
    before = config.exclude_modules or ()
    exclude_patterns = (
        [before]
        if isinstance(before, str)
        else [rf"(.*\.)?{re.escape(end)}" for end in sorted(before)]
    )
    excluded = "|".join(
        [*(rf"{re.escape(module)}(\..*)?" for module in modules), *exclude_patterns]
    )
    return with_options(config, exclude_modules=excluded)
