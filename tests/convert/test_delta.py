"""A delta and its base make, bit for bit, the model that saving all of it would have written; no
other base does.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fulltraining import attention_of_the_last_four, everything, one_in_the_middle
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches, write_checkpoint

from lema import LemaConfig, LemaModel
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.convert import apply_delta
from lema.convert.delta import DELTA_NAME, is_delta
from lema.errors import ConfigError, LemaError, WeightsError
from lema.storage import GlobalBinaryIndex
from lema.storage.verify import base_fingerprint
from lema.train.full.checkpoint import save_delta, save_trained
from lema.train.full.training import FullTraining

Chosen = Callable[[str], bool]


@contextmanager
def trained(
    model: Path, chosen: Chosen, dtype: str | None = None
) -> Iterator[tuple[LemaModel, FullTraining]]:
    """Train a model's own weights for two steps."""
    opened = LemaModel(
        LemaConfig(str(model), device="cpu", strategy="resident", learning_rate=1e-2, dtype=dtype)
    )
    training = FullTraining(opened.adapter, opened.config, chosen)
    for _ in range(2):
        training.accumulate(micro_batches(2))
    yield opened, training
    opened.close()


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a delta of the middle of it."""
    place = tmp_path_factory.mktemp("delta")
    base = write_checkpoint("llama", place).streamed
    with trained(base, attention_of_the_last_four) as (model, training):
        return base, save_delta(model, training.master_store, place / "delta", 20_000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "tied", "dtype", "chosen"),
    [
        ("llama", False, None, attention_of_the_last_four),
        ("llama", True, "bfloat16", everything),
        ("gpt2", True, None, one_in_the_middle),
        ("mixtral", False, "float32", everything),
    ],
)
def test_applied_to_its_base_it_is_the_model_that_was_trained(
    name: str, tied: bool, dtype: str | None, chosen: Chosen, tmp_path: Path
) -> None:
    base = write_checkpoint(name, tmp_path, tied=tied).streamed
    with trained(base, chosen, dtype) as (model, training):
        expected = save_trained(model, training.master_store, tmp_path / "whole", 100_000)
        delta = save_delta(model, training.master_store, tmp_path / "delta", 100_000)
        changed = set(training.masters)
    assert is_delta(delta) and not is_delta(expected) and not list(tmp_path.glob(".*"))
    stored = {name for file in delta.glob("*.safetensors") for name in load_file(file)}
    assert stored == changed == set(json.loads((delta / DELTA_NAME).read_text())["tensors"])
    assert files(apply_delta(delta, tmp_path / "applied", max_shard_size=100_000)) == files(
        expected
    )
    was, now = (GlobalBinaryIndex(place) for place in (base, expected))
    assert base_fingerprint(was) != base_fingerprint(now)


def test_it_holds_what_trained_and_nothing_else(saved: tuple[Path, Path]) -> None:
    base, delta = saved
    index = json.loads((delta / "delta.safetensors.index.json").read_text())
    trained_bytes = sum(
        record.nbytes
        for name, record in GlobalBinaryIndex(base).items()
        if attention_of_the_last_four(name)
    )
    assert index["metadata"]["total_size"] == trained_bytes > 0
    assert len(set(index["weight_map"].values())) > 1


def test_another_base_is_refused_and_a_moved_one_is_not(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    base, delta = saved
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in base.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert files(apply_delta(delta, tmp_path / "one", moved)) == files(
        apply_delta(delta, tmp_path / "two")
    )
    shard = sorted(moved.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(WeightsError, match="not the model that was trained") as raised:
        apply_delta(delta, tmp_path / "three", moved)
    assert str(base) in raised.value.how and not (tmp_path / "three").exists()


def test_the_files_may_be_divided_otherwise(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = saved
    one = {
        name: tensor
        for file in base.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    save_file(one, tmp_path / "model.safetensors", {"format": "pt"})
    assert base_fingerprint(GlobalBinaryIndex(tmp_path)) == base_fingerprint(
        GlobalBinaryIndex(base)
    )


def test_every_part_of_a_tensor_that_training_changes_shows(tmp_path: Path) -> None:
    def fingerprint(tensor: torch.Tensor, name: str = "weight") -> str:
        save_file({name: tensor}, tmp_path / "model.safetensors")
        return base_fingerprint(GlobalBinaryIndex(tmp_path))

    for size in (1, 100, 5_000):
        whole = torch.randn(size)
        same = {fingerprint(whole), fingerprint(whole.clone())}
        others = {
            fingerprint(whole, "other"),
            fingerprint(whole.view(1, size)),
            fingerprint(whole.bfloat16()),
        }
        for place in {0, size // 2, size - 1}:
            changed = whole.clone()
            changed[place] += 1
            others.add(fingerprint(changed))
        assert (
            len(same) == 1
            and len(others) == 3 + len({0, size // 2, size - 1})
            and not same & others
        )


def broken(delta: Path, out: Path, **changes: object) -> Path:
    """Copy a delta with other words in its manifest."""
    out.mkdir()
    for file in delta.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    about = json.loads((delta / DELTA_NAME).read_text()) | changes
    (out / DELTA_NAME).write_text(json.dumps(about))
    return out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format 2"),
        ({"more": 1}, "keys are not those"),
        ({"base": 3}, "base is of another type"),
        ({"tensors": [1]}, "tensors is of another type"),
        ({"tensors": []}, "it and the other files list different tensors"),
        ({"dtype": "load"}, "no dtype 'load'"),
        ({"dtype": "bfloat16"}, "is not a tensor of the base model"),
        ({"base": "/no/such/place"}, "does not exist"),
        ({"fingerprint": "1-0"}, "not the model that was trained"),
    ],
)
def test_what_is_wrong_in_it_is_said(
    changes: dict[str, object], says: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(LemaError, match=says):
        apply_delta(broken(saved[1], tmp_path / "broken", **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_of_it_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    cut = broken(saved[1], tmp_path / "cut")
    shard = sorted(cut.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="truncated"):
        apply_delta(cut, tmp_path / "out")
    outside = broken(saved[1], tmp_path / "outside")
    index = outside / "delta.safetensors.index.json"
    index.write_text(index.read_text().replace("delta-00001", "../delta-00001"))
    with pytest.raises(WeightsError, match=r"not a \.safetensors file next to it"):
        apply_delta(outside, tmp_path / "out")


def test_the_command_tells_a_delta_from_an_adapter(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, delta = saved
    assert run(app, ["merge", str(delta), str(tmp_path / "out"), "--base", str(base)]) == 0
    assert files(tmp_path / "out") == files(apply_delta(delta, tmp_path / "expected"))
    assert (
        run(app, ["merge", str(delta), str(tmp_path / "new"), "--rounding", "stochastic"])
        == ConfigError.exit_code
    )
    assert "a delta has complete weights" in capsys.readouterr().err


def test_an_empty_place_is_wanted(
    checkpoint_of: Callable[..., Checkpoint], saved: tuple[Path, Path]
) -> None:
    base, delta = saved
    with pytest.raises(ConfigError, match="the directory is not empty"):
        apply_delta(delta, base)
    with (
        trained(checkpoint_of("llama").streamed, one_in_the_middle) as (model, training),
        pytest.raises(ConfigError, match="the directory is not empty"),
    ):
        save_delta(model, training.master_store, base)
