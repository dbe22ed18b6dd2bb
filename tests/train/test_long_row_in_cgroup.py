"""A long row in a memory cgroup is killed and resumed: the benchmark of that, at a small length."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LENGTH = 4096
LIMIT = 10**9  # of which the interpreter and its libraries take half


def memory_groups_can_be_made() -> bool:
    probe = "from limits_group import memory_group\nwith memory_group(None): pass"
    benchmarks = {"cwd": ROOT / "benchmarks", "capture_output": True}
    return subprocess.run([sys.executable, "-c", probe], check=False, **benchmarks).returncode == 0


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(900)  # of eight starts of Python, on a machine that does much else
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_long_row_in_a_small_cgroup_is_killed_and_resumed_bitwise(
    kind: str, tmp_path: Path
) -> None:
    if not memory_groups_can_be_made():
        pytest.skip("this process may not make memory cgroups")
    options = ["--tiny", "--kind", kind, "--length", str(LENGTH), "--memory", str(LIMIT / 1e9)]
    script = ["benchmarks/long_row_in_cgroup.py", *options, "--directory", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, *script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    row = json.loads(run.stdout.splitlines()[-1])
    # in the middle of the long row's step, and behind it
    assert row["checkpoints_at_kills"] == [
        ["checkpoint-1"],
        ["checkpoint-1", "checkpoint-2"],
    ]
    assert row["bitwise"] and all(row["bitwise"].values()), row
    assert all(peak <= LIMIT for peak in row["peak"])
    assert list(tmp_path.iterdir()) == [], "nothing is left on disk"
