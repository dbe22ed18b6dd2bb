"""The planner's page in a browser without a window has the figures of `lema plan` for what it writes."""

import json
import os
import re
from pathlib import Path

import pytest
from plannerpage.browser import answers_of, dumped, said_after
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


def test_a_number_that_a_field_does_not_take_ends_the_plan_with_a_sentence(tmp_path: Path) -> None:
    typed = [("rows", "0"), ("rows", ""), ("diskSpeed", ""), ("rank", "0"), ("dataRows", "0")]
    for (_, value), answer in zip(typed, said_after(typed, tmp_path / "page.html"), strict=True):
        assert answer["verdict"].startswith("Nothing is planned. ")
        assert ("is missing." if value == "" else "0 is not a ") in answer["verdict"]
        assert answer["yaml"] == "" and answer["figures"] == 0


def test_a_pasted_config_is_planned_with_its_own_length_or_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 256,
        "dtype": "float16",
    }
    wide = {**config, "dtype": "float32"}
    texts = [json.dumps(config), json.dumps(wide), json.dumps(config), "3", ""]
    typed = [("config", text) for text in texts]
    short, refused, again, number, empty = said_after(typed, tmp_path / "page.html")
    assert short["model"] == "your config.json" and short["length"] == "256"
    assert short["yaml"] and short["figures"] and again == short
    assert "its weights are float32" in refused["recognised"]
    assert refused["model"] != "your config.json" and refused["figures"]
    assert number["recognised"] == "This is no JSON object." and empty["recognised"] == ""
