"""The page of forty questions names commands and settings that there are."""

import re
from importlib.metadata import entry_points
from pathlib import Path

from lema.cli.app import OWN
from lema.config import LemaConfig

PAGE = (Path(__file__).parents[2] / "docs" / "how-do-i.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`]+)`", PAGE)


def test_there_are_forty_questions_each_with_a_page() -> None:
    entries = PAGE.split("\n### ")[1:]
    assert len(entries) == 40
    assert [entry.splitlines()[0] for entry in entries if ".md)" not in entry] == []


def test_every_command_is_one_of_lema() -> None:
    verbs = {*OWN, *(point.name for point in entry_points(group="lema.verbs"))}
    named = [verb for code in CODE for verb in re.findall(r"^lema ([a-z]+)", code)]
    assert len(named) >= 12
    assert set(named) <= verbs


def test_every_setting_is_one_of_lema() -> None:
    settings = {*LemaConfig.defaults(), "trains"}
    named = [name for code in CODE for name in re.findall(r"^([a-z_]+): ", code)]
    assert len(named) >= 20
    assert set(named) <= settings
