"""`lema config import`: files of other trainers, and the tutorials of the pages that tell of
them.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config import LemaConfig
from lema.config.foreign import imported
from lema_tools.demo import run_demo

ROOT = Path(__file__).parents[2]
KNOWN = LemaConfig.defaults()


def block(page: str, name: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"<!-- {name} -->\n```yaml\n(.*?)```\n<!-- end -->", text, re.DOTALL)
    return str(found)


def read(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def test_batches_of_a_device_become_one() -> None:
    axolotl, _ = imported({"micro_batch_size": 2, "gradient_accumulation_steps": 8}, KNOWN)
    trl, _ = imported({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, KNOWN)
    assert axolotl == trl == {"batch_size": 16, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"sequence_len": 64, "lora_r": 4, "num_epochs": 2},
            {"max_length": 64, "lora_rank": 4, "num_train_epochs": 2},
        ),
        ({"bf16": True}, {"dtype": "bfloat16"}),
        ({"bf16": "auto", "fp16": None, "lora_model_dir": ""}, {}),
        ({"flash_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"val_set_size": 0}, {}),
        ({"shuffle": False, "sample_unknown": False}, {"shuffle": False}),
        ({"lora_target_modules": "all-linear", "use_peft": True}, {}),
        (
            {
                "datasets": [
                    {"path": "a", "field_messages": "chat"},
                    {"path": "b", "type": "alpaca"},
                ]
            },
            {"train_data": ["a", "b"], "columns": {"messages": "chat"}},
        ),
        (
            {"dataset_name": "a", "dataset_text_field": "said"},
            {"train_data": ["a"], "columns": {"text": "said"}},
        ),
    ],
)
def test_what_another_trainer_says_is_said_here(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    settings, notes = imported(given, KNOWN)
    assert settings == found
    assert notes == {}


@pytest.mark.parametrize(
    "key", ["load_in_4bit", "deepspeed", "evals_per_epoch", "loss_watchdog_threshold"]
)
def test_what_is_not_carried_over_is_said(key: str) -> None:
    settings, notes = imported({key: 4}, KNOWN)
    assert settings == {}
    assert list(notes) == [key]


def test_a_value_that_is_wrong_here_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their.yaml").write_text("base_model: m\nlr_scheduler: rex\n", encoding="utf-8")
    assert run(app, ["config", "import", str(tmp_path / "their.yaml")]) == 0
    said = capsys.readouterr().out
    assert read(said) == {"model_name_or_path": "m"}
    assert "# lr_scheduler_type: not carried over; lr_scheduler_type must be one of" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name", "model"),
    [
        ("coming-from-trl.md", "trl yaml", "Qwen/Qwen2.5-0.5B"),
        ("coming-from-axolotl.md", "axolotl yaml", "NousResearch/Llama-3.2-1B"),
    ],
)
def test_the_tutorials_run(
    page: str,
    name: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_demo(Path("lema-demo"), max_steps=2)
    text = (
        block(page, name)
        .replace(model, "lema-demo/model")
        .replace("data/chats.jsonl", "lema-demo/data/chat.jsonl")
    )
    assert text.count("lema-demo") == 2
    Path("their.yaml").write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert run(app, ["config", "import", "their.yaml"]) == 0
    Path("my.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert run(app, ["train", "my.yaml", "--set", "device=cpu", "--set", "max_steps=2"]) == 0
    assert (tmp_path / read(text)["output_dir"] / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "given",
    [["--learning-rate", "1e-3"], ["--learning_rate=1e-3"], ["--set", "learning_rate=1e-3"]],
)
def test_a_setting_is_given_like_an_option(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("model_name_or_path: m\n", encoding="utf-8")
    assert run(app, ["config", "show", str(tmp_path / "my.yaml"), *given]) == 0
    assert read(capsys.readouterr().out)["learning_rate"] == 1e-3


def test_an_option_that_nobody_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("model_name_or_path: m\n", encoding="utf-8")
    assert run(app, ["config", "show", str(tmp_path / "my.yaml"), "--lern", "3"]) == 2
    assert "No such option: --lern" in capsys.readouterr().err


def test_the_short_form_of_help_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["train", "-h"]) == 0
    assert "Usage: lema train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", ["rows.jsonl", "7", "{path: rows.jsonl}", "[1, null, {path: [a]}]", "true"]
)
def test_data_sets_in_any_form_are_taken_or_said(value: str, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "theirs.yml"
    file.write_text(f"datasets: {value}\nsequence_len: 64\n")
    assert run(app, ["config", "import", str(file)]) == 0
    assert "max_length: 64" in capfd.readouterr().out


def test_a_name_of_several_lines_is_a_note_of_one(tmp_path: Path, capfd: Any) -> None:
    """A second line would be a setting."""
    file = tmp_path / "theirs.yml"
    file.write_text('"x\\nseed: 7\\e[2J": 1\nsequence_len: 64\n')
    assert run(app, ["config", "import", str(file)]) == 0
    told = capfd.readouterr().out
    assert read(told) == {"max_length": 64}
    assert "\x1b" not in told
