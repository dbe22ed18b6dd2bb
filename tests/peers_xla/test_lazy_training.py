"""Training on the CPU device of torch_xla: as many graphs for any number of layers, none later,
the CPU's numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # processes, each of which compiles

HERE = Path(__file__).parent
# What comes before the layers; a layer forward, and backward; the top layer with head and loss, and
# what is left of its backward once it is known by how much the loss counts; the norm of the
# gradients, which is asked for; the update.
GRAPHS = 7
OF_LAYERS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "4 layers": {"depth": 4},
    "12 layers": {"depth": 12},
    "all layers stay": {"device_memory": "1GiB"},
    "graphs to be kept": {"gradient_checkpointing": False},
    "rows padded in every other step": {"padded": "sometimes", "pad_to_multiple_of": 16},
    "bfloat16": {"dtype": "bfloat16"},
}
HALF = "bfloat16"
HALF_APART = 2**-8  # which has eight bits
# What steps may put weights apart by: AdamW divides a gradient by its own size, so that an element
# which is all but nothing moves by rounding alone. The gradients themselves are compared by a test
# below.
APART = {"rows padded in every other step": 1e-4, HALF: float("inf")}


def done(work: str, root: Path, **settings: Any) -> dict[str, Any]:
    """Return what a process of its own has found."""
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "PYTHONPATH": str(HERE.parent / "support"),
        "HF_HUB_OFFLINE": "1",
    }
    line = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "xlawork.py"),
        work,
        str(root),
        json.dumps(settings),
    ]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=list(SETTINGS))
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """What training a model with each settings was like."""
    return request.param, done("train", tmp_path_factory.mktemp("run"), **SETTINGS[request.param])


def test_a_first_step_compiles_as_many_graphs_for_any_depth_and_later_none(
    run: tuple[str, dict[str, Any]],
) -> None:
    _, found = run
    assert found["lazy"]["graphs"][0] == [GRAPHS, OF_LAYERS]
    assert found["lazy"]["graphs"][1:] == [[0, 0]] * (len(found["lazy"]["losses"]) - 1)


def test_the_numbers_are_those_of_the_cpu(run: tuple[str, dict[str, Any]]) -> None:
    name, found = run
    lazy = found["lazy"]
    plain = found["plain"]
    assert lazy["losses"] == pytest.approx(
        plain["losses"], rel=HALF_APART if name == HALF else 1e-5
    )
    assert lazy["losses"][0] != lazy["losses"][-1]  # it has trained
    assert found["apart"] <= APART.get(name, 1e-5)
    values = [[value for value, _ in one["evaluations"]] for one in (lazy, plain)]
    assert values[0] == pytest.approx(values[1], rel=HALF_APART if name == HALF else 1e-5)


@pytest.mark.parametrize("name", ["4 layers", "rows padded in every other step"])
def test_each_step_s_gradients_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    found = done("gradients", tmp_path, **SETTINGS[name])
    assert len(found["apart"]) >= 4 and max(found["apart"]) <= 1e-5


def test_an_evaluation_compiles_nothing_the_second_time(run: tuple[str, dict[str, Any]]) -> None:
    _, found = run
    (_, first), (_, second) = found["lazy"]["evaluations"]
    # a layer's graph, for as many micro-batches as it has
    assert first[1] <= 1 and second == [
        0,
        0,
    ]


def test_no_operation_of_a_layer_goes_through_the_host(run: tuple[str, dict[str, Any]]) -> None:
    _, found = run
    assert not found["lazy"]["falls"]


def test_what_is_dropped_is_dropped_again_where_a_layer_is_computed_again(tmp_path: Path) -> None:
    found = done("slope", tmp_path)
    # it is the generator's state that says what is
    assert found["same"][0] == found["same"][1] != found["other"]
    assert found["formed"] == pytest.approx(found["seen"], rel=0.02) and found["seen"] > 2e-3
