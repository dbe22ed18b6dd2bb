"""docs/settings.md is what its command prints, and has a row for every setting."""

import re
from pathlib import Path

from settingspage import GROUPS, page

from lema.config import LemaConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8").splitlines() == list(page()), (
        "make the page again: python tests/support/settingspage.py > docs/settings.md"
    )


def test_it_has_every_setting_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(LemaConfig.json_schema()["properties"])


def test_every_group_names_settings_that_are_there() -> None:
    named = [name for names in GROUPS.values() for name in names.split()]
    assert set(named) <= LemaConfig.model_fields.keys()
