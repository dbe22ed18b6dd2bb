"""What goes wrong in `lema train` is one message, one exit code, and nothing written."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import (
    assert_refused,
    config_writer,
    lema,
)
from safetensors.torch import load_file, save_file
from smallrun import write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def write_config(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(llama, tmp_path)


def shard_of(model: Path, tensor: str) -> Path:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    return model / index["weight_map"][tensor]


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], None], tensor: str) -> None:
    """Change the tensors of the shard that holds `tensor`."""
    file = shard_of(model, tensor)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def remap(model: Path, name: str, file: str) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


UP = "model.layers.3.mlp.up_proj.weight"
DOWN = "model.layers.3.mlp.down_proj.weight"


def lose_a_shard(model: Path) -> None:
    shard_of(model, UP).unlink()


def cut_a_shard(model: Path) -> None:
    file = shard_of(model, UP)
    file.write_bytes(file.read_bytes()[:-100])


def forge_a_shard(model: Path) -> None:
    shard_of(model, UP).write_text("this is not what you think it is")


def forge_a_long_header(model: Path) -> None:
    file = shard_of(model, UP)
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])


def leave_upwards(model: Path) -> None:
    remap(model, UP, "../elsewhere.safetensors")


def leave_from_the_root(model: Path) -> None:
    remap(model, UP, "/etc/elsewhere.safetensors")


def leave_by_a_link(model: Path) -> None:
    file = shard_of(model, UP)
    outside = model.parent / "outside.safetensors"
    file.rename(outside)
    file.symlink_to(outside)


def keep_only_pickles(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")


def lose_two_tensors(model: Path) -> None:
    for name in (UP, DOWN):
        rewrite(model, lambda tensors, name=name: tensors.pop(name), name)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if name not in (UP, DOWN)
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def reshape_a_tensor(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({UP: torch.zeros(64, 31)}), UP)


def add_a_tensor(model: Path) -> None:
    name = "model.layers.3.mlp.gate_proj.biass"
    rewrite(model, lambda tensors: tensors.update({name: torch.zeros(64)}), UP)
    remap(model, name, shard_of(model, UP).name)


def remove_the_model(model: Path) -> None:
    shutil.rmtree(model)


def forget_the_config(model: Path) -> None:
    (model / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (remove_the_model, 3, ["does not exist"]),
        (forget_the_config, 2, ["no config.json"]),
        (lose_a_shard, 3, ["are missing: model-0000"]),
        (cut_a_shard, 3, ["model-0000"]),
        (forge_a_shard, 3, ["model-0000"]),
        (forge_a_long_header, 3, ["model-0000", "header"]),
        (leave_upwards, 3, ["'../elsewhere.safetensors'", f"weight_map['{UP}']"]),
        (leave_from_the_root, 3, ["'/etc/elsewhere.safetensors'"]),
        (leave_by_a_link, 3, ["leaves its directory"]),
        (keep_only_pickles, 3, ["pytorch_model.bin", "save_pretrained(OUT)"]),
        (lose_two_tensors, 3, [UP, DOWN]),
        (reshape_a_tensor, 3, [UP, "31"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_is_not_whole_is_refused(
    llama: Path,
    spoil: Callable[[Path], None],
    code: int,
    words: list[str],
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    spoil(model)
    assert_refused(capfd, code, words, "train", write_config(model_name_or_path=str(model)))
    assert not (tmp_path / "out").exists()


def test_a_tensor_the_model_has_no_place_for_is_named_and_left_out(
    llama: Path, write_config: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    add_a_tensor(model)
    with pytest.warns(UserWarning, match="gate_proj.biass"):
        assert lema("train", write_config(model_name_or_path=str(model), max_steps=1)) == 0


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        ("", {}, ["data.jsonl"]),
        ('{"text": "corn"}\n{"text": \n', {}, ["data.jsonl:2"]),
        ('{"text": "corn by the river"}\n{"txet": "corn"}\n', {}, ["data.jsonl:2", "txet"]),
        ('{"prompt": "corn", "completion": "mill"}\n{"prompt": "corn"}\n', {}, ["data.jsonl:2"]),
        (
            '{"input_ids": [1, 2], "labels": [1, 2]}\n{"input_ids": [1, 2], "labels": [1, -100]}\n',
            {},
            ["data.jsonl:2", "no token to train on"],
        ),
        ('{"input_ids": [1, 2]}\n\n{"input_ids": [1, 300]}\n', {}, ["data.jsonl:3", "300"]),
        (
            '{"text": "corn"}\n{"text": "the mill by the river"}\n',
            {"overlong": "error", "max_length": 4},
            [":2", "4"],
        ),
        ('{"text": "the mill"}\n', {"eval_split": 0.5}, ["eval_split"]),
        (None, {}, ["no such data file", "data.jsonl"]),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_by_line(
    content: str | None,
    changes: dict[str, Any],
    words: list[str],
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = write_config(**changes)
    (tmp_path / "data.jsonl").unlink()
    if content is not None:
        (tmp_path / "data.jsonl").write_text(content)
    assert_refused(capfd, 3, words, "train", config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"lora_rnak": 8},
            2,
            ["unknown setting 'lora_rnak'", "run.yaml:", "did you mean lora_rank?"],
        ),
        ({"device": "abacus"}, 2, ["no backend named 'abacus' is installed", "cpu"]),
        ({"device": "cpu:1"}, 2, ["one device"]),
        ({"train_data": None}, 2, ["names no training data"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, 2, ["rope_parameters", "{'factor'}"]),
        ({"lora_target_modules": ["c_attn"]}, 2, ["c_attn", "q_proj"]),
        ({"lora_modules_to_save": ["layers"]}, 2, ["model.layers contains whole decoder layers"]),
        ({"model_type": "gpt2"}, 2, ["'llama', not 'gpt2'"]),
        ({"attn_implementation": "no_such"}, 2, ["no_such"]),
        ({"lr_scheduler_type": "greedy"}, 2, ["greedy"]),
        ({"report_to": "tensorbord"}, 2, ["tensorbord"]),
        ({"host_memory": "1KB"}, 4, ["host memory"]),
        ({"device_memory": "1KB"}, 4, ["device_memory"]),
        ({"model_name_or_path": "./nowhere"}, 3, ["./nowhere does not exist"]),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(
    changes: dict[str, Any],
    code: int,
    words: list[str],
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert_refused(capfd, code, words, "train", write_config(**changes))
    assert not (tmp_path / "out").exists()


def test_resuming_what_never_began_is_refused(
    write_config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        capfd, 3, ["no checkpoint to resume from", "--resume"], "train", write_config(), "--resume"
    )


def test_weights_alone_are_taken_of_a_checkpoint(
    write_config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        capfd,
        2,
        ["only a resumed run can do this", "--resume"],
        "train",
        write_config(),
        "--weights-only",
    )


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_without_an_optimizer_none_is_gone_on_from_unasked(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(max_steps=2, save_steps=1)
    out = tmp_path / "out"
    assert lema("train", config) == 0
    (out / "checkpoint-2" / "optimizer.safetensors").unlink()
    capfd.readouterr()
    assert lema("train", config, "--resume") == 0
    told = capfd.readouterr()
    assert f"{out / 'checkpoint-2'} is damaged and passed over: a file is missing" in told.out
    assert f"resuming from {out / 'checkpoint-1'} (step 1 of 2)" in told.out
    assert "passed over" not in told.err  # it is said once
    for step in (1, 2):
        (out / f"checkpoint-{step}" / "optimizer.safetensors").unlink()
    assert_refused(
        capfd, 3, ["no checkpoint is valid", "--weights-only"], "train", config, "--resume"
    )
    assert lema("train", config, "--resume", "--weights-only") == 0
    assert (
        "LEMA takes the weights of this checkpoint but not its optimizer, whose moments begin empty"
        in capfd.readouterr().out
    )


def test_evaluating_without_data_is_refused(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", write_config(max_steps=1)) == 0
    assert_refused(
        capfd, 3, ["there is no evaluation data", "eval_split"], "eval", tmp_path / "out"
    )


def test_an_adapter_made_with_other_settings_is_not_overlooked(
    write_config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", write_config(max_steps=1)) == 0
    config = write_config(lora_rank=8)
    assert_refused(
        capfd,
        2,
        ["lora_rank is 8, but the adapter was made with 4"],
        "generate",
        config,
        "-p",
        "corn",
    )


def test_weights_that_are_not_finite_stop_the_run_before_its_first_step(
    llama: Path, write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    rewrite(model, lambda tensors: tensors[UP][0].fill_(torch.nan), UP)
    config = write_config(model_name_or_path=str(model), save_steps=1)
    assert_refused(
        capfd,
        5,
        ["a weight of the model is NaN or infinite", "model.layers.3", str(model)],
        "train",
        config,
    )
    assert (
        not list((tmp_path / "out").glob("checkpoint-*"))
        and not (tmp_path / "out" / "adapter_config.json").exists()
    )
    assert_refused(capfd, 5, ["model.layers.3"], "eval", config, "--data", tmp_path / "data.jsonl")
