"""Rows of a step are those of all processes, and what accelerate and DeepSpeed decide is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from lema.errors import ConfigError
from lema_tools.importing.command import translated
from lema_tools.importing.recognition import peer_named
from lema_tools.importing.translation import ForeignRun, Translation

FILES: dict[str, dict[str, Any]] = {
    "trl": {
        "model_name_or_path": "org/model",
        "dataset_name": "org/rows",
        "use_peft": True,
        "output_dir": "out",
    },
    "axolotl": {
        "base_model": "org/model",
        "datasets": [{"path": "org/rows", "type": "alpaca"}],
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_linear": True,
        "micro_batch_size": 2,
        "learning_rate": 2e-4,
        "warmup_steps": 10,
    },
    "llamafactory": {
        "model_name_or_path": "org/model",
        "dataset": "org/rows",
        "dataset_dir": "ONLINE",
        "template": "chatml",
        "bf16": True,
        "do_train": True,
    },
}
TORCHTUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "checkpointer": {"checkpoint_dir": "m"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
}
ACCUMULATES = {"gradient_accumulation_kwargs": {"num_steps": 4}}


def translation_of(tool: str, **values: Any) -> Translation:
    objective = "sft" if tool == "trl" else None
    return peer_named(tool).translate(ForeignRun(FILES[tool] | values, objective=objective))


def changed(translation: Translation) -> set[str]:
    return {note.key for note in translation.changes}


@pytest.mark.parametrize("tool", FILES)
def test_accumulation_of_accelerate_is_that_of_the_run(tool: str) -> None:
    plain = translation_of(tool).settings
    translation = translation_of(tool, accelerator_config=ACCUMULATES)
    settings = translation.settings
    rows = settings["batch_size"] * settings["gradient_accumulation_steps"]
    assert rows == 4 * plain["batch_size"] * plain["gradient_accumulation_steps"]
    assert not changed(translation)
    with pytest.raises(ConfigError, match="not both"):
        translation_of(tool, accelerator_config=ACCUMULATES, gradient_accumulation_steps=2)


@pytest.mark.parametrize("tool", FILES)
def test_another_order_of_rows_by_accelerate_is_told(tool: str) -> None:
    options = {"use_seedable_sampler": False}
    assert changed(translation_of(tool, accelerator_config=options)) == {"accelerator_config"}


@pytest.mark.parametrize(
    ("values", "rows", "key"),
    [
        ({"dp_shard_size": 4}, 8, "dp_shard_size"),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, 16, "dp_shard_size"),
        ({"dp_replicate_size": 2}, 4, "dp_replicate_size"),
        ({"context_parallel_size": 4, "tensor_parallel_size": 2}, 2, None),
        ({"num_processes": 8, "context_parallel_size": 4}, 4, "num_processes"),
        ({"num_processes": 4, "accelerator_config": {"split_batches": True}}, 2, None),
    ],
)
def test_processes_of_axolotl_read_rows_of_their_own_unless_they_share_them(
    values: dict[str, Any], rows: int, key: str | None
) -> None:
    translation = translation_of("axolotl", **values)
    assert translation.settings["batch_size"] == rows
    assert translation.settings["micro_batch_size"] == 2
    assert changed(translation) == ({key} if key else set())


@pytest.mark.parametrize(
    "words",
    [
        ["FORCE_TORCHRUN=1", "NNODES=2", "NPROC_PER_NODE=2", "llamafactory-cli", "train", "FILE"],
        ["torchrun", "--nproc_per_node", "4", "src/train.py", "FILE"],
        ["accelerate", "launch", "--num_processes", "4", "src/train.py", "FILE"],
    ],
)
def test_processes_of_llama_factory_have_rows_each(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    values = FILES["llamafactory"] | {"per_device_train_batch_size": 3}
    file.write_text(json.dumps(values), encoding="utf-8")
    _, translation = translated([str(file) if word == "FILE" else word for word in words])
    settings = translation.settings
    assert (settings["batch_size"], settings["micro_batch_size"]) == (12, 3)
    assert changed(translation) == {"num_processes"}


@pytest.mark.parametrize("tool", ["llamafactory", "torchtune"])
def test_processes_that_no_number_says_are_asked_for(tool: str) -> None:
    run = ForeignRun(FILES.get(tool, TORCHTUNE) | {"nproc_per_node": "gpu"})
    with pytest.raises(ConfigError, match="not said by gpu"):
        peer_named(tool).translate(run)


@pytest.mark.parametrize("tool", ["trl", "llamafactory"])
def test_processes_that_share_rows_add_none(tool: str) -> None:
    plain = translation_of(tool).settings["batch_size"]
    if tool == "trl":
        degrees = {"cp_size": 4, "dp_shard_size": 2}
        settings = translation_of(tool, num_processes=8, parallelism_config=degrees).settings
    else:
        degrees = {"tp_size": 2, "cp_size": 2}
        settings = translation_of(tool, NPROC_PER_NODE=8, parallelism_config=degrees).settings
    assert settings["batch_size"] == 2 * plain


def test_a_mean_of_the_means_of_processes_is_told() -> None:
    translation = translation_of("trl", num_processes=2, average_tokens_across_devices=False)
    (note,) = translation.changes
    assert "mean of theirs" in note.why
    assert "mean of theirs" not in translation_of("trl", num_processes=2).changes[0].why


DEEPSPEED: list[tuple[dict[str, Any], set[str]]] = [
    # what DeepSpeed's file has, and the keys by which the run becomes another one
    ({"gradient_clipping": "auto", "gradient_accumulation_steps": "auto"}, set()),
    ({"gradient_clipping": 1.0, "gradient_accumulation_steps": 1}, set()),
    ({"gradient_clipping": 0.1}, {"gradient_clipping"}),
    ({"gradient_accumulation_steps": 8}, {"gradient_accumulation_steps"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, {"scheduler"}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}, set()),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, {"optimizer.params.lr"}),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0, 0.5]}}}, {"optimizer.params.betas"}),
    ({"optimizer": {"type": "Lamb"}}, {"optimizer.type"}),
]


@pytest.mark.parametrize("tool", FILES)
@pytest.mark.parametrize(
    ("config", "keys"), DEEPSPEED, ids=lambda case: json.dumps(case, default=sorted)
)
def test_values_of_deepspeeds_file_are_those_of_the_run_or_told(
    tool: str, config: dict[str, Any], keys: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    expected = {f"deepspeed.{key}" for key in keys}
    assert changed(translation_of(tool, deepspeed=str(file))) == expected
    assert changed(translation_of(tool, deepspeed=config)) == expected


@pytest.mark.parametrize("tool", FILES)
def test_an_adamw_in_deepspeeds_file_decides_instead_of_the_optimizer(tool: str) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    key = "optimizer" if tool == "axolotl" else "optim"
    translation = translation_of(tool, **{key: "sgd", "deepspeed": config})
    assert translation.settings["optim"] == "adamw_torch"
    assert not changed(translation)
    assert not translation_of(tool, deepspeed=config).differs[-1].key.startswith("deepspeed")


@pytest.mark.parametrize("tool", FILES)
def test_a_file_of_deepspeed_that_is_not_here_is_told_unless_it_is_published(tool: str) -> None:
    assert changed(translation_of(tool, deepspeed="mine/ds.json")) == {"deepspeed.file"}
    for name in ("deepspeed_configs/zero2.json", "examples/deepspeed/ds_z3_offload_config.json"):
        assert not changed(translation_of(tool, deepspeed=name))


def test_deepspeed_without_clipping_in_its_file_clips_to_one() -> None:
    keys = changed(translation_of("trl", deepspeed={"zero_stage": 2}, max_grad_norm=0.3))
    assert keys == {"deepspeed.gradient_clipping"}


@pytest.mark.parametrize("tool", ["trl", "axolotl"])
def test_the_launchers_file_is_read_for_values_of_deepspeed(tool: str, tmp_path: Path) -> None:
    section = {"gradient_accumulation_steps": 8, "gradient_clipping": 0.1, "zero_stage": 2}
    launched = {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": section}
    file = tmp_path / "accelerate.yaml"
    file.write_text(json.dumps(launched), encoding="utf-8")
    where = "config_file.deepspeed_config"
    expected = {f"{where}.gradient_accumulation_steps", f"{where}.gradient_clipping"}
    assert changed(translation_of(tool, config_file=str(file))) - {"config_file"} == expected
    inner = tmp_path / "ds.json"
    inner.write_text(json.dumps({"scheduler": {"type": "WarmupLR"}}), encoding="utf-8")
    launched["deepspeed_config"] = {"deepspeed_config_file": str(inner)}
    file.write_text(json.dumps(launched), encoding="utf-8")
    expected = {f"{where}.scheduler"}
    assert changed(translation_of(tool, config_file=str(file))) - {"config_file"} == expected


@pytest.mark.parametrize(
    "words",
    [
        ["accelerate", "launch", "-m", "axolotl.cli.train", "FILE"],
        ["accelerate", "launch", "--num_processes", "2", "-m", "axolotl.cli.train", "FILE"],
        ["accelerate", "launch", "--num_processes=2", "-m", "axolotl.cli.train", "FILE"],
        ["python", "-m", "axolotl.cli.train", "FILE"],
        ["axolotl", "train", "FILE", "--num-processes", "2"],
    ],
)
def test_a_module_of_axolotl_that_is_launched_is_recognised(
    words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yml"
    file.write_text(json.dumps(FILES["axolotl"]), encoding="utf-8")
    words = [str(file) if word == "FILE" else word for word in words]
    processes = 2 if any("processes" in word for word in words) else 1
    for tool in (None, "axolotl"):
        settings = translated(words, tool=tool)[1].settings
        assert settings["model_name_or_path"] == "org/model"
        assert settings["batch_size"] == 2 * processes


def test_keys_of_the_launcher_are_not_missing_ones_of_axolotl() -> None:
    assert not changed(translation_of("axolotl", main_process_port=29501, num_processes=1))
