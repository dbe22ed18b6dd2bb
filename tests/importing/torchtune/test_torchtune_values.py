"""Files of torchtune become the settings that its sources say, key by key."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from torchtuneruns import DEFAULTS, RUNS, Run, dataset, file_of

from lema.errors import ConfigError
from lema_tools.importing.command import translated
from lema_tools.importing.torchtune.peer import DEFAULTS as TABLE
from lema_tools.importing.torchtune.peer import PEER
from lema_tools.importing.translation import ForeignRun, Translation


def settled(translation: Translation) -> set[str]:
    """The keys that are in one of the three lists; one key may stand for those below it."""
    notes = (*translation.differs, *translation.lost)
    return {*translation.same, *(note.key for note in notes)}


def flat(values: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys of nested values."""
    keys = set[str]()
    for key, value in values.items():
        name = f"{prefix}{key}"
        keys |= flat(value, f"{name}.") if isinstance(value, dict) else {name}
    return keys


@pytest.mark.parametrize("name", RUNS)
def test_a_file_becomes_the_settings_that_its_sources_say(name: str) -> None:
    run = RUNS[name]
    values = file_of(run)
    translation = PEER.translate(ForeignRun(values))
    wanted = {**DEFAULTS, **run.settings}
    settings = translation.settings
    assert {key: settings.get(key, ...) for key in wanted} == {
        key: settings.get(key, ...)
        if value is ... and key in ("train_data", "max_length")
        else value
        for key, value in wanted.items()
    }
    # without a number of steps torchtune drops the last one of an epoch where rows do not fill it
    drops = set() if values["max_steps_per_epoch"] else {"epochs"}
    assert {note.key for note in translation.changes} == run.changes | drops
    known = settled(translation)
    notes = [note.key for note in (*translation.differs, *translation.lost)]
    assert not translation.same.keys() & set(notes)
    assert len({*notes}) == len(notes)
    assert {key for key in flat(values) if not {key, key.partition(".")[0]} & known} == set()


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written_can_be_read_back(name: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    with file.open("w", encoding="utf-8") as stream:
        YAML(typ="safe").dump(file_of(RUNS[name]), stream)
    text, translation = translated([str(file)], tool="torchtune")
    read = YAML(typ="safe").load(text)
    assert read == {key: translation.settings[key] for key in read}


def test_every_key_of_its_recipes_is_in_one_of_the_three_lists() -> None:
    keys = TABLE.contents["recipe_keys"]
    assert len(keys) > 100
    silent, refused = [], []
    for key in keys:
        for value in (None, 3):
            run = Run({}) if key in flat(file_of(Run({}))) else Run({key: value})
            try:
                translation = PEER.translate(ForeignRun(file_of(run)))
            except ConfigError:
                refused.append(key)
                continue
            if not {key, key.partition(".")[0]} & settled(translation):
                silent.append(key)
    assert not silent
    parts = {
        "model",
        "quantizer",
        "kd_loss",
        "teacher_model",
        "teacher_checkpointer",
        "dataset_val",
    }
    assert {key.partition(".")[0] for key in refused} <= parts


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kd_loss": {"_component_": "x.ForwardKL"}}, "distillation"),
        ({"ppo_epochs": 2}, "docs/trainers.md"),
        ({"quantizer": {"_component_": "x.QAT"}}, "quantize_base"),
        ({"optimizer": ...}, "trains nothing"),
        ({"model.decoder_trainable": "lora"}, "images"),
        ({"loss._component_": "x.KTOLoss"}, "docs/objectives.md"),
        ({"output_dir": "${nothing}/x"}, "names no key"),
        ({"checkpointer.checkpoint_dir": ...}, "directory"),
        ({"dataset": {"_component_": "torchtune.datasets.chat_dataset"}}, "has no source"),
        ({"dtype": "int8"}, "bf16"),
        ({"model.lora_attn_modules": ["query"]}, "q_proj"),
        ({"optimizer.lr": "fast"}, "0.0001"),
    ],
)
def test_what_has_no_counterpart_is_an_error_that_says_why(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        PEER.translate(ForeignRun(file_of(Run(keys))))
    assert says in str(error.value)


def test_command_lines_are_laid_over_their_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    with file.open("w", encoding="utf-8") as stream:
        YAML(typ="safe").dump(file_of(Run({})), stream)
    words = ["tune", "run", "--nproc_per_node", "2", "lora_finetune_distributed"]
    words += ["--config", str(file), "model.lora_rank=4", "batch_size=3", "epochs=2"]
    _, translation = translated(words, tool="torchtune")
    settings = translation.settings
    assert (settings["lora_rank"], settings["batch_size"], settings["micro_batch_size"]) == (
        4,
        6,
        3,
    )
    assert settings["num_train_epochs"] == 2.0


@pytest.mark.parametrize(
    ("words", "keys", "rows"),
    [
        (["--nproc_per_node", "8"], {"tensor_parallel_dim": 4}, 4),
        (["--nproc_per_node", "8"], {"tensor_parallel_dim": 2, "context_parallel_dim": 2}, 4),
        (["--nproc_per_node", "8"], {"data_parallel_shard_dim": -1}, 16),
        (["--nproc_per_node", "4", "--nnodes", "2"], {}, 16),
        ([], {"tensor_parallel_dim": 8}, 2),
        ([], {"data_parallel_shard_dim": 4, "data_parallel_replicate_dim": 2}, 16),
    ],
)
def test_processes_that_share_a_row_add_none(
    words: list[str], keys: dict[str, int], rows: int, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    with file.open("w", encoding="utf-8") as stream:
        YAML(typ="safe").dump(file_of(Run(dict(keys))), stream)
    words = ["tune", "run", *words, "full_finetune_distributed", "--config", str(file)]
    _, translation = translated(words, tool="torchtune")
    assert translation.settings["batch_size"] == rows
    notes = [note.key for note in (*translation.differs, *translation.lost)]
    assert len(notes) == len(set(notes))


def test_what_changes_the_model_itself_is_told() -> None:
    translation = PEER.translate(ForeignRun(file_of(Run({"model.attn_dropout": 0.1}))))
    assert {note.key for note in translation.changes} == {"model.attn_dropout", "epochs"}


def test_packing_is_read_in_a_list_of_data_sets() -> None:
    entries = [dataset("alpaca_cleaned_dataset", packed=True)] * 2
    translation = PEER.translate(ForeignRun(file_of(Run({"dataset": entries}))))
    assert translation.settings["packing"] is True
    assert {note.key for note in translation.changes} == {"dataset", "epochs"}
    assert "dataset" not in translation.same
    entries = [entries[0], dataset("slimorca_dataset")]
    with pytest.raises(ConfigError, match="all data sets"):
        PEER.translate(ForeignRun(file_of(Run({"dataset": entries}))))


def test_a_config_of_torchtune_by_its_name_is_an_error_that_says_where_to_get_it() -> None:
    words = ["tune", "run", "lora_finetune_single_device", "--config", "llama3_1/8B_lora"]
    with pytest.raises(ConfigError) as error:
        translated(words, tool="torchtune")
    assert "tune cp llama3_1/8B_lora" in str(error.value)


def test_it_is_told_by_components_and_words() -> None:
    assert PEER.recognises(ForeignRun(file_of(Run({}))))
    assert PEER.recognises(ForeignRun({}, ["tune", "run", "x"]))
    assert not PEER.recognises(ForeignRun({"stage": "sft", "model": "x"}))
