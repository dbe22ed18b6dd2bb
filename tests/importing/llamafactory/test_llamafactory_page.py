"""The page on LLaMA-Factory shows a file that is imported without loss."""

import json
import re
from pathlib import Path

import pytest

from lema_tools.importing.command import translated
from lema_tools.importing.llamafactory.templates import formats

PAGE = Path(__file__).parents[3] / "docs" / "coming-from-llama-factory.md"
CASES = json.loads(Path(__file__).with_name("tokens.json").read_text(encoding="utf-8"))


def test_the_file_of_the_page_becomes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"<!-- llamafactory yaml -->\n```yaml\n(.*?)```", text, re.DOTALL)
    (info,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(info, encoding="utf-8")
    (tmp_path / "train.yaml").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    _, translation = translated(["train.yaml"], tool="llamafactory")
    settings = translation.settings
    changes = {note.key for note in translation.changes}
    # settings of rows and orders that this version of LEMA does not know are lost
    assert changes <= {"dataset", "train_sampling_strategy"}
    assert (settings["lora_rank"], settings["lora_alpha"]) == (8, 16)
    assert (settings["batch_size"], settings["gradient_accumulation_steps"]) == (1, 8)
    assert "<|im_start|>user" in settings["chat_template"]


def test_the_numbers_of_the_page_are_those_of_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"{len(formats())} of its 124 names" in text
    assert f"targets of {len({case['template'] for case in CASES})} templates" in text
