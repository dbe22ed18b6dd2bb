"""`lema init` writes a file that `lema train` runs, takes names known offline, and overwrites
nothing.
"""

import json
import shutil
from pathlib import Path

import pytest

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.cli.schemafiles import MODELINE, SCHEMA
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.errors import DataError
from lema_tools import init as verb
from lema_tools.models.choices import BASE
from lema_tools.prove import write_model
from lema_tools.starting import machine as machines
from lema_tools.starting import names
from lema_tools.starting.rows import look_at


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
    assert "tokens/s, limited by" in text and "of this machine" in text
    assert text.startswith(f"{MODELINE}\n")
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
        ("llama-3.3-70b", "24GB", (), 3, "did you mean meta-llama/Llama-3.3-70B-Instruct? "),
        ("model", "1GB", ("--host-memory", "much"), 2, "--host-memory much"),
        ("", "1GB", (), 2, "the name of the model is empty"),
        (" ", "1GB", (), 2, "the name of the model is empty"),
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


def here(shared: bool = True, **changes: int) -> machines.Here:
    sizes = {"device_memory": 3, "host_memory": 5, "host_total": 9, "host_free": 8, "disk_free": 7}
    sizes = {name: size * 10**9 for name, size in (sizes | changes).items()}
    return machines.Here("cpu" if shared else "cuda", shared, **sizes)


def test_without_sizes_they_are_those_of_this_machine(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(machines, "here", lambda _: here())
    assert run(app, ["init", "model", "--data", "rows.jsonl", "--output", "here.yaml"]) == 0
    config = LemaConfig.from_yaml("here.yaml")
    assert (config.device_memory, config.host_memory) == ("3GB", "5GB")
    said = capsys.readouterr().out
    assert "this machine: device cpu, 8.0 GB of 9.0 GB of memory free, 7.0 GB of disk free" in said
    assert "20 rows with the columns input_ids, read as token ids" in said
    assert not any(line.endswith(";") for line in said.splitlines())
    assert "0 layers" not in said + Path("here.yaml").read_text()
    assert Path(SCHEMA).is_file()


def test_this_machine_is_read(tmp_path: Path) -> None:
    found = machines.here(tmp_path / "my.yaml")
    assert 0 < found.device_memory < found.host_free <= found.host_total
    assert 0 < found.host_memory < found.host_free
    assert found.disk_free is not None
    assert parse_memory(found.device_memory, 0) == found.device_memory


def test_at_a_terminal_it_asks_and_enter_takes_what_is_proposed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    asked: list[tuple[str, str]] = []

    def prompt(question: str, default: str) -> str:
        asked.append((question, default))
        return "model" if "Model" in question else default

    monkeypatch.setattr(verb, "at_terminal", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(names, "cached_ids", lambda: ["org/cached"])
    assert run(app, ["init", "--output", "asked.yaml"]) == 0
    assert [default for _, default in asked] == ["org/cached", "rows.jsonl"]
    assert LemaConfig.from_yaml("asked.yaml").train_data == "rows.jsonl"


@pytest.mark.parametrize(
    ("words", "said"), [([], "MODEL is not given"), (["model"], "--data is not given")]
)
def test_in_a_pipe_it_does_not_ask(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(place)
    assert run(app, ["init", *words, "--output", "pipe.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("pipe.yaml").exists()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama-3.3-70b", ["meta-llama/Llama-3.3-70B-Instruct"]),
        ("qwen/qwen3-8", ["Qwen/Qwen3-8B"]),
        ("mine", ["me/Mine-7B"]),
        ("zzzzzz", []),
    ],
)
def test_a_wrong_id_means_the_nearest(typed: str, meant: list[str]) -> None:
    ids = ["meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-8B", "me/Mine-7B", "google/gemma-2b"]
    assert names.meant_models(typed, ids) == meant


@pytest.mark.parametrize(
    ("row", "kind", "settings"),
    [
        ({"text": "a"}, "text", {}),
        ({"prompt": "a", "completion": "b"}, "prompts with completions", {}),
        (
            {"question": "a", "answer": "b"},
            "prompts with completions",
            {"columns": {"prompt": "question", "completion": "answer"}},
        ),
        (
            {"Question": "a", "answer": "b", "id": 3},
            "prompts with completions",
            {"columns": {"prompt": "Question", "completion": "answer"}},
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "chats", {}),
        (
            {"messages": [{"from": "human", "value": "a"}]},
            "chats",
            {"columns": {"role": "from", "content": "value"}},
        ),
        ({"chosen": "a", "rejected": "b"}, "pairs that are compared", {"objective": "dpo"}),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "completions that are good or bad",
            {"objective": "kto"},
        ),
        ({"body of it": "a", "n": 1}, "text", {"columns": {"text": "body of it"}}),
    ],
)
def test_columns_are_recognised_or_proposed(
    tmp_path: Path, row: dict[str, object], kind: str, settings: dict[str, object]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    found = look_at(file)
    assert (found.kind, dict(found.settings), found.count) == (kind, settings, 3)
    yaml = tmp_path / "some.yaml"
    yaml.write_text("\n".join(["model_name_or_path: m", *found.setting_lines()]))
    assert {name: getattr(LemaConfig.from_yaml(yaml), name) for name in settings} == settings


@pytest.mark.parametrize(
    ("row", "objective"),
    [
        ({"input_ids": [1, 2]}, "sft"),
        ({"chosen": [1, 2], "rejected": [1, 3]}, "dpo"),
        ({"prompt": [1], "completion": [2], "label": True}, "kto"),
    ],
)
def test_the_learning_rate_is_that_of_the_objective(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, object],
    objective: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    words = ["init", str(place / "model"), "--device-memory", "1GB", "--data", "rows.jsonl"]
    assert run(app, words) == 0
    config = LemaConfig.from_yaml("my.yaml")
    assert config.objective == objective
    assert config.learning_rate == LemaConfig("m", objective=objective).learning_rate  # type: ignore[arg-type]
    assert (config.learning_rate == 5e-6) == (objective != "sft")


def test_columns_that_say_nothing_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1, "b": 2}\n')
    with pytest.raises(DataError, match="say nothing to train on"):
        look_at(file)


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


@pytest.mark.slow
def test_long_rows_go_in_chunks(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    options = ("--max-length", "32768", "--output", "long.yaml", "--profile", "4090")
    assert init("model", "1GB", *options) == 0
    assert "note: max_length is 32,768, and the model was made for" in capsys.readouterr().out
    config = LemaConfig.from_yaml("long.yaml")
    assert config.max_length == 32768
    assert config.sequence_chunk == "auto"
    assert config.gradient_checkpointing is True
    assert config.boundary_activations in ("device", "host")
    assert config.batch_size == 4
    assert "By this plan rows go through layers" in Path("long.yaml").read_text()
