"""The planner's page in a browser without a window has the figures of `lema plan` for what it writes."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plannerpage.combinations import combinations
from plannerpage.reference import figures_of, relative_differences
from plannerpage.write import PAGE, known_models

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(7200)]

COUNT = int(os.environ.get("PLANNER_COMBINATIONS", "200"))
WITHIN = 0.01
SCRIPTS = ("runtime", "plan", "models", "core")
RUN = """
const answers = chosen.map((inputs) => {
  try { return lemaPlanner.figures(inputs); } catch (error) { return { error: String(error.stack) }; }
});
document.getElementById("answers").textContent = JSON.stringify(answers);
"""


def browser() -> str:
    """Return the browser's program."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("this test needs chromium: apt-get install chromium")


def dumped(page: Path, *, milliseconds: int = 600_000) -> str:
    """Return the document that a page has become."""
    done = subprocess.run(
        [
            browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--virtual-time-budget={milliseconds}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=3600,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def chosen() -> list[dict[str, Any]]:
    return list(combinations(known_models(), COUNT))


@pytest.fixture(scope="module")
def answers(chosen: list[dict[str, Any]], tmp_path_factory: Any) -> list[dict[str, Any]]:
    """Return what the page's scripts say of each combination, in the browser."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    scripts = "".join(f'<script src="{(PAGE / name).as_uri()}.js"></script>' for name in SCRIPTS)
    page.write_text(
        f'<pre id="answers"></pre>{scripts}<script>const chosen = {json.dumps(chosen)};{RUN}</script>',
        encoding="utf-8",
    )
    (text,) = re.findall(r'<pre id="answers">(.*?)</pre>', dumped(page), re.DOTALL)
    answers: list[dict[str, Any]] = json.loads(html.unescape(text))
    return answers


def test_the_page_has_the_figures_of_the_plan(
    chosen: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> None:
    assert len(answers) == len(chosen) == COUNT
    wrong = []
    for inputs, page in zip(chosen, answers, strict=True):
        assert "error" not in page, (inputs, page)
        plan = figures_of(inputs, page.get("yaml"))
        far = {
            name: round(difference, 4)
            for name, difference in relative_differences(page, plan).items()
            if difference > WITHIN
        }
        if far:
            wrong.append((inputs, far))
    assert not wrong, "\n".join(f"{inputs}: {far}" for inputs, far in wrong)
    assert sum(page["fits"] for page in answers) > COUNT / 2


def test_the_page_opens_from_a_file_and_plans() -> None:
    document = dumped(PAGE / "index.html", milliseconds=60_000)
    assert "tokens/s" in document
    assert "model_name_or_path: " in document
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', document)
