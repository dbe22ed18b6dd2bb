"""Files of LLaMA-Factory become the settings that its sources say, key by key."""

import json
from pathlib import Path
from typing import Any

import pytest
from llamafactoryruns import DEFAULTS, INFO, RUNS
from ruamel.yaml import YAML

from lema.errors import ConfigError
from lema_tools.importing.command import translated
from lema_tools.importing.llamafactory.peer import DEFAULTS as TABLE
from lema_tools.importing.llamafactory.peer import PEER, LlamaFactory
from lema_tools.importing.recognition import peer_of
from lema_tools.importing.translation import ForeignRun, Translation

BASE = {"model_name_or_path": "org/base", "dataset": "shop", "template": "chatml", "bf16": True}
BASE |= {"do_train": True}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data/dataset_info.json, as LLaMA-Factory is run in."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def translate(**values: Any) -> Translation:
    """The translation of a run of these keys."""
    return PEER.translate(ForeignRun(values))


@pytest.mark.parametrize("name", RUNS)
def test_a_file_becomes_the_settings_that_its_sources_say(name: str, project: Path) -> None:
    run = RUNS[name]
    values = YAML(typ="safe").load(run.text)
    translation = translate(**values)
    wanted = {**DEFAULTS, **run.settings}
    resolved = {key: translation.settings.get(key, ...) for key in wanted}
    assert resolved == wanted
    assert {note.key for note in translation.changes} == run.changes
    assert values.keys() <= settled(translation)
    keys = [note.key for note in (*translation.differs, *translation.lost)]
    assert not translation.same.keys() & set(keys)
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written_can_be_read_back(name: str, project: Path) -> None:
    file = project / "run.yaml"
    file.write_text(RUNS[name].text, encoding="utf-8")
    text, translation = translated([str(file)], tool="llamafactory")
    read = YAML(typ="safe").load(text)
    assert read == {key: translation.settings[key] for key in read}
    assert "# Not carried:" in text


def settled(translation: Translation) -> set[str]:
    """The keys that are in one of the three lists."""
    notes = (*translation.differs, *translation.lost)
    return {*translation.same, *(note.key for note in notes)}


def other(value: Any) -> Any:
    """A value that is not a default."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["x"] if isinstance(value, list) else "x"


CHOSEN = {
    "stage": "kto",
    "finetuning_type": "full",
    "pref_loss": "hinge",
    "mix_strategy": "interleave_over",
    "template": "llama3",
    "dataset": "shop",
    "eval_dataset": "letters",
    "val_size": 0.1,
    "adapter_name_or_path": "adapter",
    "dpo_label_smoothing": 0.1,
    "interleave_probs": None,
    "quantization_bit": 8,
    "max_samples": 5,
    "dataset_dir": "data",
    "tokenized_path": "tokens",
    "export_dir": "merged",
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "eval_steps": 5,
    "early_stopping_steps": 3,
    "streaming": False,
    "additional_target": "lm_head",
    "fp16": False,
    "ld_alpha": 0.5,
    "moe_aux_loss_coef": 0.1,
    "loraplus_lr_ratio": 2.0,
    "warmup_steps": 0.5,
    "lora_alpha": 4,
    "logging_steps": 0.1,
}
"""Values for keys that not every value suits."""


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "pt"])
def test_every_key_of_its_arguments_is_in_one_of_the_three_lists(stage: str, project: Path) -> None:
    data = {"dpo": "ranked", "kto": "thumbs", "pt": "notes"}.get(stage, "shop")
    base = {**BASE, "stage": stage, "dataset": data}
    chosen = {**CHOSEN, "eval_dataset": data}
    silent = []
    for key, default in TABLE.of("all").items():
        for value in (default, chosen.get(key, other(default))):
            values = {**base, key: value} if key not in BASE or key == "bf16" else base
            if key == "stage":
                values = base
            if key not in settled(translate(**values)):
                silent.append((key, value))
    assert not silent


def test_every_key_has_a_default_of_its_sources() -> None:
    table = TABLE.of("all")
    assert len(table) > 350
    assert table["cutoff_len"] == 2048
    assert table["lora_alpha"] is None
    assert table["learning_rate"] == 5e-5


def test_a_key_that_it_refuses_is_refused_with_the_nearest_ones(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such key") as error:
        translate(**BASE, lora_ranks=4)
    assert "lora_rank" in str(error.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"export_dir": "out", "adapter_name_or_path": "a", "do_train": False}, "lema merge a out"),
        ({"do_predict": True, "do_train": False}, "lema eval"),
        ({"stage": "rm"}, "RewardTrainer"),
        ({"stage": "ppo"}, "GRPOTrainer"),
        ({"stage": "dpo"}, "choose another data set"),
        ({"template": "qwen33"}, "qwen3"),
        ({"template": "glm4", "train_on_prompt": True}, "leave it out"),
        ({"dataset": "nothing"}, "shop"),
        ({"finetuning_type": "qlora"}, "lora, oft, freeze or full"),
        ({"val_size": 0.1, "eval_dataset": "letters"}, "take one of them"),
        ({"train_on_prompt": True, "mask_history": True}, "take one of them"),
        ({"learning_rate": "fast"}, "0.0001"),
        ({"stage": "dpo", "dataset": "ranked", "pref_loss": "ipo", "dpo_label_smoothing": 0.1}, ""),
    ],
)
def test_what_it_refuses_or_has_no_counterpart_is_an_error_that_says_the_way(
    values: dict[str, Any], says: str, project: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        translate(**{**BASE, **values})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("stored", "changes"), [(None, set()), ("bfloat16", set()), ("float32", {"bf16"})]
)
def test_weights_that_train_are_float32_under_autocast(
    stored: str | None, changes: set[str], project: Path
) -> None:
    if stored:
        (project / "config.json").write_text(json.dumps({"dtype": stored}), encoding="utf-8")
    translation = translate(**BASE | {"model_name_or_path": "."}, finetuning_type="full")
    assert translation.settings["dtype"] == "float32"
    assert translation.settings["autocast"] == "bfloat16"
    assert {note.key for note in translation.changes} == changes


def test_a_row_that_is_shortened_in_proportion_there_is_refused_here(project: Path) -> None:
    translation = translate(**BASE)
    assert (translation.settings["max_length"], translation.settings["overlong"]) == (2048, "error")
    assert "cutoff_len" not in translation.same
    assert translate(**BASE, packing=True).settings["overlong"] == "error"


def test_command_lines_are_laid_over_their_file(project: Path) -> None:
    file = project / "run.yaml"
    file.write_text(RUNS["sft"].text, encoding="utf-8")
    words = ["llamafactory-cli", "train", str(file), "learning_rate=1e-5", "lora_rank=4"]
    _, translation = translated(words, tool="llamafactory")
    assert translation.settings["learning_rate"] == 1e-5
    assert translation.settings["lora_alpha"] == 8


def test_the_folder_of_data_sets_is_named_or_asked_for(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(ConfigError, match="dataset_info") as error:
        translate(**BASE)
    assert "--dataset-info" in str(error.value)
    info = project / "data" / "dataset_info.json"
    run = ForeignRun(BASE, options={"dataset_info": info})
    data = PEER.translate(run).settings["train_data"]
    assert data["path"] == str(project / "data" / "shop.json")
    assert translate(**BASE, dataset_dir="ONLINE").settings["train_data"]["path"] == "shop"


def test_it_is_told_by_its_own_keys_and_words() -> None:
    assert peer_of(ForeignRun({"stage": "sft", "cutoff_len": 5}), "a.yaml").name == "LLaMA-Factory"
    assert LlamaFactory().recognises(ForeignRun({}, ["llamafactory-cli", "train"]))
    assert peer_of(ForeignRun({"adapter": "lora", "val_set_size": 1}), "a.yaml").name == "axolotl"
