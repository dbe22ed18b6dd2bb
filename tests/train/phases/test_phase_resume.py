"""A run of phases goes on from its newest sound point, says what it passes over, and never
begins afresh in silence.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phaseruns import SOURCES, assert_same, rows, two, weights
from tiny import Checkpoint

from lema import LemaConfig
from lema.errors import AdapterError, ConfigError
from lema.storage.manifest import MANIFEST, check_manifest, write_manifest
from lema.train.phases import stage as phases
from lema.train.phases.paths import PhasePaths, find_point
from lema.train.phases.run import run_phases


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


@pytest.fixture(scope="module")
def whole(
    checkpoint_of: Callable[..., Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Where a run of weights and of adapters, two steps each, was not stopped."""
    out = tmp_path_factory.mktemp("whole")
    streamed = str(checkpoint_of("llama", dropout=0.0).streamed)
    run_phases(
        LemaConfig(
            streamed,
            device="cpu",
            gradient_checkpointing=True,
            save_steps=1,
            max_grad_norm=1.0,
            output_dir=str(out),
        ),
        two(),
        SOURCES,
    )
    return out


@pytest.fixture
def straight(whole: Path, config_of: Callable[..., LemaConfig]) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, config_of("straight").output_dir))


def spoil_newest(run: Path) -> None:
    flip(run / "adapters" / "checkpoint-2" / "optimizer.safetensors")


def spoil_phase(run: Path) -> None:
    flip(run / "adapters" / "checkpoint-2" / "state.json")
    (run / "adapters" / "checkpoint-1" / "adapter_model.safetensors").unlink()


def spoil_phase_and_lose_model(run: Path) -> None:
    spoil_phase(run)
    shutil.rmtree(run / "whole" / "model")
    flip(run / "whole" / "checkpoint-2" / "full-00003.safetensors")


def lose_model(run: Path) -> None:
    spoil_newest(run)
    shutil.rmtree(run / "whole" / "model")


PASSED = "is damaged and passed over"
CASES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "the newest": (
        spoil_newest,
        [PASSED, "resuming from {run}/adapters/checkpoint-1 (step 1 of 2 of adapters)"],
    ),
    "a whole phase": (
        spoil_phase,
        [PASSED, PASSED, "phase adapters begins again: none of its checkpoints is valid"],
    ),
    "a phase, the model below it, and the end of the one before": (
        spoil_phase_and_lose_model,
        [PASSED, PASSED, PASSED, "resuming from {run}/whole/checkpoint-1 (step 1 of 2 of whole)"],
    ),
    "the newest, and the model below it": (
        lose_model,
        [PASSED, "model that phase whole wrote is missing: LEMA writes it again", "resuming from"],
    ),
}


@pytest.mark.slow
def test_whatever_is_damaged_it_ends_bitwise_as_if_nothing_had_been(
    straight: Path, config_of: Callable[..., LemaConfig]
) -> None:
    for number, (name, (damage, expected)) in enumerate(CASES.items()):
        config = config_of(f"damaged-{number}")
        run = Path(shutil.copytree(straight, config.output_dir))
        damage(run)
        said: list[str] = []
        end = run_phases(config, two(), SOURCES, resume=True, say=said.append)
        assert_same(end, straight / "adapters" / "checkpoint-2")
        assert_same(run / "whole" / "model", straight / "whole" / "model")
        check_manifest(run / "whole" / "model")
        assert len(said) == len(expected), (name, said)
        for line, words in zip(said, expected, strict=True):
            assert words.format(run=run) in line
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        measured = [(row["phase"], row["step"]) for row in lines if "loss" in row]
        assert measured == [("whole", 1), ("whole", 2), ("adapters", 3), ("adapters", 4)]


def test_a_model_that_is_damaged_is_named_and_is_written_again_when_it_is_gone(
    straight: Path, config_of: Callable[..., LemaConfig]
) -> None:
    model = straight / "whole" / "model"
    config = config_of("straight")
    (file, *_) = sorted(model.glob("*.safetensors"))
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    flip(file)
    with pytest.raises(AdapterError, match="the model that phase whole left is damaged") as raised:
        run_phases(config, two(), SOURCES, resume=True, say=lambda _: None)
    assert raised.value.where == str(file) and f"delete {model}" in raised.value.how
    shutil.rmtree(model)
    run_phases(config, two(), SOURCES, resume=True, say=lambda _: None)
    after = weights(model)
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


@pytest.mark.slow
def test_what_may_change_holds_from_there_on(
    straight: Path, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(straight / "adapters" / "checkpoint-2")
    groups: list[dict[str, Any]] = []
    original = phases.follow

    def follow(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        groups.append(dict(optimizer.param_groups[0]))
        return original(optimizer, *arguments)

    monkeypatch.setattr(phases, "follow", follow)
    said: list[str] = []
    changes = {"weight_decay": 0.25, "adam_beta1": 0.5}
    run_phases(config_of("straight", **changes), two(), SOURCES, resume=True, say=said.append)
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.25, (0.5, 0.999))]
    assert said[1].endswith("(then -> now): weight_decay: 0.0 -> 0.25; adam_beta1: 0.9 -> 0.5")


def test_where_nothing_is_sound_or_the_run_is_another_it_is_refused(
    straight: Path, config_of: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    config = config_of("straight")
    quiet = {"resume": True, "say": lambda _: None}
    shutil.rmtree(straight / "adapters" / "checkpoint-2")  # there is something left to train
    more = {"one": rows(1, 13), "two": rows(2)}
    with pytest.raises(ConfigError, match="data set one: ") as refused:
        run_phases(config, two(), more, **quiet)
    assert "then -> now" in refused.value.what and "checkpoint-1" in refused.value.where
    with pytest.raises(ConfigError, match="dtype: None -> 'bfloat16'"):
        run_phases(config.model_copy(update={"dtype": "bfloat16"}), two(), SOURCES, **quiet)
    shutil.rmtree(straight / "adapters")
    other = shutil.copytree(config.model_name_or_path, tmp_path / "other")
    about = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(about | {"rms_norm_eps": 0.1}))
    elsewhere = config.model_copy(update={"model_name_or_path": str(other)})
    (straight / "whole" / "checkpoint-2" / MANIFEST).unlink()
    with pytest.raises(
        AdapterError, match=r"config has changed since the training: rms_norm_eps is 0\.1"
    ):
        run_phases(elsewhere, two(), SOURCES, **quiet)
    for file in sorted(other.glob("*.safetensors")):
        flip(file)
    with pytest.raises(AdapterError, match="the model has changed since the training"):
        run_phases(elsewhere, two(), SOURCES, **quiet)
    (straight / "whole" / "checkpoint-1" / MANIFEST).unlink()
    shutil.rmtree(straight / "whole" / "model")
    with pytest.raises(AdapterError, match="no checkpoint of the run is valid") as raised:
        run_phases(config, two(), SOURCES, **quiet)
    assert [line.split(":")[0] for line in raised.value.what.splitlines()[1:]] == [
        "  - whole/checkpoint-2",
        "  - whole/checkpoint-1",
    ]
    said: list[str] = []
    assert find_point(PhasePaths(tmp_path / "nothing", two()), said.append) is None and said == []
    write_manifest(straight / "whole" / "checkpoint-1")
    found = find_point(PhasePaths(straight, two()), said.append)
    assert found is not None and (found.index, found.ended) == (0, False)
