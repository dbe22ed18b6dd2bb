"""The schema that editors have: every file of settings is valid by it, and wrong ones are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.cli.schemafiles import MODELINE, SCHEMA
from lema.config.yaml import read_yaml
from lema.train.phases.schema import file_schema

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PER_MODEL = sorted((ROOT / "configs" / "models").rglob("*.yaml"))


@pytest.fixture(scope="module")
def problems() -> Callable[[dict[str, Any]], list[str]]:
    schema = file_schema()
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    return lambda values: [error.message for error in validator.iter_errors(values)]


def test_every_file_in_configs_is_valid(problems: Callable[..., list[str]]) -> None:
    assert len(CONFIGS) > 10
    assert len(PER_MODEL) > 50
    wrong = {
        str(file): found
        for file in (*CONFIGS, *PER_MODEL)
        if (found := problems(dict(read_yaml(file).values)))
    }
    assert wrong == {}


PHASE = {"trains": "lora", "tokens": 1000, "mixture": {"one": 1.0}, "learning_rate": 1e-4}


@pytest.mark.parametrize(
    "values",
    [
        {"model_name_or_path": "m", "micro_batch_size": "auto", "warmup_steps": 0.1},
        {"model_name_or_path": "m", "train_data": {"path": "org/name", "streaming": True}},
        {"model_name_or_path": "m", "quantize_base": "nf4", "device_memory": "8GB"},
        {"model_name_or_path": "m", "phases": [PHASE], "train_data": {"one": "rows.jsonl"}},
    ],
)
def test_what_files_may_say_is_valid(
    values: dict[str, Any], problems: Callable[..., list[str]]
) -> None:
    assert problems(values) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"train_data": "rows.jsonl"}, "model_name_or_path"),
        ({"model_name_or_path": "m", "lora_rnak": 8}, "lora_rnak"),
        ({"model_name_or_path": "m", "lora_rank": "many"}, "many"),
        ({"model_name_or_path": "m", "quantize_base": "int4"}, "int4"),
        ({"model_name_or_path": "m", "phases": [PHASE | {"trains": "all"}]}, "all"),
        ({"model_name_or_path": "m", "phases": [PHASE | {"token": 1}]}, "token"),
        ({"model_name_or_path": "m", "phases": [PHASE], "max_steps": 5}, "False schema"),
        ({"model_name_or_path": "m", "schedule_start": 5}, "False schema"),
    ],
)
def test_wrong_files_are_not(
    values: dict[str, Any], said: str, problems: Callable[..., list[str]]
) -> None:
    assert said in " ".join(problems(values))


def test_it_is_written_where_editors_find_it_and_other_settings_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\n")
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    (tmp_path / ".vscode").mkdir()
    settings = tmp_path / ".vscode" / "settings.json"
    settings.write_text(json.dumps({"editor.tabSize": 2, "yaml.schemas": {"other": "*.k8s.yaml"}}))
    assert run(app, ["config", "schema", "--write"]) == 0
    assert json.loads((tmp_path / SCHEMA).read_text()) == file_schema()
    written = json.loads(settings.read_text())
    assert written["editor.tabSize"] == 2
    assert written["yaml.schemas"]["other"] == "*.k8s.yaml"
    patterns = written["yaml.schemas"]["./.lema/schema.json"]
    assert "run.yaml" in patterns
    assert "*.lema.yaml" in patterns
    assert "compose.yaml" not in patterns
    assert MODELINE in capsys.readouterr().out
    assert run(app, ["config", "schema", "--write"]) == 0
    assert json.loads(settings.read_text()) == written


def test_an_editors_file_with_comments_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".vscode").mkdir()
    settings = tmp_path / ".vscode" / "settings.json"
    settings.write_text('{"a": 1} // mine\n')
    assert run(app, ["config", "schema", "--write"]) == 2
    assert settings.read_text() == '{"a": 1} // mine\n'
    assert "yaml.schemas" in capsys.readouterr().err
