"""The planner's page in a browser without a window has the figures of `lema plan` for what it writes."""

import os
import re
from pathlib import Path

import pytest
from plannerpage.browser import answers_of, dumped
from plannerpage.combinations import combinations, pasted
from plannerpage.comparison import compared
from plannerpage.write import PAGE, known_families, known_models

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(7200)]

COUNT = int(os.environ.get("PLANNER_COMBINATIONS", "200"))
COUNT_PASTED = min(COUNT, 28)


def test_the_page_has_the_figures_of_the_plan(tmp_path: Path) -> None:
    results = list(compared(list(combinations(known_models(), COUNT)), tmp_path))
    assert len(results) == COUNT
    wrong = [result for result in results if result.error or result.far]
    assert not wrong, "\n".join(f"{result.inputs}: {result.far} {result.error}" for result in wrong)
    assert sum(result.fits for result in results) > COUNT / 2
    assert all(result.differences for result in results if result.fits)


def test_a_pasted_config_has_the_figures_of_the_plan(tmp_path: Path) -> None:
    results = list(compared(list(pasted(known_families(), COUNT_PASTED)), tmp_path))
    assert len(results) == COUNT_PASTED
    wrong = [result for result in results if result.error or result.far]
    assert not wrong, "\n".join(f"{result.inputs}: {result.far} {result.error}" for result in wrong)
    assert sum(result.fits for result in results) > COUNT_PASTED / 3


def test_a_config_without_formulas_is_told_why(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 768}
    (answer,) = answers_of(
        [{"config": config, "model": "mamba", "rows": 1}], tmp_path / "page.html"
    )
    assert "none for mamba" in answer["error"]


def test_the_page_opens_from_a_file_and_plans() -> None:
    document = dumped(PAGE / "index.html", milliseconds=60_000)
    assert "tokens/s" in document
    assert "model_name_or_path: " in document
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', document)
