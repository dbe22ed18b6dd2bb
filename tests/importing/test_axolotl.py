"""Files of axolotl become the same run, and what becomes another one is told."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lema.config.yaml import read_yaml
from lema.errors import ConfigError
from lema_tools.importing.axolotl.peer import DEFAULTS, PEER
from lema_tools.importing.checking import checked
from lema_tools.importing.recognition import peer_of
from lema_tools.importing.translation import ForeignRun, Translation

LORA = {
    "base_model": "org/model",
    "datasets": [{"path": "org/rows", "type": "alpaca"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "micro_batch_size": 1,
    "learning_rate": 2e-4,
    "warmup_steps": 10,
}


def _translated(**values: Any) -> Translation:
    return PEER.translate(ForeignRun(LORA | values))


def _changed(translation: Translation) -> set[str]:
    return {note.key for note in translation.changes}


def test_a_file_is_recognised_by_its_keys() -> None:
    assert peer_of(ForeignRun(LORA), "axolotl.yaml") is PEER
    with pytest.raises(ConfigError, match="keys"):
        peer_of(ForeignRun({"learning_rate": 1e-4, "output_dir": "out"}), "any.yaml")


def test_what_a_file_does_not_write_is_as_axolotl_has_it() -> None:
    translation = _translated()
    expected = {
        "model_name_or_path": "org/model",
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "num_train_epochs": 1.0,
        "batch_size": 1,
        "max_length": 512,
        "overlong": "drop",
        "seed": 42,
        "lora_dropout": 0.0,
        "lora_target_modules": None,
        "dtype": "bfloat16",
        "packing": False,
        "save_total_limit": 4,
    }
    assert {name: translation.settings[name] for name in expected} == expected
    assert not translation.changes


def test_a_file_without_an_adapter_trains_every_weight() -> None:
    translation = _translated(adapter=None, bf16=False)
    assert not translation.changes
    settings = translation.settings
    assert settings["trains"] == "full"
    assert settings["learning_rate"] == 2e-4
    assert "lora_rank" not in settings


@pytest.mark.parametrize("types", [{}, {"bf16": True}, {"bf16": False, "bfloat16": True}])
def test_weights_that_train_in_bfloat16_there_are_float32_here(types: dict[str, Any]) -> None:
    assert _changed(_translated(adapter=None, **types)) == {"bf16"}
    assert not _changed(_translated(**types))


def test_bfloat16_without_autocast_is_told() -> None:
    assert _changed(_translated(bf16="full")) == {"bf16"}


def test_a_data_set_of_the_hub_keeps_its_split_name_and_fields() -> None:
    entry = {
        "path": "org/chats",
        "name": "subset",
        "split": "train[:20%]",
        "revision": "abc",
        "type": "chat_template",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"assistant": ["gpt"], "user": ["human"]},
        "drop_system_message": True,
    }
    assert _translated(datasets=[entry]).settings["train_data"] == {
        "path": "org/chats",
        "name": "subset",
        "revision": "abc",
        "split": "train[:20%]",
        "columns": {"messages": "conversations", "role": "from", "content": "value"},
        "roles": {"assistant": ["gpt"], "user": ["human"]},
        "drop_system_messages": True,
        "train_on": "contents",
    }


def test_several_data_sets_keep_fields_of_their_own() -> None:
    chats = {"path": "a.jsonl", "type": "chat_template", "field_messages": "dialog"}
    text = {"path": "b.jsonl", "type": "completion", "field": "body"}
    data = _translated(datasets=[chats, text]).settings["train_data"]
    assert data["set1"]["columns"] == {"messages": "dialog"}
    assert data["set2"]["columns"] == {"text": "body"}


def test_alpaca_is_written_in_the_words_of_axolotl_whatever_the_tokenizer_has() -> None:
    row_format = _translated().settings["train_data"]["row_format"]
    assert row_format["without_input"].endswith(
        "### Instruction:\n{instruction}\n\n### Response:\n"
    )
    assert row_format["prompt"].endswith("### Input:\n{input}\n\n### Response:\n")


@pytest.mark.parametrize("rl", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_preferences_are_objectives(rl: str) -> None:
    entry = {"path": "org/pairs", "type": "chat_template.default"}
    settings = _translated(rl=rl, rl_beta=0.2, datasets=[entry]).settings
    assert settings["objective"] == rl
    assert settings["beta"] == 0.2


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rl": "grpo"}, "rl"),
        ({"reward_model": True}, "reward_model"),
        ({"diffusion": {"eps": 0.1}}, "diffusion"),
        ({"processor_type": "AutoProcessor"}, "processor_type"),
        ({"optimizer": "muon"}, "optimizer"),
        ({"lr_scheduler": "rex"}, "lr_scheduler"),
        ({"sample_packing": True}, "sample_packing"),
        ({"val_set_size": 0.1, "curriculum_sampling": True}, "val_set_size"),
        ({"adapter": None, "num_epochs": 2}, "num_epochs"),
        ({"adapter": None, "warmup_steps": None}, "warmup_ratio"),
        ({"chat_template": "llama4", "datasets": [{"path": "a", "type": "chat_template"}]}, None),
        ({"datasets": [{"path": "a", "type": "input_output"}]}, "datasets[0].type"),
        ({"load_in_4bit": True, "adapter": "lora"}, "load_in_4bit"),
        ({"a_key_of_another_version": 3}, "a_key_of_another_version"),
    ],
)
def test_what_changes_the_numbers_is_told(values: dict[str, Any], key: str | None) -> None:
    assert (key or "chat_template") in _changed(_translated(**values))


def test_warmup_is_the_number_of_steps_of_axolotl_where_the_run_has_one() -> None:
    steps = {"warmup_steps": None, "max_steps": 1000}
    assert _translated(**steps).settings["warmup_steps"] == 30
    assert _translated(**steps, warmup_ratio=0.0015).settings["warmup_steps"] == 2
    assert _translated(**(steps | {"max_steps": 10_000})).settings["warmup_steps"] == 100
    rounded = _translated(warmup_steps=None, warmup_ratio=0.1)
    assert not rounded.changes
    assert rounded.settings["warmup_rounding"] == "down"


def test_noise_by_its_earlier_name_is_the_noise() -> None:
    translation = _translated(noisy_embedding_alpha=5)
    assert translation.settings["neftune_noise_alpha"] == 5
    assert "noisy_embedding_alpha" in translation.same and not translation.changes
    with pytest.raises(ConfigError, match="not both"):
        _translated(noisy_embedding_alpha=5, neftune_noise_alpha=4)


def test_preference_runs_of_axolotl_have_no_noise() -> None:
    entry = {"path": "org/pairs", "type": "chat_template.default"}
    settings = _translated(rl="dpo", datasets=[entry], neftune_noise_alpha=5).settings
    assert settings["neftune_noise_alpha"] is None


@pytest.mark.parametrize("norm", [0, 0.0])
def test_a_norm_of_nought_clips_nothing(norm: float) -> None:
    translation = checked(_translated(max_grad_norm=norm))
    assert translation.settings["max_grad_norm"] is None
    assert not translation.changes


def test_a_batch_size_alone_does_not_accumulate() -> None:
    """axolotl has `gradient_accumulation_steps or batch_size // micro_batch_size`, whose first is 1
    unless the file leaves it empty.
    """
    translation = _translated(micro_batch_size=2, batch_size=8)
    assert translation.settings["batch_size"] == 2
    assert _changed(translation) == {"batch_size"}
    empty = _translated(micro_batch_size=2, batch_size=8, gradient_accumulation_steps=None)
    assert empty.settings["batch_size"] == 8
    assert not empty.changes
    for values in ({"gradient_accumulation_steps": 4}, {"micro_batch_size": None}):
        with pytest.raises(ConfigError, match="micro_batch_size alone"):
            _translated(batch_size=8, **values)


def test_rows_are_shuffled_and_split_as_axolotl_does() -> None:
    translation = _translated(val_set_size=0.1, num_epochs=3)
    expected = {
        "preshuffle": True,
        "eval_split": 0.1,
        "shuffle": "transformers",
        "count_steps_by": "rows",
    }
    assert {name: translation.settings[name] for name in expected} == expected
    assert not translation.changes


VALUES: dict[str, Any] = {
    "rl": "dpo",
    "adapter": "lora",
    "base_model": "org/model",
    "datasets": LORA["datasets"],
    "test_datasets": LORA["datasets"],
    "lr_scheduler": "linear",
    "optimizer": "adamw_torch",
    "excess_length_strategy": "truncate",
    "lr_scheduler_kwargs": {"num_cycles": 1},
    "special_tokens": {"eos_token": "x"},
    "plugins": ["a.b.C"],
    "lora_target_parameters": ["a.b"],
    "lora_rank_pattern": {"a": 2},
    "lora_alpha_pattern": {"a": 2},
}


@pytest.mark.parametrize("key", DEFAULTS.contents["keys"])
def test_no_key_of_axolotl_is_silent(key: str) -> None:
    value = VALUES.get(key, 7)
    run = LORA | {"load_in_4bit": False, key: value}
    translation = PEER.translate(ForeignRun(run))
    notes = (*translation.differs, *translation.lost)
    assert key in {*translation.same, *(note.key for note in notes)}


@pytest.mark.parametrize(
    "values",
    [
        {"base_model": None},
        {"datasets": None},
        {"rl": "prpo"},
        {"adapter": "qlora"},
        {"lora_r": None},
        {"datasets": [{"path": "a", "type": "sharegpt"}]},
        {"learning_rate": "fast"},
    ],
)
def test_what_axolotl_refuses_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _translated(**values)


def test_the_package_names_its_peer() -> None:
    assert import_module("lema_tools.importing.axolotl").PEER is PEER


def test_the_page_says_which_of_its_values_change_the_numbers(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from-axolotl.md"
    block = re.search(
        r"<!-- axolotl yaml -->\n```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    file = tmp_path / "axolotl.yaml"
    file.write_text(block.group(1), encoding="utf-8")
    translation = PEER.translate(ForeignRun(read_yaml(file).values))
    assert not translation.changes
    assert translation.settings["batch_size"] == 4
