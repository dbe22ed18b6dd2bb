"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import newcomer
import pytest
from hubcache import files_of, write_cache
from typer.main import get_command

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema_tools.demo import run_demo

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON, TRL = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("python.md", "coming-from-trl.md")
)
OPENED = """
model = LemaModel(LemaConfig("lema-demo/model", output_dir="output/fit", max_steps=1, columns=COLUMNS))
model.initialize_lora()
trainer, tokenizer = model.get_trainer(), model.tokenizer
"""
ROWS = """
COLUMNS = {"prompt": "question", "completion": "answer"}
rows = [{"question": "What does the miller bring?", "answer": "Flour."}] * 4
"""


def block(name: str, page: str = README) -> str:
    """The one fenced block between `<!-- name -->` and `<!-- end -->`."""
    (text,) = re.findall(rf"<!-- {name} -->\n```\w+\n(.*?)```\n<!-- end -->", page, re.DOTALL)
    return str(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the demo was run, briefly."""
    directory = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        run_demo(Path("lema-demo"), max_steps=2)
    return directory


@pytest.mark.slow
def test_the_python_examples_run(place: Path) -> None:
    """All run in one process, because imports take long. The model of the TRL page is in the
    hub's cache.
    """
    write_cache(place / "hub", files_of(place / "lema-demo/model"), name="Qwen/Qwen2.5-0.5B")
    (place / "data").mkdir()
    rows = (
        (place / "lema-demo/data/chat.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    (place / "data/chats.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    examples = [block("python example", PYTHON), block("python example"), ROWS + OPENED]
    examples += [block("data example", PYTHON), block("settings example", TRL)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(examples)],
        cwd=place,
        env={**os.environ, "HF_HUB_CACHE": str(place / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[:10]]
    assert losses[-1] < losses[0]
    assert (place / "output/from-python/checkpoint-10/adapter_model.safetensors").is_file()
    assert (place / "output/from-python/adapter/adapter_config.json").is_file()
    assert (place / "output/first/adapter_config.json").is_file()
    assert (place / "Qwen2.5-0.5B-SFT/adapter_config.json").is_file()


@pytest.mark.slow
def test_the_config_and_the_commands_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    Path("my.yaml").write_text(block("config example"), encoding="utf-8")
    for command in (
        ["train", "my.yaml", "--set", "save_steps=10"],
        ["train", "my.yaml", "--set", "save_steps=10", "--set", "max_steps=152", "--resume"],
        ["eval", "my.yaml"],
        ["generate", "my.yaml", "--prompt", "What does the miller bring?", "--max-new-tokens", "4"],
        ["merge", "output/my-run", "merged/"],
        ["prepare", "lema-demo/model", "prepared", "--dtype", "bfloat16"],
    ):
        assert run(app, command) == 0, command
    assert Path("merged/config.json").is_file()
    assert Path("prepared/model.safetensors").is_file()


def test_every_verb_it_names_is_one_we_have() -> None:
    named = set(re.findall(r"^lema ([a-z]+)", README, re.MULTILINE))
    assert named
    assert named <= set(get_command(app).commands)  # type: ignore[attr-defined] # a group has commands


def test_ci_runs_its_test_command_verbatim() -> None:
    """`.ci/run` takes the command out of the README, so here is only that it finds one, and the
    right one.
    """
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (extraction,) = re.findall(r"command=\$\((sed .*)\)\n", script)
    found = subprocess.run(
        ["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == block("test command")
    assert "\n" not in found.stdout.strip()
    assert 'bash -euo pipefail -c "$command"' in script
    rows = re.findall(r"^start .*tox run -e (\S+)", script, re.MULTILINE)
    environments = [name for row in rows for name in row.split(",")]
    expected = {"session", "seconddevice-session", "trl", "oldest", "newcomer", "serving"}
    assert {*environments} == {*expected, "learner"}
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert all(f"[testenv:{name}]\n" in tox for name in environments)
    assert "commands = {[with_py]python} tests/support/newcomer.py\n" in tox
    (served,) = re.findall(r"^served=(\S+)", script, re.MULTILINE)
    file, _, test = served.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
    assert script.count("$served") == 2
    (published,) = re.findall(r"^published=(\S+)", script, re.MULTILINE)
    assert (ROOT / published).is_file()


def test_a_newcomer_needs_two_commands_after_the_install() -> None:
    """CI runs them, prints their time, and limits the time of the processors."""
    demo, run_of_settings = newcomer.commands()
    assert [Path(demo[0]).name, *demo[1:]] == ["lema", "demo"]
    assert [Path(run_of_settings[0]).name, *run_of_settings[1:]] == ["lema", "train", "my.yaml"]
    assert newcomer.MOST_CPU_SECONDS <= 300


def test_every_file_it_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
