"""The page of devices and `lema backends` say the same of where LEMA has run, of every backend
that is installed.
"""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
    "lema.backends"
]
PAGE = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| `(?!device`)(\w+)` \|.* \| ([^|]+) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", POINTS)
def test_the_page_says_where_a_backend_has_run(name: str) -> None:
    module, _, kind = POINTS[name].partition(":")
    assert getattr(import_module(module), kind).proven[name] == TABLE[name]


def test_the_page_has_no_others() -> None:
    assert TABLE.keys() == POINTS.keys()
