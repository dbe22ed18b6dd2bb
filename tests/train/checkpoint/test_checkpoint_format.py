"""What a checkpoint is on disk, what is never saved, and what a save that fails leaves."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from smallrun import batch, opened, run_fit, settings, token_rows, write_model
from transformers import TrainerState

from lema import LemaModel
from lema.errors import AdapterError, DiskError, NonFiniteError
from lema.storage import atomic as commits
from lema.storage import verify as savedtensors
from lema.storage.manifest import MANIFEST, check_manifest
from lema.storage.verify import base_fingerprint
from lema.train.checkpoint.format import checkpoints
from lema.train.plain.run import save_step

FILES = {
    "adapter_base.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "lema_config.json",
    "manifest.json",
    "optimizer.safetensors",
    "state.json",
    "trainer_state.json",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Iterator[LemaModel]:
    with opened(settings(llama, tmp_path / "out")) as found:
        yield found


@pytest.mark.slow
def test_a_checkpoint_is_json_and_safetensors_with_all_that_a_run_goes_on_from(
    llama: Path, tmp_path: Path
) -> None:
    config = settings(
        llama,
        tmp_path / "out",
        max_steps=5,
        save_steps=5,
        batch_size=2,
        gradient_accumulation_steps=2,
    )
    before = os.umask(0o022)
    try:
        run_fit(config, token_rows(6))
    finally:
        os.umask(before)
    directory = tmp_path / "out" / "checkpoint-5"
    check_manifest(directory)
    assert {path.name for path in directory.iterdir()} == FILES
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}
    assert directory.stat().st_mode & 0o777 == 0o755
    state = {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}[
        "state.json"
    ]
    assert state["kind"] == "adapters" and state["global_step"] == 5
    # Ten batches of three to an epoch.
    assert (
        state["extra"]["position"] == {"epoch": 3, "batch": 1}
        and state["extra"]["data"]["rows"] == 6
    )
    assert state["schedule"]["last_epoch"] == 5 and "scaler" in state
    assert state["generators"].keys() == {"python", "numpy", "torch", "device", "kind"}
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "safetensors")}
    assert state["versions"] == versions | {
        "lema": version("lema-lora"),
        "python": platform.python_version(),
    }
    saved = json.loads((directory / "lema_config.json").read_text())
    assert saved == config.to_dict()
    assert state["config"] == hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()
    with opened(config, adapter=False) as model:
        assert state["base"] == base_fingerprint(model.gbi)
    callbacks = TrainerState.load_from_json(str(directory / "trainer_state.json"))
    assert (callbacks.global_step, callbacks.max_steps) == (5, 5)
    assert [row["step"] for row in callbacks.log_history] == [1, 2, 3, 4, 5]


def test_without_fit_there_is_a_trainer_state_too(model: LemaModel, tmp_path: Path) -> None:
    trainer = model.get_trainer()
    for seed in range(2):
        trainer.train_step(batch(seed))
    trainer.save_checkpoint(tmp_path / "saved")
    check_manifest(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == FILES
    found = TrainerState.load_from_json(str(tmp_path / "saved" / "trainer_state.json"))
    assert found.global_step == 2 and found.log_history == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["adapter", "moment"])
def test_nothing_that_is_not_finite_is_ever_saved(
    model: LemaModel, where: str, tmp_path: Path
) -> None:
    trainer = model.get_trainer()
    trainer.train_step(batch(1))
    trainer.save_checkpoint(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    named = [
        (name, one) for name, one in trainer._adapters().named_parameters() if one.requires_grad
    ]
    number = next(number for number, (name, _) in enumerate(named) if ".7." in name)
    name, parameter = named[number]
    spoilt = (
        parameter.detach() if where == "adapter" else trainer.ready().state[parameter]["exp_avg_sq"]
    )
    said = (
        name.replace(".default", "")
        if where == "adapter"
        else f"the optimizer's {number}.exp_avg_sq"
    )
    for value in ("nan", "inf", "-inf"):
        spoilt.view(-1)[3] = float(value)
        for directory in ("saved", "new"):
            with pytest.raises(
                NonFiniteError, match=r"1 of its [\d,]+ numbers are NaN or infinite"
            ) as caught:
                trainer.save_checkpoint(tmp_path / directory)
            assert (
                caught.value.what.startswith(f"{said} is not saved") and caught.value.exit_code == 5
            )
        if where == "adapter":
            with pytest.raises(NonFiniteError):
                model.save_pretrained(tmp_path / "last")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("**/.*"))


def wrong_value(tensors: dict[str, Any]) -> None:
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1


def wrong_shape(tensors: dict[str, Any]) -> None:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].reshape(1, *tensors[name].shape).contiguous()


def wrong_type(tensors: dict[str, Any]) -> None:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].double()


def another_name(tensors: dict[str, Any]) -> None:
    tensors["base_model.model.another"] = tensors.pop(sorted(tensors)[0])


def one_less(tensors: dict[str, Any]) -> None:
    tensors.pop(sorted(tensors)[0])


@pytest.mark.slow
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_what_is_on_disk_is_compared_with_memory_before_the_checkpoint_gets_its_name(
    file: str, model: LemaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = savedtensors.check_written
    spoils = [wrong_value, wrong_shape, wrong_type, another_name, one_less]

    def written(path: Path, *expected: Any) -> None:
        if path.name == file:
            tensors = load_file(path)
            spoils.pop()(tensors)
            save_file(tensors, path, {"format": "pt"})
        checked(path, *expected)

    for module in ("lora.files", "train.checkpoint.format"):
        monkeypatch.setattr(f"lema.{module}.check_written", written)
    trainer = model.get_trainer()
    trainer.train_step(batch(1))
    while spoils:
        with pytest.raises(DiskError, match="the disk returns other bytes than were written"):
            trainer.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and not list(tmp_path.glob("**/.*"))


def test_an_adapter_that_would_be_saved_empty_is_found(
    model: LemaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where processes hold parts of it, and none the whole: PEFT's own list of what to save
    has nothing in it.
    """
    monkeypatch.setattr("lema.lora.files.saved_tensors", lambda *_: {})
    monkeypatch.setattr("peft.peft_model.get_peft_model_state_dict", lambda *_, **__: {})
    with pytest.raises(DiskError, match=r"0 numbers are in it, and [\d,]+ train"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.slow
def test_old_checkpoints_go_only_when_the_new_one_has_been_read_back(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(directory: Path) -> None:
        raise AdapterError(
            "a file has changed: its SHA-256 differs", where=str(directory / "state.json")
        )

    with opened(settings(llama, tmp_path / "out", save_steps=1, save_total_limit=2)) as model:
        trainer = model.get_trainer()
        for seed in range(2):
            trainer.train_step(batch(seed))
        with monkeypatch.context() as patch, pytest.raises(DiskError, match="returns other bytes"):
            patch.setattr(commits, "check_manifest", damaged)
            trainer.train_step(batch(2))
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "checkpoint-1",
            "checkpoint-2",
        ]
        for one in checkpoints(Path(trainer.config.output_dir)):
            check_manifest(one)
        save_step(trainer)
        assert [path.name for path in checkpoints(Path(trainer.config.output_dir))] == [
            "checkpoint-2",
            "checkpoint-3",
        ]


@pytest.mark.slow
def test_a_checkpoint_of_the_same_name_is_replaced(model: LemaModel, tmp_path: Path) -> None:
    trainer = model.get_trainer()
    for step in (1, 2):
        trainer.train_step(batch(step))
        trainer.save_checkpoint(tmp_path / "saved", {"which": step})
    check_manifest(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert trainer.load_checkpoint(tmp_path / "saved") == {"which": 2}


def test_a_run_sweeps_what_killed_ones_have_left_and_puts_back_what_was_aside(
    llama: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = settings(llama, out, save_steps=1, max_steps=2)
    ended, _ = run_fit(config, token_rows(8))
    (out / "checkpoint-2").rename(out / ".checkpoint-2.0123abcd.old")
    (out / ".checkpoint-2.89abcdef.part").mkdir()
    (out / ".checkpoint-1.89abcdef.gone").mkdir()
    result, _ = run_fit(config, token_rows(8), resume=True)
    # The run had come to its end: what was aside is its last checkpoint.
    assert result["train_loss"] == ended["train_loss"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert (out / "checkpoint-2" / MANIFEST).is_file()
