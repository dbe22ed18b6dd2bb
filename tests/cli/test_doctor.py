"""`lema doctor` as a whole: its report, its JSON, its exit codes, and doctors that other
packages bring.
"""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import installed
from rich.console import Console

from lema.backend import Finding, Level
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema_tools.doctor import device as doctor_disk
from lema_tools.doctor.report import Report, examine, show_report

KEYS = {"key", "section", "name", "level", "what", "how", "source", "facts"}
ALWAYS = {
    "versions.lema",
    "versions.python",
    "versions.torch",
    "versions.transformers",
    "versions.peft",
    "versions.accelerate",
    "versions.safetensors",
    "versions.bitsandbytes",
    "versions.torchao",
    "versions.deepspeed",
    "machine.system",
    "machine.processors",
    "machine.memory",
    "machine.huge_pages",
    "machine.locked_memory",
    "machine.open_files",
    "machine.shared_memory",
    "devices.torch",
    "devices.cpu",
    "devices.cuda",
    "cuda.driver",
    "cuda.runtime",
    "neuron.driver",
    "disk.space",
    "disk.direct",
    "disk.hub_cache",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "LARGEST", 1 << 20)


def report_of(*findings: Finding) -> Report:
    return Report(findings, measured=False)


def finding_of(level: Level, name: str = "thing") -> Finding:
    return Finding("part", name, level, "It is so.", "mend it" if level is not Level.OK else "")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(app, ["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_from_end_to_end_says_everything_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = printed(capsys, "--directory", str(tmp_path))
    assert list(report) == ["format", "ready", "measured", "problems", "warnings", "findings"]
    assert (code, report["format"], report["ready"], report["measured"]) == (0, 1, True, True)
    found = {finding["key"]: finding for finding in report["findings"]}
    assert len(found) == len(report["findings"])
    assert ALWAYS | {"link.cpu", "disk.read"} <= set(found)
    for key, finding in found.items():
        assert set(finding) == KEYS
        assert finding["level"] in {"ok", "note", "warning", "problem"}
        assert finding["what"].endswith(".")
        assert " " not in key
        for name, value in finding["facts"].items():
            assert value is None or isinstance(value, str | int | float | bool)
            if "bytes" in name.split("_"):
                assert value is None or (
                    isinstance(value, int | float) and not isinstance(value, bool)
                ), name
    assert found["disk.read"]["facts"]["read_bytes_per_second"] > 0
    assert not list(tmp_path.iterdir())


def test_quick_leaves_out_what_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = printed(capsys, "--quick", "--directory", str(tmp_path))
    keys = {finding["key"] for finding in report["findings"]}
    assert (code, report["measured"]) == (0, False)
    assert keys >= ALWAYS
    assert not keys & {"link.cpu", "disk.read"}


def test_what_is_printed_away_from_a_terminal_has_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["doctor", "--quick", "--directory", str(tmp_path)]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {len(row) for row in rows} == {4}
    assert ["versions", "lema", "ok"] in [row[:3] for row in rows]
    assert rows[-1][0] == "in all"


def test_a_problem_ends_with_the_code_of_a_config_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with installed(tmp_path / "site", monkeypatch, "peft", {}, {}, version="0.4"):
        code, report = printed(capsys, "--quick", "--directory", str(tmp_path))
    assert (code, report["ready"], report["problems"]) == (2, False, 1)
    assert [finding["key"] for finding in report["findings"] if finding["level"] == "problem"] == [
        "versions.peft"
    ]


def test_a_stub_is_a_warning_and_the_machine_is_ready_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"torch_neuronx": "raise ImportError('WRONG PACKAGE')"}
    with installed(tmp_path / "site", monkeypatch, "torch-neuronx", {}, modules):
        code, report = printed(capsys, "--quick", "--directory", str(tmp_path))
    found = {finding["key"]: finding for finding in report["findings"]}
    assert (code, report["ready"]) == (0, True)
    assert found["neuron.torch-neuronx"]["level"] == "warning"
    assert report["warnings"] >= 1


def test_a_directory_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["doctor", "--directory", str(tmp_path / "none")]) == 2
    assert "Traceback" not in capsys.readouterr().err


# Doctors of other packages

DOCTORS = """
from lema.backend import Finding, Level

def good():
    yield Finding("theirs", "thing", Level.NOTE, "It is theirs.", facts={"some_bytes": 5})

def broken():
    yield Finding("broken", "first", Level.OK, "This was fine.")
    raise RuntimeError("no such board")

def strange():
    return [{"level": "ok"}]
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = {
        "absent": "absentdoctors:good",
        "broken": "theirdoctors:broken",
        "good": "theirdoctors:good",
        "strange": "theirdoctors:strange",
    }
    modules = {"theirdoctors": DOCTORS}
    with installed(tmp_path / "site", monkeypatch, "theirs", points, modules, group="lema.doctors"):
        yield


def test_a_doctor_of_another_package_is_asked(theirs: None, tmp_path: Path) -> None:
    found = {finding.key: finding for finding in examine(tmp_path, measure=False).findings}
    assert found["theirs.thing"].facts == {"some_bytes": 5}


def test_a_doctor_that_fails_is_a_finding_and_the_others_are_asked(
    theirs: None, tmp_path: Path
) -> None:
    report = examine(tmp_path, measure=False)
    found = {finding.key: finding for finding in report.findings}
    for name, words in (
        ("absent", "ModuleNotFoundError"),
        ("broken", "no such board"),
        ("strange", "no finding"),
    ):
        finding = found[f"{name}.failed"]
        assert finding.level is Level.WARNING
        assert words in finding.what
    assert {"broken.first", "theirs.thing", "disk.space"} <= set(found)
    assert report.exit_code == 0


def test_a_look_of_our_own_that_fails_is_a_finding_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr("lema_tools.doctor.report.machine", fail)
    found = {finding.key: finding.level for finding in examine(tmp_path, measure=False).findings}
    assert found["machine.failed"] is Level.WARNING
    assert "disk.space" in found


# The report


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([], 0),
        ([Level.OK, Level.NOTE, Level.WARNING], 0),
        ([Level.PROBLEM, Level.OK], 2),
        ([Level.PROBLEM, Level.PROBLEM], 2),
    ],
)
def test_only_problems_count(levels: list[Level], code: int) -> None:
    report = report_of(*map(finding_of, levels))
    assert (report.exit_code, report.ready, report.to_dict()["ready"]) == (
        code,
        code == 0,
        code == 0,
    )


def test_a_terminal_shows_the_level_and_how_to_mend_it() -> None:
    out = io.StringIO()
    console = Console(force_terminal=True, width=100, color_system=None, file=out)
    show_report(report_of(finding_of(Level.OK, "[bold]one"), finding_of(Level.PROBLEM)), console)
    text = out.getvalue()
    assert text.count("part") == 1  # a section is named once
    assert "problem" in text
    assert "fix: mend it" in text
    assert "Not ready: 1 problem." in text


def test_nothing_heavy_is_imported_for_its_help() -> None:
    code = (
        "import sys\nfrom lema.cli.app import app\nfrom lema.cli.exitcodes import run\n"
        "assert run(app, ['doctor', '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'huggingface_hub', 'psutil'}\n"
        "assert not heavy & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
