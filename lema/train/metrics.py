"""The measurements of a run: `metrics.jsonl`, one JSON object per line, and the window of steps
each line covers.

A window holds losses, tokens, and the cost of streaming since the line before.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any

from lema.config import LemaConfig
from lema.errors import ConfigError, DataError, DiskError, DiskFull, unreadable
from lema.lora.files import CONFIG
from lema.storage.atomic import replacing
from lema.storage.diskspace import disk_errors, not_written
from lema.storage.regular import open_appending, open_regular
from lema.stream import StreamCounters
from lema.train.health.signs import Signs
from lema.train.picture import Curve, drawn
from lema.train.steps import StepResult, Steps, added, means

METRICS_NAME = "metrics.jsonl"
PLAN_NAME = "plan.json"
PICTURE = "loss.png"
SAMPLES = "samples.jsonl"

# JSON has no such numbers; the words are those that Python, JavaScript and pandas read back as
# floats.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsLog:
    """Appends one line of JSON per measurement, which is on its way to the disk before `write`
    returns; or `DiskError`. A line that a kill cut short is removed on opening, so the file always
    reads."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a line that could not be written must not be tried again on closing.
            self._file = open_appending(self.path)
            _cut_torn_line(self._file)
        except OSError as error:
            raise DiskError(
                f"cannot open the metrics: {error.strerror}", where=str(self.path)
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row: JSON types and numbers with `.item()` (tensors of one element, numpy
        scalars).
        """
        line = (json.dumps(_plain(row), allow_nan=False) + "\n").encode()
        start = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(start)
            raise not_written(
                f"cannot write the metrics: {error.strerror}", error, self.path
            ) from error

    def note(self, row: Mapping[str, Any]) -> None:
        """Append one row of a run that is worth more than it: on a full disk the row is lost,
        with a warning.
        """
        try:
            self.write(row)
        except DiskFull as error:
            warnings.warn(
                f"{error.what} ({error.where}); this line of step {row.get('step')} is lost",
                stacklevel=2,
            )

    def flush(self) -> None:
        """Have every line on the disk, or raise `OSError`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; twice is harmless."""
        self._file.close()


def step_of(row: Mapping[str, Any]) -> int:
    """Return the step of a line; -1: it has none, or one that is not a number."""
    step = row.get("step")
    return step if isinstance(step, int) else -1


def cut_metrics(
    path: str | PathLike[str], keep: Callable[[Mapping[str, Any]], bool], size: int | None = None
) -> None:
    """Drop the rows that a run which goes on from an earlier step measures again. A kill leaves
    all, and so does `DiskError`. Of the first `size` bytes (None: of all) `keep` says which rows
    stay; what is no JSON object does."""
    file = Path(path)
    try:
        if not file.is_file():
            return
        with open_regular(file, inside=True) as opened:
            data = opened.read()
        lines = data[:size].splitlines(keepends=True)
        retained = b"".join(line for line in lines if (row := _row(line)) is None or keep(row))
        if len(retained) < len(data):
            with replacing(file) as out:
                out.write(retained)
    except OSError as error:
        raise not_written(f"cannot cut the metrics: {error.strerror}", error, file) from error


def check_unused(config: LemaConfig, ended: Sequence[str] = ("train_loss",)) -> None:
    """Refuse, with `ConfigError`, an `output_dir` with an adapter, or with metrics of which a line
    has one of the names in `ended`, unless they may be replaced by a run that begins."""
    directory = Path(config.output_dir)
    contents = ""
    if (directory / CONFIG).is_file():
        contents = "an adapter"
    elif (file := directory / METRICS_NAME).is_file():
        with disk_errors(file), open_regular(file, inside=True) as lines:
            rows = (row for line in lines if (row := _row(line)) is not None)
            contents = (
                "the metrics of another run"
                if any(name in row for row in rows for name in ended)
                else ""
            )
    if contents and not config.overwrite_output_dir:
        what = f"the output directory holds {contents}, which this run would replace"
        how = "choose another output_dir, or set overwrite_output_dir: true"
        raise ConfigError(what, where=str(directory), how=how)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None: it has none."""
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows, in order, but for one that is still being written; or raise `DataError`."""
    rows: list[dict[str, Any]] = []
    file = Path(path)
    try:
        with open_regular(file, inside=True) as opened:
            text = opened.read().decode("utf-8")
    except OSError as error:
        raise unreadable(
            file, error, DataError, f"cannot read the metrics: {error.strerror}"
        ) from error
    lines = text.split("\n")
    # Whatever follows the last newline is a line still being written.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=f"{file}:{number}") from error
        if not isinstance(row, dict):
            raise DataError("a line of metrics is a JSON object", where=f"{file}:{number}")
        rows.append(
            {
                key: _NON_FINITE.get(cell, cell) if isinstance(cell, str) else cell
                for key, cell in row.items()
            }
        )
    return rows


def _drawn(value: Any) -> bool:
    """Whether a picture can hold this: a number, or one that is not finite and leaves a gap."""
    return type(value) in (int, float) and not 1e100 < abs(value) < math.inf


def plot_loss(
    metrics_file: str | PathLike[str], png: str | PathLike[str], title: str = "loss"
) -> bool:
    """Draw training and evaluation loss over steps; False where no loss was measured."""
    # What is no number is left out, because a run that has ended is worth more than its picture.
    rows = [row for row in read_metrics(metrics_file) if _drawn(row.get("step"))]
    curves = []
    for key, name, colour in (
        ("loss", "training", (31, 119, 180)),
        ("eval_loss", "evaluation", (230, 110, 20)),
    ):
        points = [(row["step"], float(row[key])) for row in rows if _drawn(row.get(key))]
        if any(math.isfinite(value) for _, value in points):
            curves.append(Curve(name, points, colour, dots=key == "eval_loss"))
    if not curves:
        return False
    boundaries = [
        row["step"] for row in rows if row.get("event") == "phase_end" and row is not rows[-1]
    ]
    try:
        with replacing(Path(png)) as out:
            out.write(drawn(title, curves, boundaries))
    except OSError as error:
        raise DiskError(f"cannot write the loss curve: {error.strerror}", where=str(png)) from error
    return True


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return next(
            word for word, number in _NON_FINITE.items() if number == value or value != value
        )
    return value


def _cut_torn_line(file: FileIO) -> None:
    """Cut what follows the last newline; searches backwards, for the file may be long."""
    end = file.seek(0, os.SEEK_END)
    newline = -1
    position = end
    while position and newline < 0:
        start = max(0, position - 4096)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        position = start + newline + 1
    if position < end:
        file.truncate(position)


NO_SUMS: Sequence[Any] = (0.0, 0, {}, 0, 0.0)  # of a window that nothing was counted in


@dataclass
class Window:
    """What happened since `began`: between two lines of metrics, or over the whole run."""

    began: float
    counters: StreamCounters
    loss: float = 0.0  # the sum over its trained tokens
    trained_tokens: int = 0
    tokens: int = 0
    optimizer: float = 0.0  # the seconds of its steps
    # by an objective: sums, and of how many
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def sums(self) -> list[Any]:
        """What the means of its line are made of, as JSON types."""
        return [
            self.loss,
            self.trained_tokens,
            self.measured,
            self.tokens,
            time.perf_counter() - self.began,
        ]

    def count(self, result: StepResult) -> None:
        """Count a step that was taken."""
        self.loss += result.loss * result.trained_tokens
        self.trained_tokens += result.trained_tokens
        self.tokens += result.tokens
        self.measured = added(self.measured, result.measured)

    def time_optimizer(self) -> None:
        """Begin or end to count the seconds of the optimizer's step: between the two calls, what
        is there is when it was 0.
        """
        self.optimizer = time.perf_counter() - self.optimizer

    def go_on(self, sums: Sequence[Any]) -> None:
        """Take up the `sums` of a window that ended early."""
        self.loss, self.trained_tokens, measured, self.tokens, seconds = (
            *sums,
            *NO_SUMS[len(sums) :],
        )
        self.measured = {name: (pair[0], pair[1]) for name, pair in measured.items()}
        self.began -= seconds


def since(then: StreamCounters, now: StreamCounters) -> dict[str, float]:
    """Return what streaming cost between two looks at its counters: bytes, layers, and seconds
    of waiting.
    """
    names = (
        counter.name
        for counter in fields(now)
        if counter.name.startswith(("bytes_", "layers_", "seconds_"))
    )
    return {name: getattr(now, name) - getattr(then, name) for name in names}


class StageMetrics:
    """What is measured of one thing that trains: since the last line, and since it began.

    Args:
        steps: what trains.
        carried: what was measured before a checkpoint, its `carried` then.

    Attributes:
        signs: that nothing is learnt.
    """

    def __init__(self, steps: Steps, carried: Mapping[str, Any]) -> None:
        self._model = steps.model
        self._window = self._opened()
        self._window.go_on(carried.get("window", NO_SUMS))
        self._total = self._opened()
        self._total.go_on(carried.get("whole", NO_SUMS))
        vocabulary = getattr(steps.model.split.model.config.get_text_config(), "vocab_size", None)
        self.signs = Signs(steps.config, vocabulary)
        self.signs.go_on(carried.get("signs"))

    @property
    def carried(self) -> dict[str, Any]:
        """What a checkpoint keeps: the sums of the steps since the last line (`window`) and of all
        since the run began (`whole`), and the `signs` that nothing is learnt."""
        return {
            "window": self._window.sums,
            "whole": self._total.sums,
            "signs": self.signs.state,
        }

    def count(self, result: StepResult) -> None:
        """Count a step that was taken."""
        for window in (self._window, self._total):
            window.count(result)

    def time_optimizer(self) -> None:
        """Begin or end to count the seconds of the optimizer's step."""
        self._window.time_optimizer()

    def line(self, numbers: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the mean loss since the last line, with the `numbers` of the last step; None: no
        step was taken.
        """
        window = self._window
        if not window.trained_tokens:
            return None
        seconds = time.perf_counter() - window.began
        return {
            "loss": window.loss / window.trained_tokens,
            **means(window.measured),
            **numbers,
            **({"dead_steps": self.signs.steps} if self.signs.steps else {}),
            "num_tokens": self._total.tokens,
            "tokens_per_second": window.tokens / seconds,
            "seconds_passed": seconds,
            "seconds_optimizer": window.optimizer,
            **since(window.counters, self._model.counters),
            "memory": self._model.backend.memory().used,
        }

    def begin_line(self) -> None:
        """Count from here on for the next line."""
        self._window = self._opened()

    def summary(self) -> dict[str, Any]:
        """Return loss and speed over all steps; nothing, where none was taken."""
        total = self._total
        if not total.trained_tokens:
            return {}
        seconds = time.perf_counter() - total.began
        return {
            "train_loss": total.loss / total.trained_tokens,
            "train_runtime": seconds,
            "train_tokens_per_second": total.tokens / seconds,
        }

    def _opened(self) -> Window:
        return Window(time.perf_counter(), self._model.counters)
