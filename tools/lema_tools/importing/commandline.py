"""Reads a run of another trainer: a YAML or JSON file of its keys, or a command line with options
`--key value`, `--key=value` and `key=value`, laid over the file that it names.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lema.config.yaml import parse_value, read_yaml
from lema.errors import ConfigError
from lema_tools.importing.translation import ForeignRun

__all__ = ["foreign_run"]

SCRIPT = ".py"
"""How a word ends that is a script, and no value of the option before it, as after the options of
`accelerate launch`.
"""
MODULE = "-m"
"""The option after which a module stands, and then the words for it."""
SUFFIXES = (".yaml", ".yml", ".json")
CONFIG_OPTIONS = ("config",)
"""Options of command lines that name the file whose values they lay others over. The
`--config_file` of `accelerate launch` is none of them: it says how many processes there are."""


def foreign_run(
    words: Sequence[str], *, objective: str | None, options: Mapping[str, Any]
) -> ForeignRun:
    """Return the run that a file or a command line asks for.

    Args:
        words: the path of a file with options or without, or the words of a command line.
        objective: what the run minimises, where the caller says it.
        options: further options of the import.

    Raises:
        ConfigError: a file cannot be read, or an option has no name.
    """
    values, plain = _split(words)
    files = [word for word in plain if word.endswith(SUFFIXES)]
    files += [str(values.pop(option)) for option in CONFIG_OPTIONS if option in values]
    if not files and not values:
        how = "give a .yaml or .json file of another trainer, or its command line after --"
        raise ConfigError("there is no run to translate", where=" ".join(words)[:80], how=how)
    keys = dict[str, Any]()
    for file in files:
        if not file.endswith(SUFFIXES) and not Path(file).is_file():
            how = f"write its file first: tune cp {file} my.yaml"
            raise ConfigError("a config by its name cannot be read here", where=file, how=how)
        keys |= read_yaml(file).values
    return ForeignRun(
        keys | values,
        [word for word in plain if word not in files],
        objective,
        str(Path(files[-1]).parent) if files else ".",
        options,
    )


def _split(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a command line by key, and its other words.

    An option that is followed by several words has a list of them, and one by none is true.
    """
    values = dict[str, Any]()
    plain = list[str]()
    for key, texts in _groups(words):
        if key is None:
            plain += texts
        elif not key:
            raise ConfigError("an option has no name", where="--", how="write --key value")
        else:
            parsed = [parse_value(text, f"--{key}") for text in texts]
            values[key] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return values, plain


def _groups(words: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each option's key with the words after it, and each plain word with None."""
    key: str | None = None
    texts = list[str]()
    for word in words:
        if (word == MODULE or word.endswith(SCRIPT)) and key is not None:
            yield key, texts
            key = None
        name, equals, value = word.partition("=")
        is_option = word.startswith("--")
        if is_option or (equals and name.isidentifier()) or (equals and "." in name):
            if key is not None:
                yield key, texts
            key = name.removeprefix("--").replace("-", "_")
            texts = [value] if equals else []
            if equals:
                yield key, texts
                key = None
        elif key is None:
            yield None, [word]
        else:
            texts.append(word)
    if key is not None:
        yield key, texts
