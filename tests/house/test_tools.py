"""The verbs of `lema_tools` stand on what modules of the core export, the names in their
`__all__`, and no others.
"""

import ast
import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "lema_tools"
FILES = sorted(TOOLS.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TOOLS)))
def test_a_verb_imports_only_what_modules_export(file: Path) -> None:
    taken = [
        (node.module, name.name)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lema"
        for name in node.names
    ]
    own = [
        (module, name)
        for module, name in taken
        if name not in exported(module) or name.startswith("_")
    ]
    assert not own, "put these names into the `__all__` of their modules, or do without them"


def exported(module: str) -> list[str]:
    """What a module exports; of one that does not say, everything."""
    found = importlib.import_module(module)
    return list(getattr(found, "__all__", vars(found)))


def test_there_are_verbs_to_look_at() -> None:
    assert {"demo", "doctor", "survey"} <= {file.parent.name for file in FILES}
