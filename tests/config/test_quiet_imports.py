"""LEMA started from Python prints nothing of torchao's and bitsandbytes', and imports neither on its own.

Each case is a fresh process, because a library prints its warnings once, when it is imported. PEFT and transformers
import both libraries where they are installed; the tests hold that this is silent, and that no module of LEMA is the
importer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.smallrun import write_model

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
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))


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


@pytest.mark.exhaustive  # nothing but imports, for as long as a run takes
def test_a_benchmark_says_nothing_on_standard_error() -> None:
    done = python("benchmarks/speed.py", "--help")  # its imports are the whole of LEMA's and PEFT's
    assert (done.returncode, done.stderr) == (0, "")
    assert not [word for word in (*LIBRARIES, "_pytree", "Failed to load") if word in done.stdout], done.stdout
