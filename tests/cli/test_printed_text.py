"""What a command prints is text, and a reader who goes away ends the printing, not the work."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from clirun import config_writer, lema

from lema.cli.streams import TextStream, text_streams

EVIL = "a\x1b]0;owned\x07b\x9bc\u202ed\u2066e\u2029f"
SHOWN = r"a\x1b]0;owned\x07b\x9bc\u202ed\u2066e\u2029f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_text_is_written_and_on_a_terminal_what_draws() -> None:
    for stream in (io.StringIO(), Terminal()):
        TextStream(stream).write(EVIL + "\n\t\r")
        assert stream.getvalue() == SHOWN + "\n\t\r"
    coloured = "\x1b[31mred\x1b[0m\x1b[2K\x1b[1A\x1b[?25l"
    terminal = Terminal()
    file = io.StringIO()
    TextStream(terminal).write(coloured)
    TextStream(file).write(coloured)
    assert terminal.getvalue() == coloured
    assert "\x1b" not in file.getvalue()


def test_what_the_encoding_lacks_is_written_out() -> None:
    raw = io.BytesIO()
    stream = TextStream(io.TextIOWrapper(raw, encoding="latin-1"))
    stream.write("ä█\udc80")
    stream.flush()
    assert raw.getvalue() == b"\xe4" + rb"\u2588\udc80"


@pytest.mark.filterwarnings("default")
def test_libraries_log_and_warn_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = logging.getLogger("a library")
    form = warnings.formatwarning
    with text_streams():
        handler = logging.StreamHandler(sys.stderr)
        logger.addHandler(handler)
        logger.warning("of %s", f"\x1b[31m{EVIL}")
        sys.stderr.write(
            warnings.formatwarning(UserWarning(f"\x1b[31m{EVIL}"), UserWarning, "file", 1)
        )
        logger.removeHandler(handler)
    assert sys.stderr is terminal and warnings.formatwarning is form
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().count(rf"\x1b[31m{SHOWN}") == 2


@pytest.fixture
def config(llama: Path, tmp_path: Path) -> Path:
    return config_writer(llama, tmp_path)(max_steps=6, save_steps=2)


@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_under_what_is_printed_is_said(both: bool) -> None:
    with Path("/dev/full").open("w") as disk:
        process = start("config", "schema", stdout=disk, stderr=disk if both else subprocess.PIPE)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 6
    assert both or b"could not be written" in told


def start(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "lema", *map(str, words)], **options)


def whole(out: Path) -> bool:
    return (out / "adapter_model.safetensors").is_file() and (out / "checkpoint-6").is_dir()


def test_a_run_goes_on_when_its_reader_has_gone(config: Path, tmp_path: Path) -> None:
    ends = os.pipe()
    os.close(ends[0])
    with start("train", config, stdout=ends[1], stderr=subprocess.PIPE) as run:
        os.close(ends[1])
        assert run.stderr is not None
        assert run.stderr.read() == b""
    assert run.returncode == 0
    assert whole(tmp_path / "out")


def test_a_run_goes_on_when_the_disk_of_its_log_is_full(config: Path, tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        start("train", config, stdout=full, stderr=full) as run,
    ):
        assert run.wait() == 0
    assert whole(tmp_path / "out")


def test_what_is_lost_of_a_table_is_an_error(tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        start("backends", stdout=full, stderr=subprocess.PIPE) as run,
    ):
        assert run.stderr is not None
        assert run.stderr.read().startswith(b"error: what was printed could not be written")
    assert run.returncode == 6


@pytest.mark.parametrize("words", [["backends"], ["config", "show"], ["--help"]])
def test_a_reader_who_has_read_enough_is_no_error(words: list[str], config: Path) -> None:
    ends = os.pipe()
    os.close(ends[0])
    given = [*words, *([config] if words == ["config", "show"] else [])]
    with start(*given, stdout=ends[1], stderr=subprocess.PIPE) as run:
        os.close(ends[1])
        assert run.stderr is not None
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_a_run_goes_on_without_its_terminal(llama: Path, tmp_path: Path) -> None:
    config = config_writer(llama, tmp_path)(max_steps=6, save_steps=2)
    out = tmp_path / "out"
    with start("train", config, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not (out / "metrics.jsonl").exists():
            time.sleep(0.01)
        run.send_signal(signal.SIGHUP)
        assert run.wait() == 0
    assert whole(out)


def test_a_table_is_printed_in_any_locale(config: Path, capfd: Any) -> None:
    with start(
        "data", config, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "latin-1"}
    ) as run:
        assert run.stdout is not None
        assert rb"\u2588" in run.stdout.read()
    assert run.returncode == 0
    assert lema("data", config) == 0
    assert "\u2588" in capfd.readouterr().out
