"""Every script in runs/ prints one row of the README's table; here with a tiny model on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).parents[2] / "runs"
SCRIPTS = sorted(path for path in RUNS.glob("*.py") if path.name != "row.py")


def test_each_script_says_what_it_is_and_how_it_is_called() -> None:
    assert len(SCRIPTS) >= 4
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert f"python runs/{script.name}" in text and "prints the README's row" in text
        for name, size in re.findall(r'main\("([\w.-]+)", (\d+)\)', text):
            assert (RUNS.parent / "configs/models" / name / f"{size}GB.yaml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["llama_8b_3gb_cpu", "qwen3_8b_8gb", "qwen3_235b_24gb"])
def test_its_tiny_form_prints_a_row(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(RUNS / f"{script}.py"), "--tiny"]
    if "cpu" in script:
        command += ["--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| a tiny model |")]
    assert len(row.strip("|").split(" | ")) == 5 and re.search(r"at the peak", row)
