"""On which line of a YAML file each setting stands, also inside lists and mappings."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

__all__ = ["yaml_places"]


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
