"""Settings of a run as options of a command line."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lema.cli.app import app
from lema.cli.exitcodes import run


def read(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


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
