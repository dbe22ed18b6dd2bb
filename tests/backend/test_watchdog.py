"""A run in which nothing moves says so once, with what it waits for and every thread's stack; a
slow one does not.
"""

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from smallrun import adapter_of, batch, opened, run_fit, same, settings, token_rows, write_model

from lema.backend.watchdog import AT_FIRST, AT_LEAST, EXIT, INTERVAL, Watchdog, write_stacks
from lema.stream import reader
from lema.train import LemaTrainer
from lema.train.health.watchdog import awaited, moves, watched


class Fake:
    """A run whose moves, and whose time, are what a test says."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.now = 1000.0
        self.layers = 0
        self.bytes = 0
        self.ended: list[int] = []
        self.directory = directory
        self.dog = Watchdog(
            lambda: (self.layers, self.bytes),
            lambda: "in the forward of layer 3",
            directory,
            clock=lambda: self.now,
            end=self.ended.append,
            **options,
        )

    def go(self, seconds: float, *, every: float | None = None) -> None:
        """Let time go by, one layer moving every so many seconds."""
        begun = self.now
        done = 0
        while self.now < begun + seconds:
            self.now += INTERVAL
            if every is not None and (count := int((self.now - begun) / every)) > done:
                self.layers = self.layers + count - done
                done = count
            self.dog.poll()

    @property
    def files(self) -> list[Path]:
        return sorted(self.directory.glob("stacks-*.txt"))


@pytest.fixture
def run(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_before_a_layer_is_known_it_is_patient(
    run: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    run.go(AT_FIRST - INTERVAL)
    assert not run.files
    run.go(INTERVAL)
    assert len(run.files) == 1
    said = capfd.readouterr().err
    assert (
        f"nothing has moved for {AT_FIRST:.0f} seconds\n  where: in the forward of layer 3" in said
    )
    assert "test_before_a_layer_is_known_it_is_patient" in said  # of this thread's stack
    assert str(run.files[0]) in said
    text = run.files[0].read_text()
    assert (
        "in the forward of layer 3" in text and "test_before_a_layer_is_known_it_is_patient" in text
    )


@pytest.mark.parametrize(("seconds", "limit"), [(0.5, AT_LEAST), (10.0, 100.0), (60.0, 600.0)])
def test_ten_times_as_long_as_a_layer_takes_is_too_long(
    run: Fake, seconds: float, limit: float
) -> None:
    run.go(1200, every=seconds)
    assert not run.files and run.dog.limit == pytest.approx(limit, rel=0.1)
    run.go(run.dog.limit - INTERVAL)
    assert not run.files
    run.go(3 * INTERVAL)
    assert len(run.files) == 1


def test_a_stall_is_told_once_and_the_next_one_again(
    run: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    run.go(100, every=1.0)
    run.go(1000)
    assert capfd.readouterr().err.count("nothing has moved") == 1
    run.go(20, every=1.0)
    run.go(1000)
    assert capfd.readouterr().err.count("nothing has moved") == 1


def test_bytes_that_arrive_are_a_move_while_a_layer_is_awaited(run: Fake) -> None:
    run.go(100, every=1.0)
    for _ in range(200):
        run.bytes += 1
        run.go(INTERVAL)
    assert not run.files


def test_a_checkpoint_is_given_more_time_than_a_layer(
    run: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    run.go(100, every=1.0)
    with run.dog.patient("saving a checkpoint"):
        run.go(AT_FIRST - INTERVAL)
        assert not run.files
        run.go(INTERVAL)
    assert len(run.files) == 1
    assert "where: saving a checkpoint, in the forward" in capfd.readouterr().err
    run.go(AT_LEAST - INTERVAL)
    assert len(run.files) == 1


def test_a_process_that_was_stopped_as_a_whole_is_not_at_fault(tmp_path: Path) -> None:
    run = Fake(tmp_path, end_after=60.0)
    run.go(100, every=1.0)
    run.now += 3600
    run.dog.poll()
    assert not run.files and not run.ended
    run.go(60.0)
    assert run.files and run.ended == [EXIT]


def test_it_ends_the_process_where_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Fake(tmp_path, end_after=200.0)
    run.go(100, every=1.0)
    run.go(195)
    assert not run.ended and capfd.readouterr().err.count("nothing has moved") == 1
    run.go(INTERVAL)
    assert run.ended == [EXIT]
    assert "the process ends (hang_timeout)" in capfd.readouterr().err


def test_stacks_are_told_where_no_file_can_be_made_and_where_nothing_has_a_descriptor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert write_stacks("words", tmp_path / "file") is None
    said = capfd.readouterr().err
    assert "the stacks cannot be written" in said and "test_stacks_are_told_where" in said
    out = io.StringIO()
    file = write_stacks("words", tmp_path, out)
    assert file is not None and "test_stacks_are_told_where" in out.getvalue()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


class Blocked:
    """A disk that answers no read of one file's bytes from some moment on, until it is let go."""

    def __init__(self) -> None:
        self.armed = False
        self.reached = threading.Event()
        self.answers = threading.Event()
        self._read = reader.read_all

    def __call__(self, *arguments: Any) -> None:
        if self.armed:
            self.reached.set()
            self.answers.wait()
        self._read(*arguments)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    blocked = Blocked()
    monkeypatch.setattr(reader, "read_all", blocked)
    yield blocked
    blocked.answers.set()


def test_a_read_that_does_not_end_is_told_with_its_layer_and_its_thread(
    llama: Path, disk: Blocked, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    with opened(settings(llama, tmp_path, prefetch_depth=1)) as model:
        trainer = model.get_trainer()
        trainer.train_step(batch(1))
        expected_layers = model.adapter.counters.leases
        before = adapter_of(model.skeleton)
        dog = Watchdog(
            lambda: moves(model.adapter),
            lambda: awaited(model.adapter),
            tmp_path,
            clock=lambda: now[0],
        )
        disk.armed = True
        step = threading.Thread(target=lambda: trainer.train_step(batch(2)), name="the step")
        step.start()
        assert disk.reached.wait(60)
        for _ in range(600):  # until the step has come to the layer that is not read
            if model.adapter.stream.activity()[1] in model.adapter.stream.activity()[2]:
                break
            threading.Event().wait(0.1)
        # what moved when the disk stopped to answer comes to its end meanwhile
        for _ in range(100_000):
            if list(tmp_path.glob("stacks-*")):
                break
            now[0] += INTERVAL
            dog.poll()
        said = capfd.readouterr().err
        assert said.count("nothing has moved for") == 1
        place = next(line for line in said.splitlines() if "where:" in line)
        waits_for = model.adapter.stream.activity()
        assert (
            f"next: layer {waits_for[1]}" in place
            and f"being read: layer {waits_for[2][0]}" in place
        )
        assert "test_watchdog.py" in said and "is lema-read_" in said and "is the step" in said
        disk.armed = False
        disk.answers.set()
        step.join()
        assert model.adapter.counters.leases == 2 * expected_layers
        assert not same(adapter_of(model.skeleton), before)


@pytest.mark.slow
def test_fit_and_evaluation_are_watched(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[bool]] = {"step": [], "save": []}
    patient: list[str] = []

    def looked(place: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(trainer: LemaTrainer, *arguments: Any, **options: Any) -> Any:
            dog = trainer.model.watchdog
            seen[place].append(dog is not None)
            patient.extend([] if dog is None else dog._slow)
            return original(trainer, *arguments, **options)

        return call

    monkeypatch.setattr(LemaTrainer, "accumulate", looked("step", LemaTrainer.accumulate))
    monkeypatch.setattr(LemaTrainer, "save_checkpoint", looked("save", LemaTrainer.save_checkpoint))
    config = settings(llama, tmp_path, max_steps=2, save_steps=2)
    run_fit(config, token_rows(8))
    assert seen == {"step": [True, True], "save": [True]} and patient == ["saving a checkpoint"]
    assert not [thread for thread in threading.enumerate() if thread.name == "lema-watchdog"]
    with opened(config) as model:
        found: list[bool] = []
        evaluate = model.adapter.evaluate
        monkeypatch.setattr(
            model.adapter,
            "evaluate",
            lambda *given: (found.append(model.adapter.watchdog is not None), evaluate(*given))[1],
        )
        trainer = model.get_trainer()
        trainer.ready()
        trainer.evaluate(token_rows(3))
        assert found == [True]
        with watched(model.adapter, config):
            dog = model.adapter.watchdog
            with watched(model.adapter, config):
                assert model.adapter.watchdog is dog
            assert model.adapter.watchdog is dog
        assert model.adapter.watchdog is None
