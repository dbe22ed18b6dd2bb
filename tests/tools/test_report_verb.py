"""`lema report`: one HTML page, well formed, without a reference to anywhere else, whose numbers
are the run's.
"""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, lema

from lema.train.metrics import read_metrics
from lema_tools.page import escape
from lema_tools.rundir import METRICS, read_run
from lema_tools.steptrace import read_step
from lema_tools.svg import number

SECTIONS = [
    "summary",
    "curves",
    "time",
    "timeline",
    "memory",
    "results",
    "certificates",
    "settings",
    "environment",
]
VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """What is in a page: its elements with their attributes, its texts by section; it must be
    well formed.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = str(dict(attrs)["id"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def curve(self, name: str) -> dict[str, list[list[Any]]]:
        """The points that the pointer tells of a figure."""
        label = f"{name} over steps"
        (found,) = (one for one in self.all("svg") if one.get("aria-label") == label)
        return dict(json.loads(str(found["data-points"])))


def page_of(directory: Path, *words: Any) -> Page:
    assert lema("report", directory, *words) == 0
    text = (directory / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert [str(one["id"]) for one in page.all("section")] == SECTIONS
    assert "http" not in text.lower(), "nothing is loaded from elsewhere"
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "action", "data"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert str(attributes.get("href") or "#").startswith("#"), tag
    assert len(page.all("script")) == 1 and not page.all("link")
    return page


def test_the_curves_are_those_of_metrics(plain_run: Path) -> None:
    page = page_of(plain_run)
    rows = read_metrics(plain_run / METRICS)
    for title, key in (("learning rate", "learning_rate"), ("gradient norm", "grad_norm")):
        found = page.curve(title)[title]
        assert [(step, told) for step, _, told in found] == [
            (r["step"], number(r[key])) for r in rows if key in r
        ]
    losses = page.curve("loss")
    assert [(step, told) for step, _, told in losses["training"]] == [
        (row["step"], number(row["loss"])) for row in rows if "loss" in row
    ]
    assert [(step, told) for step, _, told in losses["evaluation"]] == [
        (row["step"], number(row["eval_loss"])) for row in rows if "eval_loss" in row
    ]
    last = [row["loss"] for row in rows if "loss" in row][-1]
    assert f"{last:.4f}" in page.texts["summary"]


def test_settings_environment_and_results_are_those_of_the_run(plain_run: Path) -> None:
    page = page_of(plain_run)
    about = json.loads((plain_run / "plan.json").read_text())
    given = [one for one in page.all("tr") if one.get("class") == "given"]
    assert len(given) == 2 * len(about["given"]) > 0, "once by themselves, once among all"
    assert all(name in page.texts["settings"] for name in about["settings"])
    assert all(version in page.texts["environment"] for version in about["versions"].values())
    assert "checkpoint-6" in page.texts["environment"]
    assert "train_loss" in page.texts["results"], "the model card has it"


def test_the_timeline_is_a_step_of_the_trace_or_the_seconds_of_metrics(
    plain_run: Path, phase_run: Path
) -> None:
    found = read_step(plain_run / "trace.json")
    assert found is not None
    spans, tracks = found
    assert {"read", "forward", "backward", "optimizer"} <= tracks.keys() and next(
        iter(tracks)
    ) == "read"
    assert len([one for one in spans if one.track == "optimizer"]) == 1, "of one step"
    assert "The step of median length in trace.json" in page_of(plain_run).texts["timeline"]
    assert "the mean of the latest steps" in page_of(phase_run).texts["timeline"]
    given = page_of(phase_run, "--trace", plain_run / "trace.json").texts["timeline"]
    assert "median length" in given and "backward" in given


def test_phases_have_a_row_and_a_mark_each(phase_run: Path) -> None:
    page = page_of(phase_run)
    assert (
        "adapters" in page.texts["summary"]
        and "lora" in page.texts["summary"]
        and "full" in page.texts["summary"]
    )
    assert [one for one in page.all("path") if one.get("class") == "mark"]
    assert "whole" in page.texts["results"]


def test_a_killed_run_and_one_without_anything_beside_its_metrics_have_a_page(
    killed_run: Path, tmp_path: Path
) -> None:
    page = page_of(killed_run)
    assert "stopped" in page.texts[""] and [
        step for step, *_ in page.curve("loss")["training"]
    ] == [1, 2, 3]
    (tmp_path / METRICS).write_text(
        '{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo'
    )
    page = page_of(tmp_path)
    assert (
        "1 points are not finite" in page.texts["curves"] and "no plan.json" in page.texts["memory"]
    )
    assert "The settings of the run are not known" in page.texts["settings"]
    (tmp_path / METRICS).write_text("")
    assert "Nothing was measured" in page_of(tmp_path).texts["curves"]


def spoilt(run: Path, place: Path) -> Path:
    """Copy a run, with markup in whatever of it is shown."""
    shutil.copytree(run, place)
    about = json.loads((place / "plan.json").read_text())
    about["settings"] |= {"model_name_or_path": EVIL, "run_name": EVIL, EVIL: EVIL}
    about["versions"][EVIL] = EVIL
    about["plan"]["machine"]["name"] = EVIL
    about["plan"]["memory"]["device"][EVIL] = 5
    about["given"].append(EVIL)
    (place / "plan.json").write_text(json.dumps(about))
    rows = [{**row, "phase": EVIL, EVIL: 1.0} for row in read_metrics(place / METRICS)]
    rows.insert(0, {"step": 0, "phase": "first", "loss": 9.0})
    (place / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = json.loads((place / "trace.json").read_text())
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["args"]["name"] == "read":
            event["args"]["name"] = EVIL
        elif event["ph"] == "X":
            event["name"] = EVIL
    (place / "trace.json").write_text(json.dumps(trace))
    (place / "README.md").write_text(f"## Results\n\n| | |\n|---|---|\n| {EVIL} | {EVIL} |\n")
    (place / "certificate.json").write_text(
        json.dumps({"bitwise": True, EVIL: {EVIL: [EVIL, 1.5]}})
    )
    (place / "certificate-<b>.md").write_text(f"# {EVIL}\n")
    return place


def test_markup_in_files_is_shown_and_never_run(plain_run: Path, tmp_path: Path) -> None:
    page = page_of(spoilt(plain_run, tmp_path / "run"))
    assert not page.all("img") and not page.all("b0")
    for name in (
        "curves",
        "timeline",
        "memory",
        "results",
        "certificates",
        "settings",
        "environment",
    ):
        assert EVIL in page.texts[name], name
    assert EVIL in page.texts[""], "the name of the run"


def test_a_certificate_shows_its_losses_whether_it_is_bitwise_and_memory(
    plain_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain_run, tmp_path / "run")
    losses = [
        {"step": 1, "streamed": 3.25, "whole": 3.5},
        {"step": 2, "streamed": 2.5, "whole": 2.75},
    ]
    memory = {"streamed": {"before": 7, "peak": 3_000_000_000}, "of": "the process"}
    told = {
        "holds": True,
        "bitwise": False,
        "losses": losses,
        "memory": memory,
        "tolerances": [0.5, 1.5],
    }
    (tmp_path / "run" / "certificate.json").write_text(json.dumps(told))
    text = page_of(tmp_path / "run").texts["certificates"]
    for words in (
        "certificate.json",
        "not bitwise",
        "the promise holds",
        "stepstreamedwhole",
        "13.253.5",
        "22.52.75",
    ):
        assert words in text
    for words in (
        "memory: streamed: peak3.0 GB",
        "memory: streamed: before7 B",
        "memory: ofthe process",
        "0.5, 1.5",
    ):
        assert words in text
    (tmp_path / "run" / "certificate.json").write_text("{cut off")
    assert "{cut off" in page_of(tmp_path / "run").texts["certificates"]


def test_it_is_written_where_it_is_asked_for_and_says_so(
    plain_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert lema("report", plain_run, "--output", tmp_path / "page.html") == 0
    assert f"report: {tmp_path / 'page.html'}" in capfd.readouterr().out
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert_refused(
        capfd,
        3,
        ["this is not a trace", "lema train --trace"],
        "report",
        plain_run,
        "--trace",
        plain_run / METRICS,
    )
    assert_refused(
        capfd, 6, ["page.html"], "report", plain_run, "--output", tmp_path / "not" / "page.html"
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_browser_draws_it_and_runs_nothing_of_the_files(plain_run: Path, tmp_path: Path) -> None:
    found = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
        ),
        None,
    )
    if found is None:
        pytest.skip("no Chromium is installed; the other tests look at the page's elements")
    place = spoilt(plain_run, tmp_path / "run")
    assert lema("report", place) == 0
    off = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
    off += (
        "disable-background-networking",
        "disable-component-update",
        f"user-data-dir={tmp_path / 'profile'}",
    )
    command = [found, *(f"--{one}" for one in off), "--dump-dom", (place / "report.html").as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title = drawn[drawn.index("<title>") + 7 : drawn.index("</title>")]
    assert title.startswith("&lt;script&gt;") and "taken" in title, (
        "the name, and not what it would have set"
    )
    assert drawn.count("<script>") == 1 and "<img" not in drawn and drawn.count("<svg") >= 6
    assert read_run(place).step == 6


def test_a_text_of_a_run_is_neither_markup_nor_a_command_in_the_page() -> None:
    assert escape("<b>\x1b[2J\0 'a'\nb") == "&lt;b&gt;\\x1b[2J\\x00 &#x27;a&#x27;\nb"
