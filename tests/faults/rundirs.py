"""Directories of runs from elsewhere, as `lema watch`, `lema report` and `lema train --resume` open
them.

Lines of metrics, plans, states of checkpoints, certificates, cards and traces are mutated,
multiplied, and given text that a terminal or a browser would obey. A page must have no element and
no attribute that an honest run's has not; what goes to a terminal has no control character.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

from faults import forked, watch
from faults.mutations import mutate
from faults.outcome import Outcome
from faults.tinymodel import TinyModel, tiny_model

__all__ = ["BAIT", "KINDS", "plain", "run"]

# What a browser or a terminal would take for more than text.
BAIT = (
    *(
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "</style><svg onload=1>",
    ),
    *(
        "javascript:alert(1)",
        "</title><script src=//x>",
        "<!--",
        "]]>",
        "&lt;b&gt;",
        "{{7*7}}",
        "a | b",
        "## Results",
    ),
    *(
        "\x1b[2J\x1b[1;31m",
        "\x1b]0;owned\x07",
        "\x1b]52;c;aGk=\x07",
        "\x9b31m",
        "\r\n\x08\x7f",
        "\u202e",
        "[red]x[/red]",
    ),
    *(
        "[link=http://x]y[/link]",
        "NaN",
        "-Infinity",
        "checkpoint-1",
        "a" * 3000,
        "\ud800",
        "\u2028",
    ),
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
RUN = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "save_total_limit": 2}
# lines of metrics; a million take as long as the reading of their bytes
MANY = (
    1,
    1,
    1,
    300,
    20_000,
)
OBJECTS = (
    {},
    {"a": []},
    {"parts": {}},
    {"name": "<i>x</i>"},
    {"device": {"slots": 1}, "host": {}},
    [{"name": "x"}],
)
KEYS = tuple(
    (key, one)
    for key in ("step", "phase", "event", "loss", "memory", "plan", "phases", "settings")
    for one in OBJECTS
)


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Open `count` directories, each drawn from the seed and its own number, of all kinds in
    turn.
    """
    honest(tiny_model())
    required = (
        "shown, gone on with, or refused by name; no exit of 1, no hang; nothing that a "
        "browser or terminal obeys"
    )
    return watch.drawn("directories of runs", KINDS, count, seed, report, required)


@cache
def honest(made: TinyModel) -> Path:
    """Make runs that nobody harmed, once, a plain one and one of phases, and return the directory
    above them.

    Raises:
        RuntimeError: one fails.
    """
    place = made.place / "honest"

    def work() -> int:
        from lema.cli.app import app
        from lema.cli.exitcodes import run as run_command

        place.mkdir()
        rows = str(made.place / "rows.jsonl")
        plain = made.config(place, output_dir=str(place / "plain"), eval_data=rows, **RUN)
        code = run_command(
            app, ["train", str(plain), "--trace", str(place / "plain" / "trace.json")]
        )
        phase = {"learning_rate": 1e-3, "tokens": 192, "mixture": [{"name": "text", "rate": 1.0}]}
        phases = [
            {"name": "one", "trains": "full", **phase},
            {"name": "two", "trains": "lora", "lora_rank": 2, **phase},
        ]
        whole = {"train_data": {"text": rows}, "phases": phases, "max_steps": None, "save_steps": 1}
        return code or run_command(
            app, ["train", str(made.config(place, output_dir=str(place / "phases"), **whole))]
        )

    if (ended := forked.warm(work, made.place / "honest.log")).code:
        raise RuntimeError(f"the runs that are to be harmed ended with {ended.code}: {ended.said}")
    proved = {
        "holds": True,
        "bitwise": False,
        "arms": [{"name": "streamed", "peak_bytes": 3}],
        "loss": [0.5, 0.25],
    }
    (place / "plain" / "certificate.json").write_text(json.dumps(proved), encoding="utf-8")
    return place


def _harmed(file: Path, draw: Random, *, manifest: bool = False) -> None:
    """Mutate a file of JSON, or of lines of it, or of text."""
    raw = file.read_bytes()
    if file.suffix == ".jsonl":
        lines = raw.splitlines()
        for at in draw.sample(range(len(lines)), min(len(lines), draw.choice((1, 1, 3)))):
            lines[at] = (
                mutate(json.loads(lines[at]), draw, BAIT, KEYS).replace(b"\n", b" ")
                if lines[at][:1] == b"{"
                else b""
            )
        lines = [
            line
            for line in lines
            for _ in range(draw.choice(MANY) if len(lines) < 100 and draw.random() < 0.1 else 1)
        ]
        file.write_bytes(b"\n".join(lines) + draw.choice((b"\n", b"\n", b"", b"\n\n", b"\n{")))
    elif file.suffix == ".json":
        file.write_bytes(mutate(json.loads(raw), draw, BAIT, KEYS))
    else:
        text = raw.decode().splitlines()
        text.insert(
            draw.randrange(len(text) + 1),
            draw.choice(("| {} | {} |", "## {}", "- {}")).format(*draw.choices(BAIT, k=2)),
        )
        file.write_bytes("\n".join(text).encode("utf-8", "surrogatepass"))


def _shown(kind: str, names: tuple[str, ...]) -> Callable[[TinyModel, Path, Random], str]:
    """A kind: some of these files of a run are harmed, and the run is watched or told as a page."""

    def show(made: TinyModel, place: Path, draw: Random) -> str:
        out = Path(shutil.copytree(honest(made) / kind, place / "run"))
        for name in draw.sample(names, draw.choice((1, 1, min(2, len(names))))):
            for file in sorted(out.glob(name)):
                _harmed(file, draw)
        if draw.random() < 0.5:
            return watch.command("watch", "--once", out, named=(str(out),), printed=plain)
        wrong = watch.command("report", out, named=(str(out),), printed=plain)
        page = out / "report.html"
        return wrong or (_obeyed(page.read_text(encoding="utf-8")) if page.exists() else "")

    return show


def _resumed(kind: str) -> Callable[[TinyModel, Path, Random], str]:
    """A kind: files of checkpoints are harmed, their manifest tells of the new bytes, and the
    run is gone on with.
    """

    def resume(made: TinyModel, place: Path, draw: Random) -> str:
        out = Path(shutil.copytree(honest(made) / kind, place / "out"))
        found = sorted(
            path for path in out.rglob("*.json*") if path.parent.name.startswith("checkpoint-")
        )
        for file in draw.sample([*found, out / "metrics.jsonl"], draw.choice((1, 1, 2))):
            _harmed(file, draw)
            if file.name != "manifest.json" and draw.random() < 0.8:
                _told_anew(file)
        rows = str(made.place / "rows.jsonl")
        if kind == "plain":
            given: dict[str, Any] = {**RUN, "eval_data": rows, "max_steps": 5}
        else:
            plan = json.loads(
                (honest(made) / "run.yaml").read_text().partition("phases: ")[2].splitlines()[0]
            )
            given = {
                "train_data": {"text": rows},
                "phases": plan,
                "max_steps": None,
                "save_steps": 1,
            }
        config = made.config(place, output_dir=str(out), **given)
        return watch.command("train", "--resume", config, named=(str(out), str(place)))

    return resume


def _told_anew(file: Path) -> None:
    """Write into the manifest of a checkpoint what a file of it has come to be."""
    from lema.storage.manifest import write_manifest

    manifest = file.parent / "manifest.json"
    if manifest.exists():
        manifest.unlink()
        write_manifest(file.parent)


def plain(said: str) -> str:
    """Say which character of what was printed a terminal would obey; empty: none."""
    found = CONTROL.search(said)
    return (
        (
            f"{found[0]!r} goes to the terminal in "
            f"{said[max(0, found.start() - 40) : found.end() + 40]!r}"
        )
        if found
        else ""
    )


class _Elements(HTMLParser):
    """What elements a page has, with which attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[tuple[str, str]]()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.found |= {(tag, name) for name, _ in attrs} | {(tag, "")}
        self.found |= {
            (tag, f"{name}={value}")
            for name, value in attrs
            if name in ("href", "src") and value[:1] != "#"
        }


ELEMENTS = re.compile(
    "html|head|meta|title|style|body|main|header|h[123]|span|p|nav|a|section|div|b|small|figure|figcaption|svg|path|text|"
    "g|rect|circle|i|details|summary|pre|table|thead|tbody|tr|th|td|footer|code|script"
)
ATTRIBUTES = re.compile(
    "|lang|charset|name|content|class|id|href|style|title|width|height|[xydr]|r[xy]|c[xy]|role|aria-label|data-points|"
    "viewbox"
)


def _obeyed(page: str) -> str:
    """Say what a page has that no page of an honest run has."""
    parser = _Elements()
    parser.feed(page)
    wrong = {
        f"<{tag} {name}>"
        for tag, name in parser.found
        if not (ELEMENTS.fullmatch(tag) and ATTRIBUTES.fullmatch(name))
    }
    wrong |= {f"{parser.scripts} scripts"} if parser.scripts != 1 else set()
    wrong |= {f"{found!r} in the page" for found in ("\x1b", "\0") if found in page}
    return ", ".join(sorted(wrong))


KINDS: Mapping[str, Callable[[TinyModel, Path, Random], str]] = {
    "metrics": _shown("plain", ("metrics.jsonl",)),
    "plan": _shown("plain", ("plan.json", "metrics.jsonl")),
    "phases": _shown("phases", ("plan.json", "metrics.jsonl")),
    "beside": _shown(
        "plain",
        ("*trace.json", "certificate.json", "README.md", "lema_config.json", "checkpoint-*/*.json"),
    ),
    "checkpoint": _resumed("plain"),
    "phase checkpoint": _resumed("phases"),
}
