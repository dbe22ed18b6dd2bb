"""The page on phases: its example runs as it stands, and the tests that its table names are there."""

import re
from pathlib import Path
from typing import Any

import pytest

from lema.cli.demo.files import write_files

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "phases.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"<!-- phases example -->\n```python\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("lema-demo").mkdir()
    write_files(Path("lema-demo"))
    names: dict[str, Any] = {}
    exec(text, names)
    assert (names["adapter"] / "adapter_model.safetensors").is_file()
    state = names["trainer"].state
    assert (state.kind, state.stage, state.tokens) == ("lora", 1, 4096)


def test_every_row_of_the_comparison_names_tests_that_are_there() -> None:
    rows = {row[0]: re.findall(r"`(test_\w+)`", row[1]) for row in re.findall(r"^\| ([TX]\d+) \|(.*)$", PAGE, re.M)}
    assert list(rows) == [f"T{number}" for number in range(1, 17)] + [f"X{number}" for number in range(1, 9)]
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
    }
    assert all(tests and there.issuperset(tests) for tests in rows.values()), rows
