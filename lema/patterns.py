"""The regular expressions in an adapter's config, which come with adapters from anywhere.

PEFT matches each of them with the names of all modules. There are some that take years for a name of thirty letters
(https://owasp.org/www-community/attacks/Regular_expression_Denial_of_Service_-_ReDoS): here each is matched once
beforehand, in a bounded time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from peft import LoraConfig

from lema.errors import ModelError
from lema.timelimit import limited

__all__ = ["MAX_SECONDS", "check_patterns"]

MAX_SECONDS = 3.0  # for all names and patterns; those of a large model take thousandths
PLAIN = re.compile(r"[\w.-]*")  # there is one way to match it, and that is found at once


def check_patterns(config: LoraConfig, names: Iterable[str]) -> None:
    """Make sure that the patterns of an adapter's config can be matched with the names of modules.

    Args:
        config: PEFT's.
        names: of all modules of the model.

    Raises:
        ModelError: one is no regular expression, or takes too long to match.
    """
    known, where = [one for name in names for one in (name, f"base_model.model.{name}")], ""
    try:
        with limited(MAX_SECONDS, _TooLong):
            for option, pattern, within in _patterns(config):
                if PLAIN.fullmatch(pattern):
                    continue
                where = f"{option}: {pattern:.200}"
                matcher = re.compile(within.format(pattern) if within else pattern)
                match = matcher.match if within else matcher.fullmatch
                for name in known:
                    match(name)
    except _TooLong:
        raise ModelError(
            f"matching the names of the model's modules with this takes more than {MAX_SECONDS:g} seconds",
            where=where,
            how="name the modules in a list; do not use this adapter unless you trust it",
        ) from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"this is no regular expression: {error}", where=where, how="correct it") from error


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each, and what PEFT puts it into: (option, pattern, a larger one; empty: it is to match whole names)."""
    for option in ("target_modules", "exclude_modules"):
        if isinstance(pattern := getattr(config, option), str):
            yield option, pattern, ""
    layers = config.layers_pattern
    for pattern in [layers] if isinstance(layers, str) else layers or ():
        yield "layers_pattern", pattern, r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
    for pattern in config.modules_to_save or ():
        yield "modules_to_save", pattern, r"(^|.*\.){}($|\..*)"
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or ():
            yield option, pattern, r"(.*\.)?({})$"


class _TooLong(Exception):
    pass
