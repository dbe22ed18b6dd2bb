"""What Linux alone has, or Unix, is asked for before it is used, and every module can be
imported where it is not.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import linuxalone
import othersystem
import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("lema", "backends", "tools") for path in (ROOT / folder).rglob("*.py")
)
MODULES = (
    othersystem.MODULES
    | {"crypt", "curses", "readline", "spwd"}
    | {"_winapi", "msvcrt", "winreg", "winsound"}
)
NAMES = {module: set(names.split()) for module, names in othersystem.HIDDEN.items() if names}
# What is there wherever something else is, which is what is asked for.
WITH = {
    "ITIMER_PROF": "setitimer",
    "ITIMER_VIRTUAL": "setitimer",
    "MAP_ANONYMOUS": "MAP_PRIVATE",
    "POSIX_FADV_DONTNEED": "posix_fadvise",
    "PROT_READ": "mprotect",
    "SIGPROF": "setitimer",
    "SIGVTALRM": "setitimer",
    "SIG_SETMASK": "setitimer",
    "pthread_sigmask": "setitimer",
}
ABSENT = {"ImportError", "ModuleNotFoundError"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (one.name.partition(".")[0] for one in node.names)
    if isinstance(node, ast.ImportFrom) and not node.level:
        yield str(node.module).partition(".")[0]


def unguarded(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module imports whenever it is imported, but for what it tries to."""
    for node in body:
        yield from imported(node)
        handlers = node.handlers if isinstance(node, ast.Try) else []
        tried = {
            one.id for handler in handlers for one in ast.walk(handler) if isinstance(one, ast.Name)
        } & ABSENT
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(node, part, [])
            if isinstance(inner, list) and not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ):
                yield from unguarded([one for one in inner if not (tried and part == "body")])


def unasked(tree: ast.Module) -> Iterator[str]:
    """Yield the names of `os`, `signal` and `mmap` that not every system has, and that no part
    of a file asks for.
    """
    asked = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = NAMES.get(node.value.id, set())
            if node.attr in known and not {node.attr, WITH.get(node.attr)} & asked:
                yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module in NAMES:
            yield from (
                f"{node.module}.{one.name}" for one in node.names if one.name in NAMES[node.module]
            )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_what_some_systems_lack_only_where_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not set(unguarded(tree.body)) & MODULES
    assert not sorted(unasked(tree))


def test_what_is_not_guarded_is_found() -> None:
    code = (
        "import fcntl\nif 1:\n    from termios import x\nclass A:\n    import pwd\ndef f():\n  "
        "  import grp\n"
    )
    code += "try:\n    import resource\nexcept ModuleNotFoundError:\n    import msvcrt\n"
    assert set(unguarded(ast.parse(code).body)) & MODULES == {"fcntl", "termios", "pwd"}
    code = (
        "import os\nos.pread(0)\nif hasattr(os, 'preadv'):\n    os.preadv(0)\nfrom signal "
        "import SIGHUP\n"
    )
    assert sorted(unasked(ast.parse(code))) == ["os.pread", "signal.SIGHUP"]


def test_every_module_can_be_imported_where_all_this_is_hidden() -> None:
    places = [
        path.relative_to(ROOT).with_suffix("")
        for path in FILES
        if path.name not in ("__main__.py",)
    ]
    modules = [
        ".".join(place.parts[place.parts[0] != "lema" :]).removesuffix(".__init__")
        for place in places
    ]
    # The program that renders templates is one, and what needs a kit of a device's maker is not
    # here.
    code = f"import importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
    code += "from lema.backend.host.files import OPEN_NAMES_LOCKED\nassert OPEN_NAMES_LOCKED"
    found = os.pathsep.join(
        [str(ROOT / "tests/support/watching"), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "OTHER_SYSTEM": "1", "PYTHONPATH": found}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


def test_the_tests_of_what_linux_alone_does_exist() -> None:
    for file, names in linuxalone.TESTS.items():
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(names) - {"*"} <= known, file


def translated(tree: ast.Module) -> Iterator[str]:
    """Yield what reads or writes text in the system's own encoding, or writes the system's own
    ends of lines.
    """
    for node in ast.walk(tree):
        name = (
            node.func.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            else ""
        )
        if not isinstance(node, ast.Call) or ast.unparse(node.func) == "os.open":
            continue
        name = name or getattr(node.func, "id", "")
        keywords = {keyword.arg for keyword in node.keywords}
        words = [
            one.value
            for one in node.args
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        modes = [word for word in words if set(word) <= set("rwabx+t")]
        asks = {"write_text": {"encoding", "newline"}, "read_text": {"encoding"}}.get(name, set())
        if (
            name in ("open", "fdopen")
            and not any("b" in mode for mode in modes)
            and (name == "fdopen" or modes)
        ):
            asks = {"encoding"} if "r" in modes[-1] else {"encoding", "newline"}
        if asks - keywords:
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_texts_are_the_same_bytes_on_every_system(path: Path) -> None:
    assert not list(translated(ast.parse(path.read_text(encoding="utf-8"))))


def test_what_is_translated_is_found() -> None:
    code = "p.write_text(a, encoding='utf-8')\np.read_text()\np.open('w')\nopen(p, 'rb')\n"
    code += "p.open('w', encoding=e, newline='')"
    assert [one.partition(":")[0] for one in translated(ast.parse(code))] == ["1", "2", "3"]
