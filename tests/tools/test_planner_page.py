"""The planner's page is made of what `lema plan` is made of, as that is now."""

import re

import pytest
from plannerpage.hollowforms import AS_PUBLISHED, FORMS, write_form
from plannerpage.javascript import translated
from plannerpage.modelfacts import RANKS, ROWS, _drawn, _form, _work
from plannerpage.write import MODELS_FILE, PAGE, PLAN_FILE, known_models, plan_text

from lema_tools.models.checkpoints import named

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
    work = _work(_drawn(directory, "sft", RANKS[0]), 512)
    assert work["kinds"] == facts["kinds"]
    assert work["rows"] == facts["work"]["512"][0]
    assert len(work["rows"]) == len(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[1:])
def test_tables_have_the_bytes_of_quantised_layers(form, tmp_path) -> None:
    directory = write_form(named(MODEL), form, tmp_path)
    assert directory is not None
    assert _form(directory) == known_models()[MODEL]["forms"][form]


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
