"""The page on phases: its example runs as it stands, and the tests that its table names are
there.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from lema.config import LemaConfig
from lema.train.phases.file import has_phases, read_phase_file
from lema_tools.demo.run import write_files

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "phases.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(
        r"<!-- phases example -->\n```python\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    Path("lema-demo").mkdir()
    write_files(Path("lema-demo"))
    names: dict[str, Any] = {}
    exec(text, names)
    assert (names["adapter"] / "adapter_model.safetensors").is_file()
    state = names["trainer"].state
    assert (state.kind, state.stage, state.tokens) == ("lora", 1, 4096)


def blocks() -> list[str]:
    """Return every file of phases that the docs show."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
    found = [
        text
        for page in pages
        for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "phases:" in text
    ]
    assert found
    return found


@pytest.mark.parametrize("text", blocks())
def test_a_file_that_the_docs_show_is_one(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in re.findall(r"data/\w+\.\w+", text):
        Path(name).touch()
    Path("run.yaml").write_text(f"model_name_or_path: model\n{text}", encoding="utf-8")
    file = read_phase_file("run.yaml")
    assert file.plan.phases[-1].learning_rate == 2e-4 == file.config.learning_rate
    assert file.plan.warnings() == ()


@pytest.mark.parametrize(
    "config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda config: config.stem
)
def test_every_file_of_settings_is_right(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lema-demo" / "data").mkdir(parents=True)
    for name in ("text.txt", "chat.jsonl"):
        (tmp_path / "lema-demo" / "data" / name).touch()
    if not has_phases(config):
        assert LemaConfig.from_yaml(config)
        return
    plan = read_phase_file(config).plan
    assert plan.has_rows or plan.warnings() == ()  # phases of epochs are counted with their rows


def test_every_row_of_the_comparison_names_tests_that_are_there() -> None:
    page = (DOCS / "internals" / "phases.md").read_text(encoding="utf-8")
    rows = {
        row[0]: re.findall(r"`(test_\w+)`", row[1])
        for row in re.findall(r"^\| ([TX]\d+) \|(.*)$", page, re.M)
    }
    assert list(rows) == [f"T{number}" for number in range(1, 17)] + [
        f"X{number}" for number in range(1, 9)
    ]
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
    }
    assert all(tests and there.issuperset(tests) for tests in rows.values()), rows
