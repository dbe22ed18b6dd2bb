"""A trace: what happened when, in a form that Perfetto draws; it changes nothing, and off it
costs nothing.
"""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, assert_same_adapter, config_writer, lema
from smallrun import NUM_LAYERS, write_model

from lema.backend.trace import NO_TRACE, Trace, tracing
from lema.errors import DiskError
from lema.stream.schedule import fetched, training_order
from lema.train.metrics import read_metrics

STEPS = 2
MICRO_BATCHES = 2


class Clock:
    """A clock that goes on by one second whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def by_row(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield each row's spans, the earlier and then the longer first."""
    spans = [event for event in events if event["ph"] == "X"]
    for _, row in itertools.groupby(
        sorted(spans, key=lambda span: (span["tid"], span["ts"], -span["dur"])),
        key=lambda span: span["tid"],
    ):
        yield list(row)


def assert_nested(row: list[dict[str, Any]]) -> None:
    """Every span of a row lies within another or beside it, as calls do."""
    around: list[float] = []  # ends of the spans that are open
    for span in row:
        end = span["ts"] + span["dur"]
        while around and around[-1] <= span["ts"]:
            around.pop()
        assert not around or end <= around[-1]
        around.append(end)


# A trace by itself


def test_spans_have_a_place_in_time() -> None:
    trace = Trace(Clock())  # begins at 1
    with trace.span("forward", "layer 3", nbytes=7), trace.span("forward", "half"):  # 2 and 3
        pass  # they end at 4 and 5
    half, layer = trace.events
    assert (half["name"], half["ts"], half["dur"], half["tid"]) == ("half", 2e6, 1e6, 0)
    assert layer == {
        "name": "layer 3",
        "cat": "forward",
        "ph": "X",
        "ts": 1e6,
        "dur": 3e6,
        "pid": 0,
        "tid": 0,
        "args": {"nbytes": 7},
    }


def test_a_span_that_ends_with_an_error_is_recorded() -> None:
    trace = Trace(Clock())
    with pytest.raises(ZeroDivisionError), trace.span("read", "layer 0"):
        raise ZeroDivisionError
    assert [event["name"] for event in trace.events] == ["layer 0"]


def test_each_track_and_each_thread_of_it_has_a_row(tmp_path: Path) -> None:
    trace = Trace()
    together = threading.Barrier(3)

    def read(name: str) -> None:
        with trace.span("read", name):
            together.wait()

    threads = [threading.Thread(target=read, args=(f"layer {number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with trace.span("forward", "layer 0"):
        pass
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["forward", "read", "read 2", "read 3"]
    assert len({event["tid"] for event in events if event.get("cat") == "read"}) == 3
    assert [names[event["tid"]] for event in events if event.get("cat") == "forward"] == ["forward"]


def test_of_a_long_run_the_latest_events_are_kept() -> None:
    trace = Trace(Clock(), most=3)
    for number in range(10):
        with trace.span("forward", str(number)):
            pass
    assert [event["name"] for event in trace.events] == ["7", "8", "9"]


def test_a_trace_that_is_off_records_nothing_and_makes_nothing(tmp_path: Path) -> None:
    with tracing(None) as trace:
        assert trace is NO_TRACE
        assert trace.span("read", "layer 0") is trace.span("forward", "layer 1")
        # the one may be entered again
        with (
            trace.span("read", "layer 0"),
            trace.span("read", "layer 0"),
        ):
            pass
    assert not hasattr(trace, "events") and not list(tmp_path.iterdir())


def test_a_trace_is_written_however_its_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "new" / "trace.json"
    with pytest.raises(ZeroDivisionError), tracing(file) as trace:
        # the place is tried before anything is done
        assert json.loads(file.read_text())["traceEvents"] == []
        with trace.span("forward", "half"):
            raise ZeroDivisionError
    assert [event["name"] for event in json.loads(file.read_text())["traceEvents"]] == [
        "thread_name",
        "half",
    ]
    assert [path.name for path in file.parent.iterdir()] == ["trace.json"]


def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DiskError, match="cannot write the trace") as caught,
        tracing(tmp_path / "file" / "trace.json"),
    ):
        pytest.fail("the work began")
    assert caught.value.where == str(tmp_path / "file" / "trace.json")


# A trace of training


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def run(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twice, without a trace and with one."""
    directory = tmp_path_factory.mktemp("run")
    write = config_writer(llama, directory)
    options = {
        "max_steps": STEPS,
        "batch_size": 4,
        "micro_batch_size": 4 // MICRO_BATCHES,
        "logging_steps": 1,
    }
    assert lema("train", write(**options, output_dir=str(directory / "plain"))) == 0
    traced = write(**options, output_dir=str(directory / "traced"))
    assert lema("train", traced, "--trace", directory / "trace.json") == 0
    return directory


@pytest.fixture(scope="module")
def events(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "trace.json").read_text())["traceEvents"]
    return found


@pytest.mark.slow
def test_a_trace_changes_no_number(run: Path) -> None:
    assert_same_adapter(run / "plain", run / "traced")
    losses = [
        [
            (row["loss"], row["layers_read"])
            for row in read_metrics(run / name / "metrics.jsonl")
            if "loss" in row
        ]
        for name in ("plain", "traced")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def test_every_layer_is_read_uploaded_and_computed(events: list[dict[str, Any]]) -> None:
    counted = {
        track: Counter(event["name"] for event in events if event.get("cat") == track)
        for track in ("read", "upload", "forward", "backward", "optimizer", "stall: upload")
    }
    top = f"layer {NUM_LAYERS - 1}"
    layers = [f"layer {number}" for number in range(NUM_LAYERS)]
    passes = dict.fromkeys(layers, STEPS)
    # Where the pass turns, each micro-batch goes up and down by itself, through the head.
    at_the_turn = {top: STEPS * MICRO_BATCHES}
    assert counted["forward"] == {**passes, **at_the_turn, "head and loss": STEPS * MICRO_BATCHES}
    assert counted["backward"] == {**passes, **at_the_turn}
    assert counted["optimizer"] == {f"step {step + 1}": 1 for step in range(STEPS)}
    uploaded = Counter(f"layer {layer}" for layer in fetched(training_order(NUM_LAYERS) * STEPS, 3))
    assert counted["upload"] == uploaded
    assert {
        name: count for name, count in counted["read"].items() if name in passes
    }.keys() == uploaded.keys()
    assert counted["stall: upload"].total() == STEPS * (2 * NUM_LAYERS - 1)


def test_the_spans_of_a_row_are_nested(events: list[dict[str, Any]]) -> None:
    rows = list(by_row(events))
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {row[0]["tid"] for row in rows} == set(names)
    assert len(set(names.values())) == len(names)
    for row in rows:
        assert_nested(row)
        assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in row)


def test_computing_and_waiting_exclude_each_other(events: list[dict[str, Any]]) -> None:
    """The training thread does one thing at a time, so its rows laid over each other are still
    calls.
    """
    alone = {"forward", "backward", "optimizer", "stall: disk", "stall: upload", "upload"}
    spans = [event for event in events if event.get("cat") in alone]
    (together,) = by_row([{**span, "tid": 0} for span in spans])
    assert_nested(together)


def test_a_trace_that_cannot_be_written_stops_training_before_it_begins(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = config_writer(llama, tmp_path)()
    assert_refused(
        capfd, 6, ["trace.json"], "train", config, "--trace", tmp_path / "file" / "trace.json"
    )
    assert not (tmp_path / "out").exists()
