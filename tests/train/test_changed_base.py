"""A run whose model changes under it ends, and what it saved before says on which files it was
trained.
"""

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from smallrun import settings, token_rows, write_model
from transformers import TrainerCallback

import lema
from lema import LemaConfig, LemaModel
from lema.errors import WeightsError
from lema.lora.base import BASE_NAME
from lema.storage import GlobalBinaryIndex
from lema.storage.header import read_header
from lema.storage.verify import SAMPLE_BYTES, base_fingerprint
from lema.train.hf.peftmodel import StreamedPeftModel


def rewrite(file: Path) -> None:
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def exchange(file: Path) -> None:
    rewritten = file.with_name("new")
    rewritten.write_bytes(file.read_bytes())
    rewrite(rewritten)
    rewritten.replace(file)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 64)


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def change_a_little(file: Path) -> None:
    """Change one number in place where the fingerprint takes no sample: of the tensor with most
    bytes, at a third.
    """
    record = max(read_header(file)[1].values(), key=lambda record: record.nbytes)
    third = record.nbytes // 3 // 4 * 4
    assert SAMPLE_BYTES < third < record.nbytes // 2 - SAMPLE_BYTES
    before = base_fingerprint(GlobalBinaryIndex(file))
    with file.open("r+b") as stream:
        stream.seek(record.offset + third)
        old = stream.read(4)
        stream.seek(record.offset + third)
        stream.write(bytes(byte ^ 1 for byte in old))
    assert base_fingerprint(GlobalBinaryIndex(file)) == before


def change_unseen(file: Path) -> None:
    """Change one number and set the file's time back, as a tool that keeps times does."""
    before = file.stat()
    change_a_little(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def link(file: Path) -> None:
    """Give the file another name, which changes only what the system says of it."""
    os.link(file, file.with_suffix(".copy"))


def copy_over(file: Path) -> None:
    copied = file.with_name("new")
    copied.write_bytes(file.read_bytes())
    copied.replace(file)


class _At(TrainerCallback):
    """Changes the model's file after a step."""

    def __init__(self, step: int, change: Callable[[], None]) -> None:
        self._step = step
        self._change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._change()


@pytest.fixture
def config(tmp_path: Path) -> LemaConfig:
    model = write_model(tmp_path / "model")
    changes = {"max_steps": 4, "save_steps": 2, "strategy": "resident", "check_base_weights": False}
    return settings(model, tmp_path / "out", **changes)


def train(config: LemaConfig, step: int, change: Callable[[Path], None]) -> None:
    model = LemaModel(config)
    model.initialize_lora()
    file = sorted(Path(config.model_name_or_path).glob("*.safetensors"))[0]
    trainer = model.get_trainer(callbacks=[_At(step, lambda: change(file))])
    try:
        trainer.fit(token_rows(8))
    finally:
        model.close()


def written(directory: Path) -> str:
    return str(json.loads((directory / BASE_NAME).read_text())["fingerprint"])


@pytest.mark.parametrize("change", [rewrite, exchange, shorten, change_a_little, change_unseen])
@pytest.mark.parametrize("step", [1, 3])
def test_a_changed_model_ends_the_run(
    step: int, change: Callable[[Path], None], config: LemaConfig
) -> None:
    out = Path(config.output_dir)
    before = base_fingerprint(GlobalBinaryIndex(config.model_name_or_path))
    with pytest.raises(WeightsError, match="the model has changed since the run began to read it"):
        train(config, step, change)
    saved = sorted(path.name for path in out.glob("checkpoint-*"))
    assert saved == ["checkpoint-2"] * (step == 3)
    assert all(written(out / name) == before for name in saved)
    assert not (out / "adapter_model.safetensors").exists()


def test_a_config_that_changes_ends_the_run_too(config: LemaConfig) -> None:
    about = Path(config.model_name_or_path) / "config.json"
    values = json.loads(about.read_text())
    with pytest.raises(
        WeightsError, match=r"the model has changed since the run began to read it: config\.json"
    ):
        train(config, 3, lambda _: about.write_text(json.dumps(values | {"rms_norm_eps": 0.1})))
    assert (Path(config.output_dir) / "checkpoint-2").is_dir()


@pytest.mark.parametrize("change", [touch, link, copy_over])
def test_files_with_the_same_weights_are_the_same_model(
    change: Callable[[Path], None], config: LemaConfig
) -> None:
    before = base_fingerprint(GlobalBinaryIndex(config.model_name_or_path))
    train(config, 1, change)
    assert (
        written(Path(config.output_dir))
        == written(Path(config.output_dir) / "checkpoint-4")
        == before
    )


def test_an_adapter_is_not_saved_on_a_model_that_has_changed(
    config: LemaConfig, tmp_path: Path
) -> None:
    model = LemaModel(config)
    model.initialize_lora()
    exchange(sorted(Path(config.model_name_or_path).glob("*.safetensors"))[0])
    with pytest.raises(WeightsError, match="the model has changed"):
        model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    model.close()


def streamed_model(config: LemaConfig) -> StreamedPeftModel:
    return lema.streamed(
        config.model_name_or_path, LoraConfig(r=2, target_modules=["q_proj"]), device="cpu"
    )


@pytest.mark.parametrize("change", [rewrite, exchange, shorten])
def test_nor_does_another_trainer_save_on_one(
    change: Callable[[Path], None], config: LemaConfig, tmp_path: Path
) -> None:
    with closing(streamed_model(config)) as model:
        change(next(Path(config.model_name_or_path).glob("*.safetensors")))
        with pytest.raises(
            WeightsError, match="the model has changed since the run began to read it"
        ):
            model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("change", [touch, link, copy_over])
def test_another_trainer_saves_which_model_it_began_with(
    change: Callable[[Path], None], config: LemaConfig, tmp_path: Path
) -> None:
    before = base_fingerprint(GlobalBinaryIndex(config.model_name_or_path))
    with closing(streamed_model(config)) as model:
        change(next(Path(config.model_name_or_path).glob("*.safetensors")))
        model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
        model.save_pretrained(tmp_path / "adapter")
    assert written(tmp_path / "adapter") == written(tmp_path / "adapter" / "second") == before
