"""The newest checkpoint that is whole is gone on from; of the others it is said, file by file,
why they are not.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lema.config import LemaConfig
from lema.config.lemaconfig import CONFIG_NAME
from lema.config.settings import Change
from lema.errors import AdapterError
from lema.storage.manifest import MANIFEST, write_manifest
from lema.train.checkpoint.resume import CLASSES, as_begun, changed_settings, newest_sound

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"


def written(directory: Path, step: int) -> Path:
    """Write what is a checkpoint as far as its files go."""
    place = directory / f"checkpoint-{step}"
    place.mkdir(parents=True)
    for name in (ADAPTER, OPTIMIZER):
        save_file({"values": torch.full((4,), float(step))}, place / name)
    state = {
        "global_step": step,
        "schedule": None,
        "scaler": {},
        "generators": {},
        "extra": {},
        "optimizer": {},
    }
    (place / "state.json").write_text(json.dumps(state))
    (place / "adapter_config.json").write_text("{}")
    (place / "lema_config.json").write_text("{}")
    write_manifest(place)
    return place


@pytest.fixture
def found(tmp_path: Path) -> list[Path]:
    return [written(tmp_path / "run", step) for step in (1, 2, 10)]


def flip(file: Path) -> None:
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)


def swap(file: Path) -> None:
    shutil.copy(file.parent.with_name("checkpoint-2") / file.name, file)


def stale(file: Path) -> None:
    """Put a whole checkpoint of another step in its place."""
    shutil.rmtree(file.parent)
    shutil.copytree(file.parent.with_name("checkpoint-2"), file.parent)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "emptied": lambda file: file.write_bytes(b""),
    "zeroed": lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", [ADAPTER, OPTIMIZER, "state.json", "adapter_config.json", "lema_config.json", MANIFEST]
)
def test_a_damaged_one_is_passed_over_and_said(
    found: list[Path], name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](found[-1] / name)
    before = {path: path.read_bytes() for path in found[-1].iterdir()}
    said: list[str] = []
    assert newest_sound(found, said.append) == found[1]
    assert len(said) == 1 and str(found[-1] / name) in said[0] and "passed over" in said[0]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, said[0])
    ]
    assert {path: path.read_bytes() for path in found[-1].iterdir()} == before


@pytest.mark.parametrize("name", [ADAPTER, OPTIMIZER, "state.json"])
def test_a_file_of_another_checkpoint_is_none_of_this_one(found: list[Path], name: str) -> None:
    swap(found[-1] / name)
    said: list[str] = []
    assert newest_sound(found, said.append) == found[1]
    assert name in said[0]


def test_a_whole_checkpoint_under_the_name_of_another_step_is_passed_over(
    found: list[Path],
) -> None:
    stale(found[-1] / ADAPTER)
    said: list[str] = []
    assert newest_sound(found, said.append) == found[1]
    assert "it is of step 2, and its name says 10" in said[0]


def test_what_is_whole_and_yet_no_checkpoint_is_passed_over(found: list[Path]) -> None:
    (found[2] / OPTIMIZER).unlink()
    state = json.loads((found[1] / "state.json").read_text())
    (found[1] / "state.json").write_text(json.dumps({**state, "kind": "of another world"}))
    for place in found[1:]:
        (place / MANIFEST).unlink()
        write_manifest(place)
    said: list[str] = []
    assert newest_sound(found, said.append) == found[0]
    assert OPTIMIZER in said[0] and "no kind of training 'of another world'" in said[1]


def test_the_newest_is_taken_without_a_word(found: list[Path]) -> None:
    said: list[str] = []
    assert newest_sound(found, said.append) == found[-1]
    assert said == []


def test_where_none_is_sound_each_is_listed_with_its_fault(found: list[Path]) -> None:
    for place, damage in zip(found, ("flipped", "truncated", "deleted"), strict=True):
        DAMAGES[damage](place / OPTIMIZER)
    with pytest.raises(AdapterError, match="no checkpoint is valid") as raised:
        newest_sound(found, lambda _: None)
    lines = raised.value.what.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[1:]] == [
        "- checkpoint-10",
        "- checkpoint-2",
        "- checkpoint-1",
    ]
    assert "missing" in lines[1] and "bytes" in lines[2] and "SHA-256" in lines[3]
    assert "--weights-only" in raised.value.how and raised.value.exit_code == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_for_the_weights_alone_one_without_its_optimizer_will_do(
    found: list[Path], damage: str
) -> None:
    DAMAGES[damage](found[-1] / OPTIMIZER)
    said: list[str] = []
    assert newest_sound(found, said.append, weights_only=True) == found[-1]
    assert said == []
    flip(found[-1] / ADAPTER)
    assert newest_sound(found, said.append, weights_only=True) == found[1]


def test_every_setting_is_in_one_class() -> None:
    """A setting that is new must be given one: may a run that goes on change it?"""
    assert set(CLASSES) == set(LemaConfig.model_fields)
    for name, field in LemaConfig.model_fields.items():
        assert sum(isinstance(one, Change) for one in field.metadata) == 1, name


def test_what_differs_is_told_by_its_class_and_what_is_missing_counts_as_the_same() -> None:
    then = LemaConfig("model", learning_rate=0.1, seed=1, save_steps=5).to_dict()
    now = LemaConfig("moved", learning_rate=0.2, seed=2, save_steps=6).to_dict()
    told = {change: [str(one) for one in changed_settings(then, now, change)] for change in Change}
    assert told[Change.REFUSED] == ["seed: 1 -> 2"]
    assert told[Change.REPORTED] == ["learning_rate: 0.1 -> 0.2"]
    assert told[Change.SILENT] == ["model_name_or_path: 'model' -> 'moved'", "save_steps: 5 -> 6"]
    assert told[Change.DATA] == told[Change.ADAPTER] == []
    del then["seed"]
    assert changed_settings(then, now, Change.REFUSED) == []


def test_going_on_says_no_more_of_the_settings_than_was_said(tmp_path: Path) -> None:
    """A run that goes on has a card like that of the run that was not stopped, which lists what
    was given.
    """
    config = LemaConfig(str(tmp_path / "model"), device="cpu")
    (tmp_path / CONFIG_NAME).write_text(
        json.dumps({"micro_batch_size": None, "loss_chunk_tokens": 64})
    )
    given = {*config.model_fields_set, "loss_chunk_tokens"}
    assert as_begun(config, tmp_path).model_fields_set == given
