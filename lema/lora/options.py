"""PEFT configs with other options. A config is its owner's, so it is copied, not written to."""

import re
from collections.abc import Iterable
from copy import copy
from typing import TypeVar

from peft import LoraConfig, PeftConfig

__all__ = ["with_options", "without_modules"]

Config = TypeVar("Config", bound=PeftConfig)


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
