"""Settings inside settings from a YAML file, each error with the line that it stands on."""

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from lema.phaseplan.nested import placed
from lema.problems import SettingsError
from lema.yamlfile import read_yaml

__all__ = ["from_yaml", "yaml_places"]

Made = TypeVar("Made")


def from_yaml(
    make: Callable[..., Made],
    path: str | PathLike[str],
    overrides: Mapping[str, Any],
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> Made:
    """Make settings of a YAML file.

    Args:
        make: from settings by name.
        path: of the file.
        overrides: settings that replace those of the file.
        spellings: other names that the file may use for settings, to the settings' own.

    Raises:
        ConfigError: the file is not YAML or a setting is wrong; names file, line and key.
    """
    values = {**read_yaml(path).values, **overrides}
    try:
        return make(**values)
    except SettingsError as error:
        places = yaml_places(path)
        for other, name in spellings.items():
            places |= {name + key.removeprefix(other): at for key, at in places.items() if _is_in(key, other)}
        raise placed(error, places, overrides) from error.__cause__


def _is_in(key: str, setting: str) -> bool:
    return key == setting or key.startswith((f"{setting}[", f"{setting}."))


def yaml_places(path: str | PathLike[str]) -> dict[str, str]:
    """Return `file:line` by path (`phases[1].tokens`) of a file that `lema.yamlfile.read_yaml` has read."""
    root = YAML(typ="safe", pure=True).compose(Path(path).read_text(encoding="utf-8-sig"))
    return {"": str(path)} | {key: f"{path}:{line}" for key, line in _lines(root, "", set())}


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
        for place, value in enumerate(node.value):
            yield f"{path}[{place}]", value.start_mark.line + 1
            yield from _lines(value, f"{path}[{place}]", seen)
