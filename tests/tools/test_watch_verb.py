"""`lema watch`: what it shows is what metrics.jsonl says, of runs of every kind and in every
state.
"""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, lema

from lema.config.units import MEMORY_PARTS, human_bytes
from lema.errors import DataError
from lema.train.metrics import read_metrics
from lema_tools.rundir import METRICS, MetricsTail, Run, read_run
from lema_tools.watch import curve, picture

DOTS = re.compile("[\u2800-\u28ff]")


def shown(directory: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what is printed, its lines as one: where they break is the width's."""
    capfd.readouterr()
    assert lema("watch", directory, *words) == 0
    return " ".join(capfd.readouterr().out.split())


def copied(run: Path, place: Path) -> Path:
    shutil.copytree(run, place)
    return place


def running(directory: Path) -> None:
    """Have the run's lock be that of a process that lives: this one."""
    (directory / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")


def test_numbers_are_those_of_the_last_lines_of_metrics(
    plain_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = shown(plain_run, capfd)
    rows = read_metrics(plain_run / METRICS)
    last = [row for row in rows if "loss" in row][-1]
    evaluated = [row for row in rows if "eval_loss" in row][-1]
    assert "ended" in told and "step 6/6" in told and "100%" in told
    for number in (
        f"{last['loss']:.4f}",
        f"{last['learning_rate']:.2e}",
        f"{evaluated['eval_loss']:.4f}",
    ):
        assert number in told
    assert human_bytes(last["bytes_read"]) in told and human_bytes(last["bytes_uploaded"]) in told
    assert "checkpoint-3, checkpoint-6" in told and DOTS.search(told)


def test_a_run_of_phases_has_the_steps_of_all_and_the_memory_of_the_last(
    phase_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = shown(phase_run, capfd, "--once")
    run = read_run(phase_run)
    plan = json.loads((phase_run / "plan.json").read_text())["plan"]["phases"]
    assert "ended" in told and "step 4/4" in told and "phase adapters" in told
    assert [name for name, _ in run.phases] == ["whole", "adapters"]
    assert "adapters/checkpoint-2" in told and "whole/checkpoint-2" in told
    parts = plan[1]["memory"]["parts"]["device"]
    (memory,) = run.memories
    assert memory.parts["adapters"] == parts["adapters"] and memory.parts["slots"] == parts["slots"]


def test_memory_is_the_plan_of_the_run_against_the_most_that_was_measured(plain_run: Path) -> None:
    (memory,) = read_run(plain_run).memories  # on this device, that of the host is the device's
    about = json.loads((plain_run / "plan.json").read_text())
    rows = read_metrics(plain_run / METRICS)
    planned = about["plan"]["memory"]
    device = planned["device"]
    host = planned["host"]
    assert memory.measured == max(row["memory"] for row in rows if "memory" in row)
    beside = sum(host.values()) - min(host["ring"], device["slots"])  # one memory serves as both
    assert memory.planned == about["used"] + sum(device.values()) + beside
    assert device["working"] and memory.parts["working"] == device["working"]
    assert about["steps"] == 6 and set(about["given"]) > {"device_memory", "max_steps"}


def test_every_part_of_a_plan_has_words(plain_run: Path, phase_run: Path) -> None:
    planned = json.loads((plain_run / "plan.json").read_text())["plan"]["memory"]
    phases = json.loads((phase_run / "plan.json").read_text())["plan"]["phases"]
    for parts in (planned, *(phase["memory"]["parts"] for phase in phases)):
        assert {*parts["device"], *parts["host"], *parts["disk"]} <= MEMORY_PARTS.keys()


def test_a_look_at_a_run_imports_no_torch() -> None:
    code = "import sys, lema_tools.watch, lema_tools.report; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True
        ).stdout
        == "False\n"
    )


def test_the_seconds_of_a_step_are_whole(plain_run: Path) -> None:
    rows = [row for row in read_metrics(plain_run / METRICS) if "loss" in row]
    found = read_run(plain_run).seconds
    assert [step for step, _, _ in found] == [row["step"] for row in rows]
    for row, (_, count, parts) in zip(rows, found, strict=True):
        assert count == 1 and sum(parts.values()) == pytest.approx(row["seconds_passed"])
        assert parts["optimizer"] == row["seconds_optimizer"] > 0
        assert parts["waiting for the disk"] == row["seconds_blocked_disk"]


def test_a_line_that_is_cut_off_is_passed_over_and_a_killed_run_has_stopped(
    killed_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = shown(killed_run, capfd)
    assert (killed_run / ".lock").is_file(), "the kill has left its lock's file"
    assert "stopped" in told and "step 3/6" in told and "none yet" in told and " left" not in told
    assert len(read_run(killed_run).trained) == 3


def test_a_run_that_goes_on_says_how_long_it_takes_still(
    plain_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = copied(plain_run, tmp_path / "run")
    lines = (place / METRICS).read_text().splitlines(keepends=True)
    (place / METRICS).write_text("".join(lines[:2]))
    running(place)
    told = shown(place, capfd)
    run = read_run(place)
    assert f"running (process {os.getpid()})" in told and "step 2/6" in told and " left" in told
    seconds = [json.loads(line)["seconds_passed"] for line in lines[:2]]
    assert run.seconds_left == pytest.approx(4 * sum(seconds) / 2)


def test_the_tail_reads_what_is_new_and_begins_again_where_the_file_was_cut_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / METRICS
    tail = MetricsTail(file)
    lines = [json.dumps({"step": step, "loss": step / 2}) + "\n" for step in range(1, 9)]
    file.write_text("".join(lines[:3]) + lines[3][:5])
    assert [row["step"] for row in tail.rows()] == [1, 2, 3]
    with file.open("a") as out:
        out.write(lines[3][5:] + lines[4])
    assert [row["step"] for row in tail.rows()] == [1, 2, 3, 4, 5]
    (tmp_path / "new").write_text("".join(lines[:2]))
    (tmp_path / "new").replace(file)  # as resuming does
    assert [row["step"] for row in tail.rows()] == [1, 2]
    file.write_text("".join([lines[0], *lines[4:8]]))  # longer than what was read, and another
    assert [row["step"] for row in tail.rows()] == [1, 5, 6, 7, 8]
    file.write_text(lines[0] + "no JSON\n")
    with pytest.raises(DataError, match="not JSON") as error:
        tail.rows()
    assert error.value.where == f"{file}:2"


def test_what_is_not_finite_is_read_and_leaves_a_gap(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = [3.0, "NaN", 2.0, "Infinity"]
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = shown(tmp_path, capfd)
    assert "inf" in told and "3 " in told and DOTS.search(told)


def test_a_curve_begins_at_the_first_value_and_ends_at_the_last() -> None:
    lines = curve([(step, -float(step)) for step in range(50)], 20, 4)
    assert len(lines) == 4 and {len(line) for line in lines} == {20}
    assert (
        lines[0][0] != "\u2800"
        and lines[-1][-1] != "\u2800"
        and lines[-1][0] == lines[0][-1] == "\u2800"
    )
    assert curve([(1, float("nan"))], 20, 4) == []


def _no_metrics(place: Path) -> tuple[Path, list[str]]:
    return place, ["metrics.jsonl is missing", "output_dir"]


def _nowhere(place: Path) -> tuple[Path, list[str]]:
    return place / "not", ["no such directory", str(place / "not")]


def _a_phase(place: Path) -> tuple[Path, list[str]]:
    (place / METRICS).write_text("")
    (place / "whole").mkdir()
    return place / "whole", ["metrics.jsonl is missing", f"the run in {place}"]


def _a_file(place: Path) -> tuple[Path, list[str]]:
    (place / "file").write_text("")
    return place / "file", ["this is a file"]


@pytest.mark.parametrize("given", [_no_metrics, _nowhere, _a_phase, _a_file])
@pytest.mark.parametrize("verb", ["watch", "report"])
def test_a_wrong_directory_is_refused_by_name(
    verb: str,
    given: Callable[[Path], tuple[Path, list[str]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    directory, words = given(tmp_path)
    assert_refused(capfd, 2, words, verb, directory)


def test_a_run_without_a_step_or_a_plan_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS).write_text("")
    assert "No step has been logged yet" in shown(tmp_path, capfd)


def test_what_comes_from_files_is_no_markup(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {"step": 1, "loss": 2.0, "phase": "[red]whole[/red]", "learning_rate": "[/]"}
    (tmp_path / METRICS).write_text(json.dumps(row) + "\n")
    assert "[red]whole[/red]" in shown(tmp_path, capfd)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"step": "1", "loss": 1.0}, "step should be a number of steps, not '1'"),
        ({"step": 10**30}, "step should be a number of steps"),
        ({"step": 1, "phase": ["a"]}, "a phase has a name"),
        ({"phase": "a"}, "its line a step"),
        ([1], "a line of metrics is a JSON object"),
    ],
)
@pytest.mark.parametrize("verb", ["watch", "report"])
def test_a_line_that_no_run_has_written_is_named(
    verb: str, row: Any, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0}\n' + json.dumps(row) + "\n")
    assert_refused(capfd, 3, [said, f"{METRICS}:2"], verb, tmp_path)


def test_a_plan_that_no_run_has_written_is_named(
    plain_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = copied(plain_run, tmp_path / "run")
    about = json.loads((place / "plan.json").read_text())
    about["plan"]["memory"]["device"]["slots"] = {"a": 1}
    (place / "plan.json").write_text(json.dumps(about))
    assert_refused(capfd, 3, ["plan.memory.", "plan.json", "delete it"], "watch", place)


def test_numbers_that_nobody_could_draw_and_commands_to_a_terminal_are_shown_as_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {
        "loss": 1e308,
        "seconds_passed": 1e300,
        "memory": -1,
        "bytes_read": "x",
        "train_runtime": [1],
    }
    rows = [
        {"step": 1, "phase": "\x1b[2J\ud800", **row},
        {"step": 2, "phase": "b", **row, "loss": -1e308},
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / ".lock").write_text("1 \x1b]0;host\x07\n")
    assert "\x1b" not in shown(tmp_path, capfd)
    assert lema("report", tmp_path) == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_a_key_leaves_a_run_that_goes_on(key: bytes, plain_run: Path, tmp_path: Path) -> None:
    place = copied(plain_run, tmp_path / "run")
    running(place)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lema", "watch", str(place)]
    streams: dict[str, Any] = {
        "stdin": theirs,
        "stdout": theirs,
        "stderr": theirs,
        "start_new_session": True,
    }
    code = (
        "import fcntl,termios,sys,os; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with subprocess.Popen([sys.executable, "-c", code, *command], **streams) as process:
        os.close(theirs)
        seen = b""
        while b"q leaves" not in seen:  # only then is it sure that the key is looked for
            seen += os.read(ours, 4096)
        os.write(ours, key)
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(ours, 4096):
                pass
        assert process.wait() == 0
    os.close(ours)


def test_the_picture_is_drawn_in_any_width(plain_run: Path) -> None:
    from rich.console import Console

    run: Run = read_run(plain_run)
    for width in (24, 60, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(picture(run, width))
        assert max(map(len, console.export_text().splitlines())) <= width
