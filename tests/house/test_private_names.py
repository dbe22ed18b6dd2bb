"""Private names of transformers, PEFT, accelerate and TRL are taken in `lema/compat.py` alone.

Such a name may go with any release, and one file says which there are. What is looked for is a name
with an underscore that is imported, or read from something that is imported. Methods that a
subclass of theirs overrides, or that an object is asked for, are no imports and stay where the
object is. Torch's private names stay where they are used, too: they are of tracing and of trees
(`torch.utils._pytree`, `torch._subclasses`), and there is no public name of these.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = ROOT / "lema" / "compat.py"
FILES = sorted(
    file for folder in ("lema", "backends", "tools") for file in (ROOT / folder).rglob("*.py")
)
LIBRARIES = {"transformers", "peft", "accelerate", "trl"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


def private_names(source: str) -> list[str]:
    """Return the private names that a source takes of the libraries."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = [
        name
        for node in nodes
        if isinstance(node, ast.Import)
        for name in node.names
        if is_library(name.name)
    ]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and is_library(node.module)]
    named = [f"{node.module}.{name.name}" for node in froms for name in node.names]
    named += [name.name for name in modules]
    private = [name for name in named if any(map(is_private, name.split(".")))]
    bound = {name.asname or name.name for node in froms for name in node.names}
    bound |= {name.asname or name.name.partition(".")[0] for name in modules}
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    return private + [ast.unparse(node) for node in reads if owner(node) in bound]


def owner(node: ast.AST) -> str:
    """Return the first name of a chain of attributes and calls."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def test_no_other_file_takes_a_private_name() -> None:
    taken = {
        str(file.relative_to(ROOT)): private_names(file.read_text(encoding="utf-8"))
        for file in FILES
    }
    taken.pop(str(HOME.relative_to(ROOT)))
    assert not {file: names for file, names in taken.items() if names}, (
        "give them public names in lema/compat.py"
    )


def test_there_are_private_names_to_find() -> None:
    assert "transformers.modeling_utils._get_dtype" in private_names(
        HOME.read_text(encoding="utf-8")
    )
    assert len(private_names(HOME.read_text(encoding="utf-8"))) >= 10


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "from transformers.modeling_utils import _get_dtype",
            ["transformers.modeling_utils._get_dtype"],
        ),
        ("import peft._private as p", ["peft._private"]),
        ("from peft import LoraModel\nLoraModel._check(None)", ["LoraModel._check"]),
        ("import accelerate\naccelerate.state.State._shared", ["accelerate.state.State._shared"]),
        ("from trl import a as b\nb._c", ["b._c"]),
        ("from transformers import __version__\nself._own", []),
        ("from torch.utils._pytree import tree_map", []),
    ],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert private_names(source) == found
