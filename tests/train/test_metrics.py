"""`metrics.jsonl`: every measurement is read back, whatever a kill or a resume left behind;
numbers for people.
"""

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.config.units import human_bytes, human_count, human_duration
from lema.errors import ConfigError, DataError, DiskError
from lema.train.metrics import MetricsLog, cut_metrics, plot_loss, read_metrics, step_of

ROWS = st.lists(
    st.dictionaries(
        st.text(max_size=8), st.floats() | st.integers() | st.booleans() | st.none(), max_size=5
    )
)


def log(path: Path, *rows: dict[str, Any]) -> None:
    with closing(MetricsLog(path)) as metrics:
        for row in rows:
            metrics.write(row)


def same(one: Any, other: Any) -> bool:
    return one == other or (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    )


@given(ROWS)
def test_what_is_written_is_read_back_and_every_line_is_strict_json(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    log(path, *rows)
    read = read_metrics(path)
    assert len(read) == len(rows)
    for one, other in zip(read, rows, strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[key], other[key]) for key in one)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_each_row_is_on_file_before_the_next_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with closing(MetricsLog(path)) as metrics:
        for step in range(1, 4):
            metrics.write({"step": step, "loss": 1.0 / step})
            assert [row["step"] for row in read_metrics(path)] == list(range(1, step + 1))


def test_tensors_and_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    import numpy
    import torch

    log(
        tmp_path / "m.jsonl",
        {"step": numpy.int64(3), "loss": torch.tensor(0.5), "norms": [numpy.float32("nan")]},
    )
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 3, "loss": 0.5, "norms": ["NaN"]}\n'


def test_what_is_no_number_is_refused_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with closing(MetricsLog(path)) as metrics:
        with pytest.raises(TypeError):
            metrics.write({"step": 1, "loss": object()})
        metrics.write({"step": 2})
    assert read_metrics(path) == [{"step": 2}]


@pytest.mark.parametrize("long", [0, 5000])
def test_a_kill_at_any_byte_loses_only_the_line_being_written(tmp_path: Path, long: int) -> None:
    whole = tmp_path / "whole.jsonl"
    log(whole, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "note": "x" * long})
    data = whole.read_bytes()
    first = data.index(b"\n") + 1
    for cut in [*range(first), *range(first, len(data) + 1, max(1, long // 10))]:
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:cut])
        survivors = data[:cut].count(b"\n")
        assert [row["step"] for row in read_metrics(path)] == [1, 2][:survivors]
        log(path, {"step": 3})
        assert [row["step"] for row in read_metrics(path)] == [*[1, 2][:survivors], 3]


def train(step: int, run: str) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "run": run}


def evaluation(step: int, run: str) -> dict[str, Any]:
    return {"step": step, "eval_loss": 1.0, "run": run}


@pytest.mark.parametrize("line", ["{", "[1]", "3", ""])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert caught.value.where == f"{path}:2"


def test_missing_metrics_are_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the metrics"):
        read_metrics(tmp_path / "none.jsonl")


def test_metrics_that_cannot_be_opened_are_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError) as caught:
        MetricsLog(tmp_path / "file" / "m.jsonl")
    assert str(tmp_path / "file" / "m.jsonl") in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")  # noqa: PTH110
def test_a_full_disk_is_a_disk_error(tmp_path: Path) -> None:
    with (
        closing(MetricsLog(tmp_path / "m.jsonl")) as metrics,
        Path("/dev/full").open("ab+", buffering=0) as full,
    ):
        own = metrics._file
        metrics._file = full
        with pytest.raises(DiskError, match="No space left"):
            metrics.write({"step": 1})
        metrics._file = own


def test_a_device_is_no_place_for_metrics() -> None:
    with pytest.raises(ConfigError, match="full is a device"):
        MetricsLog("/dev/full")


def test_a_disk_that_fills_within_a_line_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log(path, {"step": 1})
    code = (
        "import resource, signal, sys\nfrom contextlib import closing\n"
        "from lema.train.metrics import MetricsLog\nfrom lema.errors import DiskError\n"
        # A limit on file size fails a write in its middle, as a full disk does.
        "signal.signal(signal.SIGXFSZ, "
        "signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))\n"
        "with closing(MetricsLog(sys.argv[1])) as metrics:\n"
        "    try:\n        metrics.write({'step': 2, 'note': 'x' * 40})\n    except "
        "DiskError:\n        pass\n"
        "    else:\n        sys.exit('nothing failed')\n"
        "    metrics.write({'step': 3})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_the_loss_curve_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    png = tmp_path / "loss.png"
    log(
        path,
        train(1, "a"),
        {"step": 2, "loss": math.nan},
        train(3, "a"),
        evaluation(3, "a"),
        {"note": "no step"},
    )
    assert plot_loss(path, png) is True
    whole = path.read_bytes()
    for row in (
        {"step": 3, "loss": [1]},
        {"step": "x", "loss": 1.0},
        {"step": 10**400, "loss": 10**400, "eval_loss": {}},
    ):
        path.write_bytes(whole + json.dumps(row).encode() + b"\n")
        assert plot_loss(path, png) is True
    path.write_bytes(whole)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"m.jsonl", "loss.png"}
    with pytest.raises(DiskError, match="cannot write the loss curve"):
        plot_loss(path, path / "loss.png")


def test_without_a_loss_there_is_no_curve(tmp_path: Path) -> None:
    log(tmp_path / "m.jsonl", {"step": 1, "memory": 5})
    assert plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png") is False
    assert not (tmp_path / "loss.png").exists()


def test_the_curve_lies_where_its_values_are(tmp_path: Path) -> None:
    """Decoded without a library: a loss that falls goes from the upper left to the lower right,
    and the title is written above it."""
    log(tmp_path / "m.jsonl", *(train(step, "a") | {"loss": 9.0 - step} for step in range(1, 9)))
    assert plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png", "my run: loss")
    content = (tmp_path / "loss.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    start = content.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", content[start - 8 : start - 4])
    (crc,) = struct.unpack(">I", content[start + size : start + size + 4])
    assert crc == zlib.crc32(content[start - 4 : start + size])
    rows = np.frombuffer(zlib.decompress(content[start : start + size]), np.uint8)
    pixels = rows.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3).astype(int)
    blue = (pixels[60:, :, 2] - pixels[60:, :, 0]) > 100
    ys, xs = np.nonzero(blue)
    assert ys[xs.argmin()] < height / 4 and ys[xs.argmax()] > height / 2
    assert np.corrcoef(xs, ys)[0, 1] > 0.99
    assert (pixels[12:26] < 100).any()


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.5, "1.0 kB"),
        (1000, "1.0 kB"),
        (1_234_000_000, "1.2 GB"),
        (99_960_000, "100 MB"),
        (999_949_999, "1.0 GB"),
        (123_456_789, "123 MB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes_for_people(count: float, shown: str) -> None:
    assert human_bytes(count) == shown


@given(st.floats(min_value=0, max_value=9e17))
def test_what_people_read_is_within_half_of_the_last_digit(count: float) -> None:
    shown, unit = human_bytes(count).split(" ")
    scale = 1000.0 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert len(shown) <= 4
    assert abs(float(shown) * scale - count) <= max(
        0.5, 0.05 * count / max(count / scale, 1) if "." in shown else 0.5 * scale
    )


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (812, "812"), (3_400, "3.4k"), (12_000_000, "12.0M")]
)
def test_counts_for_people(count: float, shown: str) -> None:
    assert human_count(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (3599.9, "1h 00m"),
        (7620, "2h 07m"),
        (349_200, "4d 01h"),
    ],
)
def test_durations_for_people(seconds: float, shown: str) -> None:
    assert human_duration(seconds) == shown


@pytest.mark.parametrize("row", [{}, {"step": None}, {"step": "3"}, {"step": [3]}, {"step": 2.5}])
def test_a_line_without_a_number_of_a_step_comes_before_all_steps(row: dict[str, Any]) -> None:
    assert step_of(row) == -1 < step_of({"step": 3}) == 3


def test_what_a_run_measures_again_is_cut_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    cut_metrics(path, lambda _: False)
    assert not path.exists()
    log(path, *({"step": step, "loss": 1.0 / step} for step in range(1, 6)))
    with path.open("a") as file:
        file.write("of the user's\n[1]\n" + '{"step": 6, "lo')
    whole = path.read_text()
    place = path.stat().st_ino
    cut_metrics(path, lambda _: True)
    assert (path.read_text(), path.stat().st_ino) == (whole, place)  # nothing was written
    cut_metrics(path, lambda row: row["step"] <= 3)
    assert path.read_text() == "".join(
        line
        for line in whole.splitlines(keepends=True)
        if '"step": 4' not in line and '"step": 5' not in line
    )
    assert [one.name for one in tmp_path.iterdir()] == ["m.jsonl"]
    first = path.read_bytes().index(b"\n") + 1
    cut_metrics(path, lambda _: True, first)  # what comes after so many bytes goes, whatever it is
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]


def test_metrics_that_cannot_be_cut_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    log(path, {"step": 1}, {"step": 2})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="cannot cut the metrics: No space left"):
        cut_metrics(path, lambda row: row["step"] < 2)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["m.jsonl"]
