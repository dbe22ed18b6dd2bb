"""How to add a setting: one of a backend is an entry point, and one of LEMA is a field.

Its name, type, default and sentence are written once. The schema, the command line, the file of a
run, the messages of errors, the page of settings and what a resumed run may change follow from
there.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import settingspage
from installed import installed

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config import LemaConfig, lemaconfig, types
from lema.config.backendsettings import backend_settings
from lema.config.problems import SettingsError
from lema.config.settings import Reported

TOY = Path(__file__).with_name("toysettings")


@pytest.fixture
def toy_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install the package `toysettings`, which has one setting; return the setting's name."""
    project = tomllib.loads((TOY / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    modules = {file.stem: file.read_text() for file in TOY.glob("*.py")}
    with installed(tmp_path / "site", monkeypatch, project["name"], points, modules, group=group):
        backend_settings.cache_clear()
        yield "toy_layout"
    monkeypatch.undo()
    backend_settings.cache_clear()


class LemaConfigWithExample(LemaConfig):
    """All settings, and one more: what a contributor writes into `LemaConfig` itself."""

    example_level: Reported[types.Count] = 3
    """How many examples there are."""


EXAMPLE = "example_level"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the class with one more setting stand where the parts of LEMA look for `LemaConfig`."""
    for module in (lemaconfig, settingspage):
        monkeypatch.setattr(module, "LemaConfig", LemaConfigWithExample)
    monkeypatch.setattr("lema.config.LemaConfig", LemaConfigWithExample)
    monkeypatch.setattr("lema.train.phases.schema.LemaConfig", LemaConfigWithExample)
    return EXAMPLE


def schema_that_is_printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(app, ["config", "schema"]) == 0
    properties: dict[str, object] = json.loads(capsys.readouterr().out)["properties"]
    return properties


def row_of(name: str) -> str:
    """Return the row of a setting on the page of settings, as its command would print it now."""
    (row,) = [line for line in settingspage.page() if line.startswith(f"| `{name}` |")]
    return row


def test_a_setting_of_a_backend_is_in_the_schema_and_on_the_page(
    toy_layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schema_that_is_printed(capsys)[toy_layout] == {
        "default": "flat",
        "description": "How a weight lies on the toy: `flat` as on disk, `tiled` in squares.",
        "enum": ["flat", "tiled"],
        "title": "Toy Layout",
    }
    assert row_of(toy_layout).startswith("| `toy_layout` | `flat`, `tiled` | `flat` | How a weight")


def test_a_setting_of_a_backend_is_taken_and_checked_like_all_others(
    toy_layout: str, tmp_path: Path
) -> None:
    assert LemaConfig("model").toy_layout == "flat"
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: model\ntoy_layout: tiled\n")
    assert LemaConfig.from_yaml(file).backend_settings == {toy_layout: "tiled"}
    file.write_text("model_name_or_path: model\ntoy_layout: tilde\n")
    with pytest.raises(SettingsError, match=r"toy_layout must be one of .*\n.*run.yaml:2$"):
        LemaConfig.from_yaml(file)


def test_without_its_package_there_is_no_such_setting() -> None:
    with pytest.raises(SettingsError, match="toy_layout"):
        LemaConfig("model", toy_layout="tiled")


def test_a_setting_of_lema_is_in_the_schema_and_on_the_page(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    about = schema_that_is_printed(capsys)[example]
    assert isinstance(about, dict)
    assert (about["default"], about["description"]) == (3, "How many examples there are.")
    cells = [cell.strip() for cell in row_of(example).strip("|").split("|")]
    assert cells[2:] == ["`3`", "How many examples there are.", "taken, and said"]


def test_a_setting_of_lema_is_taken_and_checked_by_its_type(example: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: model\nexample_level: 5\n")
    assert LemaConfigWithExample.from_yaml(file).example_level == 5
    file.write_text("model_name_or_path: model\nexample_level: 0\n")
    with pytest.raises(SettingsError, match=r"example_level must be .*\n.*run.yaml:2$"):
        LemaConfigWithExample.from_yaml(file)
