"""LEMA started from Python prints nothing of torchao's and bitsandbytes', and imports neither on
its own.

Each case is a fresh process, because a library prints its warnings once, when it is imported. PEFT
and transformers import both libraries where they are installed; the tests hold that this is silent,
and that no module of LEMA is the importer. The command line has neither imported unless the run
asks for one, and leaves both importable.
"""

import gc
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lema import LemaConfig
from lema.cli.libraries import import_libraries
from tests.support.smallrun import token_rows, write_model

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torchao", "bitsandbytes")

# Notes who imports the libraries: the first file on the stack that is not the import machinery's.
WHO = """
import importlib.abc, json, sys
importers = []
class Watcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torchao", "bitsandbytes"):
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith("<frozen importlib") or "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importers.append(frame.f_code.co_filename)
sys.meta_path.insert(0, Watcher())
"""
SMALL_MODEL = """
from lema import LemaConfig, LemaModel
model = LemaModel(LemaConfig({model!r}, device="cpu", output_dir={output!r}, lora_rank=2))
model.initialize_lora()
model.close()
"""
END = """
import lema
ours = [one for one in importers if one.startswith(lema.__path__[0])]
assert not ours, ours
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ)
    )


def assert_silent(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_importing_lema_imports_neither_library() -> None:
    loaded = f"[name for name in {LIBRARIES} if name in sys.modules]"
    assert_silent(python("-c", f"import sys, lema\nassert not {loaded}, {loaded}"))


def test_a_model_with_an_adapter_is_built_in_silence(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    small = SMALL_MODEL.format(model=str(tmp_path / "model"), output=str(tmp_path / "output"))
    assert_silent(python("-c", WHO + small + END))


COMMAND = """
import gc, importlib, json, sys
from lema.cli import main
try:
    main()
except SystemExit as end:
    names = ("bitsandbytes", "torchao", "torch._inductor.compile_fx")
    loaded = [name for name in names if name in sys.modules]
    for name in names[:2]:
        importlib.import_module(name)
    print(json.dumps([end.code, loaded, gc.isenabled()]))
"""


@pytest.mark.skipif(
    not all(map(find_spec, LIBRARIES)),
    reason="both libraries are to be installed, and not imported",
)
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("adamw_torch", id="neither"),
        pytest.param("adamw_8bit", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_imports_the_libraries_only_if_it_asks_for_one(tmp_path: Path, asked: str) -> None:
    model = write_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    config = tmp_path / "run.yaml"
    rows.write_text("".join(json.dumps(row) + "\n" for row in token_rows(2)), encoding="utf-8")
    settings = {
        "model_name_or_path": str(model),
        "train_data": str(rows),
        "device": "cpu",
        "lora_rank": 2,
    }
    settings |= {
        "max_steps": 1,
        "save_steps": 0,
        "optim": asked,
        "output_dir": str(tmp_path / "output"),
    }
    config.write_text(
        "\n".join(f"{name}: {value}" for name, value in settings.items()), encoding="utf-8"
    )
    done = python("-c", COMMAND, "train", str(config))
    code, loaded, collects = json.loads(done.stdout.splitlines()[-1])
    assert (code, collects) == (0, True), done.stderr
    assert bool(loaded) == (asked != "adamw_torch"), loaded


@pytest.mark.parametrize(
    ("by", "trusted", "optim"),
    [("", False, "adamw_torch"), ("main", True, "adamw_torch"), ("main", False, "lion_8bit")],
)
def test_nothing_is_left_out_of_a_users_process_nor_where_it_may_be_needed(
    monkeypatch: pytest.MonkeyPatch, by: str, trusted: bool, optim: Any
) -> None:
    monkeypatch.setattr(
        gc, "disable", lambda: pytest.fail("the libraries were imported without others")
    )
    import_libraries(
        cast(Any, SimpleNamespace(obj=by)), LemaConfig("m", optim=optim), trusted=trusted
    )


@pytest.mark.exhaustive  # nothing but imports, for as long as a run takes
def test_a_benchmark_says_nothing_on_standard_error() -> None:
    done = python("benchmarks/speed.py", "--help")  # its imports are the whole of LEMA's and PEFT's
    assert (done.returncode, done.stderr) == (0, "")
    assert not [
        word for word in (*LIBRARIES, "_pytree", "Failed to load") if word in done.stdout
    ], done.stdout
