"""A YAML file as a plain mapping that still knows on which line each key stood, at every depth.

The dialect is YAML 1.2, so `1e-4` is a number, and `on` and a date are text; duplicate keys, tags
and tabs are errors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

from lema.errors import ConfigError, unreadable

__all__ = ["YamlFile", "parse_value", "read_yaml"]

# of a file: the parser takes 10 s for so much, and settings are a few thousand
MAX_BYTES = 256 << 10
# in a file, aliases written out: a few lines of them stand for more than any memory
MAX_VALUES = 20_000
MAX_OPEN = 200  # brackets open at once: the parser's time goes by the square of their number
HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # of one character
_TAG_HOW = "write plain values: text, numbers, true/false, lists"


@dataclass(frozen=True)
class YamlFile:
    """The values of a YAML mapping, and where its keys are."""

    path: Path  # the file, as the user named it
    values: dict[str, Any]  # the mapping at the top of the file
    # the line, counted from 1, on which each key stands, by its path: `phases[1].tokens`
    lines: dict[str, int]

    def locations(self, spellings: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """`file:line` of every key by its path, and of "" the file, for error messages. `spellings`
        are other names in the file, each with the setting's, which is there as well then."""
        by_path = {"": str(self.path)} | {
            key: f"{self.path}:{line}" for key, line in self.lines.items()
        }
        for spelling, name in spellings.items():
            keys = [
                key
                for key in by_path
                if key == spelling or key.startswith((f"{spelling}[", f"{spelling}."))
            ]
            by_path |= {name + key.removeprefix(spelling): by_path[key] for key in keys}
        return by_path


def read_yaml(path: str | PathLike[str]) -> YamlFile:
    """Read a YAML mapping with text keys; a `ConfigError` names file and line of what is none,
    or cannot be read.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        how = "check the path; it is relative to the current directory" if not file.exists() else ""
        raise unreadable(
            file, error, ConfigError, f"cannot read the config file: {error.strerror}", how
        ) from error
    except UnicodeDecodeError as error:
        what = "the config file is not UTF-8 text"
        at = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(what, where=f"{file}:{at}", how="save it as UTF-8") from error
    if len(data) > MAX_BYTES:
        what = f"the config file has more than {MAX_BYTES:,} bytes"
        raise ConfigError(what, where=str(file), how="give the path of the YAML file, not of data")
    yaml = _yaml()
    root = _parsed(yaml.compose, text, str(file))
    if root is None:
        how = "it needs at least `model_name_or_path: ...`"
        raise ConfigError("the config file is empty", where=str(file), how=how)
    if not isinstance(root, MappingNode):
        how = "write one `key: value` per line, with a space after the colon"
        where = f"{file}:{root.start_mark.line + 1}"
        raise ConfigError("a config file is a list of `key: value` lines", where=where, how=how)
    if _num_values(root, {}) > MAX_VALUES:
        how = "write fewer settings, and fewer aliases (`*name`) of aliases"
        raise ConfigError(
            f"the file unpacks to more than {MAX_VALUES:,} values", where=str(file), how=how
        )
    lines = dict(_lines(root, "", set()))
    # not parsed again
    constructed = _parsed(lambda _: yaml.constructor.construct_document(root), text, str(file))
    values = _with_whole_characters(constructed)
    for key in values:
        if not isinstance(key, str):
            line = lines.get(str(key))
            raise ConfigError(
                f"a key must be a name, not {key!r}", where=f"{file}:{line}" if line else str(file)
            )
    return YamlFile(file, values, lines)


def parse_value(text: str, where: str) -> Any:
    """Read one value as a YAML file would, or raise `ConfigError`: `1e-4`, `true`, `[one, two]`;
    empty is None.
    """
    return _with_whole_characters(_parsed(_yaml().load, text, where, lines=False))


def _with_whole_characters(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Join the halves of characters beyond the first 65,536, which JSON writes as two escapes, and
    YAML as one. What an alias puts into itself stays as it is; `above` are the containers that it
    lies in."""
    if isinstance(value, dict | list) and (id(value) in above or len(above) > MAX_OPEN):
        return value
    within = (*above, id(value))
    if isinstance(value, dict):
        joined = {key: _with_whole_characters(inner, within) for key, inner in value.items()}
        return {_with_whole_characters(key): inner for key, inner in joined.items()}
    if isinstance(value, list):
        return [_with_whole_characters(inner, within) for inner in value]
    if isinstance(value, str) and HALVES.search(value):
        return HALVES.sub(
            lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), value
        )
    return value


class _Constructor(SafeConstructor):
    """Makes values of YAML's, and text of dates, which ruamel reads as YAML 1.1 does."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml() -> YAML:
    # pure: the C parser, where it is installed, reads YAML 1.1.
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml


def _parsed(read: Callable[[str], Any], text: str, where: str, lines: bool = True) -> Any:
    brackets = list(re.finditer(r"[\[\]{}]", text))
    depths = accumulate(1 if bracket[0] in "[{" else -1 for bracket in brackets)
    deep = next(
        (bracket for bracket, depth in zip(brackets, depths, strict=True) if depth > MAX_OPEN), None
    )
    if deep is not None:
        location = f"{where}:{text.count(chr(10), 0, deep.start()) + 1}" if lines else where
        raise ConfigError("nested too deeply", where=location, how="settings are not nested")
    try:
        return read(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{where}:{mark.line + 1}" if mark is not None and lines else where
        what, how = _explained(error)
        raise ConfigError(what, where=location, how=how) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        location = f"{where}:{line}" if lines else where
        what = "not YAML: a control character is in the text"
        how = "delete it"
        # as Python has such a byte of an argument
        if any("\udc80" <= character <= "\udcff" for character in text):
            what = (
                "the text has a byte that is not UTF-8, as names of files in another encoding have"
            )
            how = (
                "rename the file or directory, or go to it and give its name from there; or "
                "set LC_ALL=C.UTF-8"
            )
        raise ConfigError(what, where=location, how=how) from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"not YAML: {error}", where=where) from error
    except RecursionError as error:
        raise ConfigError(
            "nested too deeply", where=where, how="settings are not nested"
        ) from error


def _explained(error: MarkedYAMLError) -> tuple[str, str]:
    problem = str(error.problem or error.context)
    if isinstance(error, DuplicateKeyError):
        # ruamel says: found duplicate key "a" with value "2" (original value: "1")
        return problem.removeprefix("found ").split(" with value ")[
            0
        ] + " is given twice", "keep one of the two lines"
    if "\\t" in problem:
        return "a tab is used as indentation", "YAML is indented with spaces"
    if "could not determine a constructor" in problem:
        return "tags (`!...`) are not allowed", _TAG_HOW
    if "another document" in problem:
        return (
            "the file holds more than one document",
            "keep one, and remove the `---` between them",
        )
    return (
        f"not YAML: {problem}",
        "check the quotes, brackets and colons on this line and the one before",
    )


def _num_values(node: Node, counts: dict[int, int]) -> int:
    """How many values a node stands for if every alias is written out; one that holds itself is
    more than allowed.
    """
    if id(node) not in counts:
        counts[id(node)] = MAX_VALUES + 1  # until it is counted
        inside = list(node.value) if isinstance(node, SequenceNode) else []
        if isinstance(node, MappingNode):
            inside = [child for pair in node.value for child in pair]
        counts[id(node)] = 1 + sum(_num_values(child, counts) for child in inside)
    return counts[id(node)]


def _lines(node: Node, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(node) in seen:  # an alias: it has one place, and may hold itself
        return
    seen.add(id(node))
    if isinstance(node, MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}".removeprefix(".")
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner, seen)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{path}[{index}]", value.start_mark.line + 1
            yield from _lines(value, f"{path}[{index}]", seen)
