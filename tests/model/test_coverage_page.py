"""docs/coverage.md is what its command prints, and names at least 50 checkpoints, nearly all of which stream."""

from pathlib import Path

import pytest
from coveragepage import CHECKPOINTS, page, try_checkpoint
from publishedforms import FORMS

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_names_the_checkpoints_of_the_list() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if "| `" in line]
    named = [(name.removeprefix("| "), kind.strip("`"), form) for name, kind, form, *_ in rows]
    assert named == [(one.name, one.model_type, one.form) for one in CHECKPOINTS]
    assert len(named) >= 50
    assert {one.form for one in CHECKPOINTS} <= FORMS.keys()


@pytest.mark.exhaustive  # it opens every type of the page
def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text().splitlines() == list(page())
    refused = [checkpoint.name for checkpoint in CHECKPOINTS if try_checkpoint(checkpoint).refused]
    assert refused == ["Kimi-K3"]
