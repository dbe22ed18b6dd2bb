"""How to add a backend: copy `tests/contract/toy`, and subclass the contract in its tests.

The subclass for the toy is in `tests/contract/test_contract_toy.py`. Here the toy is installed as
pip would install it, and a run names it by its device. An accelerator that torch knows needs no
class, but a line that names the one of all accelerators.
"""

import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from installed import installed, installed_project
from parity import ALPHA, RANK, SEED, assert_same, draw_b, streamed_step, whole_model, whole_step
from tiny import Checkpoint, micro_batches

from lema import LemaConfig, LemaModel
from lema.backend import available

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "contract" / "toy"


def test_a_run_on_the_toy_has_the_bits_of_the_whole_model(
    checkpoint_of: Callable[..., Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    expected = whole_step(whole, batches)
    with installed_project(tmp_path / "site", monkeypatch, TOY):
        config = LemaConfig(
            str(checkpoint.streamed),
            device="toy",
            device_memory=None,
            lora_rank=RANK,
            lora_alpha=ALPHA,
            seed=SEED,
        )
        with closing(LemaModel(config)) as model:
            model.initialize_lora()
            model.lora_manager.train()
            draw_b(model.lora_manager)
            assert model.backend.name == "toy"
            assert_same(streamed_step(model, batches), expected)


def test_its_package_names_lema_as_the_index_does() -> None:
    """Because the index has another project whose name is `lema`."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert tomllib.loads((TOY / "pyproject.toml").read_text())["project"]["dependencies"] == [name]


def test_an_accelerator_that_torch_knows_is_a_line_of_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has none, which `lema backends` says with how to get one."""
    points = {"hpu": "lema_accelerator:AcceleratorBackend"}
    with installed(tmp_path / "site", monkeypatch, "hpu-for-lema", points, modules={}):
        (listed,) = [backend for backend in available() if backend.name == "hpu"]
    assert not listed.ok
    assert "hpu" in (listed.reason or "")
