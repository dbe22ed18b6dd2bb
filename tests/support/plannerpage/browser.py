"""The planner's page in a browser without a window: what its scripts say of what persons choose."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plannerpage.write import PAGE

__all__ = ["answers_of", "dumped"]

SCRIPTS = ("runtime", "plan", "models", "families", "pasted", "core")
RUN = """
const answers = chosen.map((inputs) => {
  try { return lemaPlanner.figures(inputs); } catch (error) { return { error: String(error.stack) }; }
});
document.getElementById("answers").textContent = JSON.stringify(answers);
"""


def dumped(page: Path, *, milliseconds: int = 600_000, options: Sequence[str] = ()) -> str:
    """Return the document that a page has become."""
    done = subprocess.run(
        [
            _browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--virtual-time-budget={milliseconds}",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=3600,
        check=True,
    )
    return done.stdout


def answers_of(chosen: Sequence[dict[str, Any]], page: Path) -> list[dict[str, Any]]:
    """Return what the page's scripts say of each combination, in the browser.

    Args:
        chosen: what persons choose.
        page: where to write a page that has the scripts and asks them.
    """
    scripts = "".join(f'<script src="{(PAGE / name).as_uri()}.js"></script>' for name in SCRIPTS)
    page.write_text(
        f'<pre id="answers"></pre>{scripts}<script>const chosen = {json.dumps(chosen)};{RUN}</script>',
        encoding="utf-8",
    )
    (text,) = re.findall(r'<pre id="answers">(.*?)</pre>', dumped(page), re.DOTALL)
    answers: list[dict[str, Any]] = json.loads(html.unescape(text))
    return answers


def _browser() -> str:
    """Return the browser's program."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("this test needs chromium: apt-get install chromium")
