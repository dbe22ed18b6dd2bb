"""With the package `kernels` installed, a command fetches code of the hub only for an attention
that its user names.

The package here is a stand-in, which notes what is asked of it and has nothing to give.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smallrun import settings, write_model

from lema.cli.kernels import allow_kernels, hide_kernels

STAND_IN = """
import os

class Anything:
    def __init__(self, *args, **options): pass
    def __call__(self, *args, **options): return args[0] if args else self
    def __getattr__(self, name): return Anything()
    def __class_getitem__(cls, key): return cls

def get_kernel(repository, *args, **options):
    with open(os.environ["ASKED"], "a") as out:
        out.write(repository + "\\n")
    raise RuntimeError("the stand-in has no code")

def use_kernel_forward_from_hub(*args, **options): return lambda made: made

use_kernel_func_from_hub = use_kernelized_func = use_kernel_forward_from_hub

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""
ABOUT = "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    (place / "kernels/layer").mkdir(parents=True)
    (place / "kernels/__init__.py").write_text(STAND_IN + '__version__ = "0.18.2"\n')
    for name in ("layer/__init__", "layer/mode"):
        (place / f"kernels/{name}.py").write_text(
            "from kernels import Anything\n__getattr__ = lambda name: Anything\n"
        )
    (place / "kernels-0.18.2.dist-info").mkdir()
    (place / "kernels-0.18.2.dist-info/METADATA").write_text(ABOUT)
    (place / "kernels-0.18.2.dist-info/RECORD").write_text("")
    return place


def asked(
    installed: Path, tmp_path: Path, *words: Any, **changes: Any
) -> tuple[list[str], int, str]:
    """Run a command on a model whose config says so; return which kernels were asked for, the
    exit code, the words.
    """
    model = write_model(tmp_path / "model")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    given = settings(model, tmp_path / "out", max_steps=1).model_dump(exclude_unset=True)
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    (log := tmp_path / "asked").write_text("")
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lema", *words, str(tmp_path / "run.yaml")]
    command += [] if words[0] == "plan" else ["-p", "the mill", "--max-new-tokens", "1"]
    environment = {**os.environ, "PYTHONPATH": path, "ASKED": str(log)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return log.read_text().split(), done.returncode, done.stderr


def test_attention_of_a_config_fetches_nothing(installed: Path, tmp_path: Path) -> None:
    found, code, said = asked(
        installed, tmp_path, "generate", _attn_implementation="flash_attention_2"
    )
    assert (found, code) == ([], 0), said
    assert (
        "attn_implementation: flash_attention_2, which may run code that is not on this machine"
        in said
    )


def test_attention_of_the_user_may(installed: Path, tmp_path: Path) -> None:
    found, code, said = asked(
        installed, tmp_path, "plan", "--attn-implementation", "flash_attention_2"
    )
    assert [one for one in found if "attn" in one], said
    assert code == 2  # the stand-in has none


@pytest.mark.parametrize(
    ("attention", "there"),
    [(None, False), ("sdpa", False), ("eager", False), ("a/b", True), ("flash_attention_3", True)],
)
def test_the_package_is_hidden_until_an_attention_may_need_it(
    attention: str | None, there: bool, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    hide_kernels()
    with pytest.raises(ImportError):
        import kernels  # type: ignore[import-not-found] # noqa: F401
    allow_kernels(attention)
    assert ("kernels" not in sys.modules) is there
    monkeypatch.delitem(sys.modules, "kernels", raising=False)


def test_what_a_process_has_imported_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", os)
    hide_kernels()
    allow_kernels("a/b")
    assert sys.modules["kernels"] is os
