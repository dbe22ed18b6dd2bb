"""Changes of the lines on which numbers depend are noticed by the tests.

pytest -m exhaustive tests/mutants        # each mutant, by the tests that are named with it
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code where tests were collected, ran, and some failed
SELECTED = "not exhaustive and not cuda and not neuron and not seconddevice"


def test_each_is_one_place_in_a_file() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == 27
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.line) == 1, mutant
        compile(text.replace(mutant.line, mutant.change), mutant.file, "exec")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lema", tmp_path / "lema", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / mutant.file
    text = changed.read_text(encoding="utf-8")
    changed.write_text(text.replace(mutant.line, mutant.change), encoding="utf-8")
    paths = [str(tmp_path), str(ROOT), str(ROOT / "backends"), str(ROOT / "tools")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # The change is what is imported: a path of the tests' own would come before it.
    seen = subprocess.run(
        [sys.executable, "-P", "-c", "import lema; print(lema.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(seen.stdout.strip()).parents[1] == tmp_path
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", SELECTED]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *shlex.split(mutant.tests)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == FAILED, done.stdout[-3000:] + done.stderr[-1000:]
