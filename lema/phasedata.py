"""The rows of a plan's data sets: those that are given, and those that are read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, cast

from lema.config import LemaConfig
from lema.data.mixture import Source
from lema.data.packed import PackedTokens
from lema.data.sampling import Style
from lema.errors import ConfigError
from lema.model import LemaModel
from lema.phaseplan import PhasePlan
from lema.train import read_data

__all__ = ["Files", "read_sources"]

Files = str | PathLike[str] | list[str]


def read_sources(
    config: LemaConfig,
    plan: PhasePlan,
    given: Mapping[str, Source | Files],
    split: Literal["train", "val"],
    *,
    say: Callable[[str], None] = lambda _: None,
    trust_remote_code: bool = False,
) -> dict[str, Source]:
    """Return the rows of every data set that a plan uses, of those that are given.

    Args:
        config: names the model, whose tokenizer reads text.
        plan: says which data sets are used, and which of them are packed tokens.
        given: by name, rows; or files, or a directory of packed tokens.
        split: the file of packed tokens, without its ending.
        say: is told what was read.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: files of a packed data set are given, rather than its directory.
        DataError: files are missing or malformed.
    """
    used = {one.full_name: one.style for phase in plan.phases for one in phase.mixture}
    found = {name: cast(Source, one) for name, one in given.items() if name in used and not _is_files(one)}
    wanted = sorted(used.keys() & given.keys() - found.keys())
    if not wanted:
        return found
    settings = LemaConfig(**{**config.to_dict(), "max_length": plan.block_size})
    with closing(LemaModel(settings, trust_remote_code=trust_remote_code)) as model:
        for name in wanted:
            files: Any = given[name]
            if used[name] is Style.PMD:
                if isinstance(files, list):
                    raise ConfigError(
                        "packed tokens are one directory, and this is a list", where=name, how="name the directory"
                    )
                vocabulary = getattr(model.skeleton.config, "vocab_size", None)
                found[name] = PackedTokens(Path(files) / f"{split}.bin", plan.block_size, vocabulary)
            else:
                read = read_data(model, [fspath(one) for one in files] if isinstance(files, list) else fspath(files))
                say(f"{name}: {read.counts}")
                found[name] = read
    return found


def _is_files(given: Any) -> bool:
    """Whether files are named, rather than rows given; rows may be a list too."""
    if isinstance(given, list):
        return bool(given) and all(isinstance(one, str | PathLike) for one in given)
    return isinstance(given, str | PathLike)
