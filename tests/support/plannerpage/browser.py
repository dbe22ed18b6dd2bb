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

__all__ = ["answers_of", "dumped", "said_after"]

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


TYPED = """
const said = typed.map(([name, value]) => {
  const form = document.getElementById("chosen");
  const field = name === "config" ? document.getElementById(name) : form.elements.namedItem(name);
  const before = field.value;
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const text = (id) => document.getElementById(id).textContent;
  const result = { verdict: text("verdict"), recognised: text("recognised"), yaml: text("yaml"),
    figures: document.getElementById("figures").children.length, model: form.elements.namedItem("model").value,
    length: form.elements.namedItem("length").value };
  field.value = before;
  return result;
});
document.body.append(Object.assign(document.createElement("pre"), { id: "said", textContent: JSON.stringify(said) }));
"""


def said_after(typed: Sequence[tuple[str, str]], page: Path) -> list[dict[str, Any]]:
    """Return what the page says after each value is typed into a field, which is its own again
    before the next.

    Args:
        typed: names of fields (`config` is the pasted one) and values.
        page: where to write a copy of the page that types them.
    """
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    base = f'<head><base href="{PAGE.as_uri()}/">'
    script = f"<script>const typed = {json.dumps(typed)};{TYPED}</script></body>"
    page.write_text(text.replace("<head>", base).replace("</body>", script), encoding="utf-8")
    (said,) = re.findall(
        r'<pre id="said">(.*?)</pre>', dumped(page, milliseconds=60_000), re.DOTALL
    )
    answers: list[dict[str, Any]] = json.loads(html.unescape(said))
    return answers


def _browser() -> str:
    """Return the browser's program."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("this test needs chromium: apt-get install chromium")
