"""docs/defaults.md is what its command prints, and no peer's value in it is of our invention."""

import json
from pathlib import Path

import pytest
from defaultspage import ROWS, TABLES, page, peer_default

from lema.config import LemaConfig

PAGE = Path(__file__).parents[2] / "docs" / "defaults.md"


def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8").splitlines() == list(page()), (
        "make the page again: python tests/support/defaultspage.py > docs/defaults.md"
    )


def test_every_row_is_a_setting_or_what_trains() -> None:
    properties = LemaConfig.json_schema()["properties"]
    unknown = {row.setting for row in ROWS} - set(properties)
    assert unknown == {"trains"}  # the setting of a phase, which is a run of its own


def test_a_kind_of_run_has_its_own_default() -> None:
    table = json.loads(TABLES["TRL"].read_text(encoding="utf-8"))
    assert peer_default(table, "TRL", "learning_rate", "sft") == "2e-05"
    assert peer_default(table, "TRL", "learning_rate", "dpo") == "1e-06"


def test_a_key_that_the_peer_does_not_have_is_refused() -> None:
    table = json.loads(TABLES["axolotl"].read_text(encoding="utf-8"))
    with pytest.raises(KeyError):
        peer_default(table, "axolotl", "learning_rates", "sft")


def test_lema_s_rate_for_preferences_is_that_of_the_schema() -> None:
    config = LemaConfig("model", train_data="rows.jsonl", output_dir="out", objective="dpo")
    (row,) = [row for row in ROWS if row.objective == "dpo"]
    assert row.lema == str(config.learning_rate)
