"""The benchmark of activation offloading runs from end to end in a tiny form, and its memory
counts what it says.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from forked import run_forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HIDDEN = 64
LAYERS = 16
ROWS = 2
TOKENS = 256  # activations outweigh the gradients of adapters


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Let the files of `benchmarks/` be imported by their names, as they import each other."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def child() -> ModuleType:
    import activations_child

    return activations_child


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    """One tiny run of two modes: its rows by mode and checkpointing."""
    directory = tmp_path_factory.mktemp("activations")
    sizes = {
        "hidden": HIDDEN,
        "intermediate": 128,
        "layers": LAYERS,
        "vocabulary": 64,
        "rows": ROWS,
        "tokens": TOKENS,
    }
    shape = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    places = ["--directory", str(directory), "--out", str(directory / "results")]
    options = ["--modes", "hidden_states,true", "--devices", "cpu", "--rounds", "2"]
    run_forked(
        run_benchmark, [[*shape, *places, *options]], 1, tmp_path_factory.mktemp("said"), 240
    )
    assert [path.name for path in directory.iterdir()] == ["results"], "nothing is left on disk"
    found = json.loads((directory / "results" / "activations-cpu.json").read_text())
    assert found["device"] == "cpu"
    assert found["machine"]["date"]
    return {(row["mode"], row["checkpointing"]): row for row in found["rows"]}


def run_benchmark(arguments: list[str]) -> None:
    """Run the benchmark; its first child is a process as it is, which imports anew, and the
    others are forked.
    """
    sys.path.insert(0, str(BENCHMARKS))
    import activations
    import activations_child  # what each child would import first
    from faults import forked

    def child_of_benchmark() -> int:
        activations_child.main()
        return 0

    begun = activations._memory
    started = []

    def measure(task: Any, arm: Any) -> dict[str, Any]:
        started.append(arm)
        if len(started) == 1:
            return begun(task, arm)
        sys.argv = ["activations_child.py", json.dumps({"task": asdict(task), "arm": asdict(arm)})]
        with tempfile.NamedTemporaryFile() as log:
            ended = forked.run(child_of_benchmark, Path(log.name))
        assert ended.code == 0, ended.said
        return json.loads(ended.said.splitlines()[-1])

    activations._memory = measure
    sys.argv = ["activations.py", *arguments]
    activations.main()


@pytest.mark.exhaustive  # a process of each mode
def test_every_mode_has_both_kinds_of_rows(rows: dict[tuple[str, bool], dict[str, Any]]) -> None:
    assert set(rows) == {
        (mode, on) for mode in ("none", "hidden_states", "true") for on in (False, True)
    }
    assert all(len(row["all_seconds"]) == 2 for row in rows.values())
    assert all(rows["none", on]["ratio"] == 1 for on in (False, True))


@pytest.mark.exhaustive  # a process of each mode
def test_bytes_moved_are_those_of_a_step(rows: dict[tuple[str, bool], dict[str, Any]]) -> None:
    for on in (False, True):
        assert rows["none", on]["bytes_out"] == rows["none", on]["bytes_back"] == 0
        # A checkpoint saves its input whatever that is; without one nobody saves the first: no
        # gradient goes there.
        inputs = LAYERS if on else LAYERS - 1
        assert rows["hidden_states", on]["bytes_out"] == inputs * ROWS * TOKENS * HIDDEN * 4
        assert rows["true", on]["bytes_out"] >= rows["hidden_states", on]["bytes_out"]
    assert rows["true", False]["bytes_out"] > 10 * rows["true", True]["bytes_out"]


@pytest.mark.exhaustive  # a process of each mode
def test_offloading_lowers_the_peak(rows: dict[tuple[str, bool], dict[str, Any]]) -> None:
    for on in (False, True):
        assert rows["true", on]["peak_device"] < rows["none", on]["peak_device"]
    assert rows["hidden_states", True]["peak_device"] < rows["none", True]["peak_device"]
    assert rows["none", True]["peak_device"] < rows["none", False]["peak_device"]


def test_live_bytes_are_of_results_while_they_live(child: ModuleType) -> None:
    outside = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    weight = torch.ones(1024)
    with child.LiveBytes("cpu") as live:
        kept = weight * 2  # 4096 bytes
        gone = kept.reshape(2, 512) + 1  # as many, and the view is nothing new
        assert live.peak == 8192
        del gone
        again = kept[:512] + 1
        assert live.peak == 8192
        mapped = outside[:2048]
        mapped.copy_(again.view(torch.uint8)[:2048])
        assert live.peak == 8192
        both = torch.cat([kept, again, again])
    assert live.peak == 4096 + 2048 + both.nbytes
