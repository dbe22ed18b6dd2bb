"""`lema init` writes a file that `lema train` runs, takes names known offline, and overwrites
nothing.
"""

import json
import shutil
from pathlib import Path

import pytest

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config import LemaConfig
from lema_tools.models.choices import BASE
from lema_tools.prove import write_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and rows of token ids."""
    directory = tmp_path_factory.mktemp("init")
    write_model(directory / "model", layers=8, hidden=64)
    rows = [{"input_ids": [3 + (7 * row + at) % 90 for at in range(12)]} for row in range(20)]
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def init(model: str, memory: str, *others: str) -> int:
    return run(app, ["init", model, "--device-memory", memory, "--data", "rows.jsonl", *others])


@pytest.mark.slow
def test_what_it_writes_is_trained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert init("model", "1GB", "--output", "small.yaml") == 0
    config = LemaConfig.from_yaml("small.yaml")
    assert (config.device_memory, config.model_name_or_path, config.train_data) == (
        "1GB",
        "model",
        "rows.jsonl",
    )
    assert {name: getattr(config, name) for name in BASE} == BASE
    assert config.max_length == 1024
    text = Path("small.yaml").read_text()
    assert "tokens/s, limited by" in text and "Half of the 32.0 GB of the profile t4" in text
    settings = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.count("\n# ") >= len(settings)  # reasons for all of them
    assert run(app, ["train", "small.yaml", "--max-steps", "1", "--device", "cpu"]) == 0
    assert (place / "output/small/adapter_model.safetensors").is_file()


def test_rows_are_no_longer_than_the_model_has_positions(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    shutil.copytree("model", "short")
    config = json.loads(Path("short/config.json").read_text())
    Path("short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    assert init("short", "1GB", "--output", "short.yaml") == 0
    assert LemaConfig.from_yaml("short.yaml").max_length == 256


def test_a_file_that_is_there_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    Path("mine.yaml").write_text("mine")
    assert init("model", "1GB", "--output", "mine.yaml") == 2
    assert Path("mine.yaml").read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "memory", "others", "code", "said"),
    [
        ("model", "100KB", (), 4, "device memory"),
        ("model", "much", (), 2, "--device-memory much"),
        ("model", "1GB", ("--profile", "abacus"), 2, "abacus"),
        ("model", "1GB", ("--data", "none.jsonl"), 2, "no such file"),
        ("Qwen3.5-122B-A10B", "24GB", (), 2, "not known offline"),
        ("no-such-model", "24GB", (), 3, "no-such-model"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_leaves_no_file(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    memory: str,
    others: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(place)
    assert init(model, memory, "--output", "new.yaml", *others) == code
    assert said in capsys.readouterr().err
    assert not Path("new.yaml").exists()


def test_a_name_that_is_no_utf8_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "init",
        str(place / "model"),
        "--device-memory",
        "1GB",
        "--data",
        str(place / "rows.jsonl"),
    ]
    assert run(app, [*words, "--output", "\udcff"]) == 2
    assert "no UTF-8" in capsys.readouterr().err
