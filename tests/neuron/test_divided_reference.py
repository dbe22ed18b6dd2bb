"""Divided among processes, a preference loss compares with the adapter that it began with, as in
one process.
"""

import math
from pathlib import Path

import pytest
import torch
from dividedwork import furthest
from forked import run_forked
from referencework import OBJECTIVES, SEQUENCE, main, steps, write_model
from safetensors.torch import load_file
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.whole, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    write_model(directory)
    run_forked(main, [directory], 2, directory, 400)
    return directory


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, dict[str, Tensor]]:
    return {one: steps(place, one, place / f"alone {one}", device="cpu") for one in OBJECTIVES}


@pytest.mark.parametrize("sequence", SEQUENCE, ids=["tokens", "sequence"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_processes_give_what_one_gives_also_from_a_checkpoint(
    place: Path, alone: dict[str, dict[str, Tensor]], objective: str, sequence: bool
) -> None:
    found = load_file(place / f"{objective} {sequence}.safetensors")
    expected = alone[objective]
    assert furthest(found, expected, "gradient") < 1e-5
    assert furthest(found, expected, "losses") < 1e-5
    assert furthest(found, expected, "after") < 1e-4
    # The adapter and its reference are one at first, and not after a step, which a checkpoint keeps
    # apart.
    assert float(found["losses"][0]) == pytest.approx(
        math.log(2) if objective == "dpo" else 0.5, abs=1e-6
    )
    assert abs(float(found["losses"][1] - found["losses"][0])) > 1e-3
    kept = load_file(place / f"saved {objective} {sequence}" / "ref" / "adapter_model.safetensors")
    start = load_file(place / "adapter" / "adapter_model.safetensors")
    assert kept.keys() == start.keys() and all(
        torch.equal(kept[name], start[name]) for name in start
    )
