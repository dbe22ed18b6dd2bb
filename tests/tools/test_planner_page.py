"""The planner's page is made of what `lema plan` is made of, as that is now."""

import json
import re

import pytest
from plannerpage.formulas import formulas_of
from plannerpage.hollowforms import AS_PUBLISHED, FORMS, write_form
from plannerpage.javascript import translated
from plannerpage.modelfacts import RANKS, ROWS, _form, _work, drawn_up
from plannerpage.sizes import SAMPLE, SYMBOLS, Peak, Size, total
from plannerpage.write import (
    MODELS_FILE,
    PAGE,
    PLAN_FILE,
    known_families,
    known_models,
    plan_text,
)

from lema_tools.models.checkpoints import config_of, named

pytestmark = pytest.mark.filterwarnings("ignore")

LARGEST = 1_500_000  # bytes of the page, with its tables
MODEL = "Llama-3.1-8B-Instruct"


def test_the_arithmetic_is_the_one_of_lema_plan() -> None:
    assert PLAN_FILE.read_text(encoding="utf-8") == plan_text(), (
        "make it again: python -m plannerpage.write"
    )


def test_tables_have_the_bytes_and_operations_of_a_model(tmp_path) -> None:
    facts = known_models()[MODEL]
    directory = write_form(named(MODEL), AS_PUBLISHED, tmp_path)
    assert directory is not None
    assert _form(directory) == facts["forms"][AS_PUBLISHED]
    work = _work(drawn_up(directory, "sft", RANKS[0]), 512)
    assert work["kinds"] == facts["kinds"]
    assert work["rows"] == facts["work"]["512"][0]
    assert len(work["rows"]) == len(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[1:])
def test_tables_have_the_bytes_of_quantised_layers(form, tmp_path) -> None:
    directory = write_form(named(MODEL), form, tmp_path)
    assert directory is not None
    assert _form(directory) == known_models()[MODEL]["forms"][form]


def test_models_with_the_tables_of_another_have_its_config() -> None:
    tables = known_models()
    copies = {name: facts["same"] for name, facts in tables.items() if "same" in facts}
    assert copies
    for name, same in copies.items():
        one = named(name)
        other = named(same)
        assert one is not None
        assert other is not None
        assert one.form == other.form
        assert config_of(one).to_dict() == config_of(other).to_dict()


@pytest.mark.slow
def test_formulas_are_those_that_a_model_of_prime_sizes_has() -> None:
    assert json.loads(json.dumps(formulas_of("llama"))) == known_families()["llama"]


def test_sizes_know_what_they_are_products_of() -> None:
    hidden = SAMPLE["hidden"]
    length = SAMPLE["length"]
    saved = total([4 * hidden * length, 2 * hidden * length, 8 * length])
    assert saved == 6 * hidden * length + 8 * length
    by_hidden = [0] * len(SYMBOLS)
    by_hidden[SYMBOLS.index("length")] = 1
    assert saved.terms.pop(tuple(by_hidden)) == 8
    by_hidden[SYMBOLS.index("hidden")] = 1
    assert saved.terms == {tuple(by_hidden): 6}
    with pytest.raises(ValueError, match="no product of the sizes"):
        Size.of(hidden * length + 1)


def test_a_peak_keeps_what_may_be_largest_in_another_model() -> None:
    peak = Peak()
    for live in (SAMPLE["hidden"], SAMPLE["length"], 2 * SAMPLE["length"]):
        assert max(peak, Size.of(live)) is peak
    assert sorted(peak.highest) == [2 * SAMPLE["length"], SAMPLE["hidden"]]


def test_the_page_asks_nobody_for_anything() -> None:
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"fetch\(|XMLHttpRequest|sendBeacon|WebSocket|@import|https?://", text
        ), file
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < LARGEST
    assert MODELS_FILE.exists()


def test_python_that_is_not_translated_is_refused(tmp_path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def wait():\n    async_ = {**{}}\n    match async_:\n        case _: pass\n")
    with pytest.raises(NotImplementedError, match="Match"):
        translated([file], tmp_path, (), {})
