"""A run is stopped before any layer: the step under way is given up, and what follows is as if
nothing had happened.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_same_adapter, config_writer
from safetensors.torch import load_file
from smallrun import adapter_of, logged, opened, run_fit, same, settings, token_rows, write_model
from torch import Tensor
from transformers import TrainerCallback

from lema.config import LemaConfig
from lema.errors import Stopped
from lema.lora import save_adapter
from lema.train import train
from lema.train.stop import POLL_INTERVAL, SIGNALS, StopOnSignal

ROWS = token_rows(22)
EVAL_ROWS = token_rows(4, seed=2)
RUN: dict[str, Any] = {
    "max_steps": 3,
    "lora_dropout": 0.1,
    "micro_batch_size": 2,
    "eval_steps": 2,
    "logging_steps": 2,
}
# Whoever is asked is asked before each lease, and before each of two micro-batches.
IN_STEP = 15 * 3  # eight layers up, seven down
IN_EVALUATION = 8 * 3
# of three steps, and evaluations after the second and at the end
ALL = 3 * IN_STEP + 2 * IN_EVALUATION
pytestmark = pytest.mark.usefixtures("fast_disk")

MEASURED = ("loss", "eval_loss", "grad_norm", "learning_rate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LemaConfig, dict[str, Tensor]]:
    """A run that nobody could stop, with a checkpoint of each step."""
    config = settings(model, tmp_path_factory.mktemp("whole"), **RUN, save_steps=1)
    return config, run_fit(config, ROWS, EVAL_ROWS)[1]


@contextmanager
def killed_at(
    count: int, number: signal.Signals = signal.SIGTERM
) -> Iterator[Callable[[], str | None]]:
    """Give who is asked whether to stop; when asked for the `count`-th time, this process is
    sent a signal first.
    """
    left = iter(range(count - 1, -1, -1))
    with StopOnSignal() as stop:

        def why() -> str | None:
            if next(left, None) == 0:
                os.kill(os.getpid(), number)
            return stop.why()

        yield why


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says, but for the settings, and for what a run keeps for its metrics and
    callbacks.
    """
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    state.pop("config", None)
    return state | {"extra": state["extra"]["data"]}


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Adapter, optimizer, schedule, generators and place in the data are the same."""
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert same(load_file(one / name), load_file(other / name)), name
    assert state_of(one) == state_of(other)


def assert_same_curve(one: LemaConfig, other: LemaConfig) -> None:
    """Every number was measured once, and is the same."""
    for key in MEASURED:
        assert logged(one, key) == logged(other, key)
    measured = [
        [
            (row["step"], key)
            for row in map(json.loads, file.read_text().splitlines())
            for key in MEASURED
            if key in row
        ]
        for file in (Path(config.output_dir) / "metrics.jsonl" for config in (one, other))
    ]
    assert measured[0] == measured[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "places"),
    [
        (True, range(1, IN_STEP + IN_EVALUATION + 1, 3)),
        (False, range(2, IN_STEP + IN_EVALUATION + 1, 11)),
    ],
    ids=["each-layer", "micro-batches"],
)
def test_stopped_before_any_layer_it_keeps_the_last_step_and_can_go_on(
    model: Path,
    whole: tuple[LemaConfig, dict[str, Tensor]],
    recompute: bool,
    places: range,
    tmp_path: Path,
) -> None:
    """In the second step's forward and backward, and in the evaluation after it."""
    begun = Path(whole[0].output_dir)
    config = settings(model, tmp_path, **RUN, gradient_checkpointing=recompute)
    with opened(config) as streamed:
        trainer = streamed.get_trainer()
        for count in places:
            trainer.load_checkpoint(begun / "checkpoint-1")
            with (
                killed_at(count) as why,
                pytest.raises(Stopped, match="stopped by SIGTERM after step") as stopped,
            ):
                trainer.fit(ROWS, EVAL_ROWS, stop=why)
            kept = f"checkpoint-{1 if count <= IN_STEP else 2}"
            assert stopped.value.where == str(tmp_path / kept)
            assert_same_checkpoint(tmp_path / kept, begun / kept)
            if count % 9 == 1:
                trainer.fit(ROWS, EVAL_ROWS)
                assert same(adapter_of(streamed.skeleton), whole[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2 * IN_STEP - 7, 2 * IN_STEP + 7, ALL - 7])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    model: Path, whole: tuple[LemaConfig, dict[str, Tensor]], count: int, tmp_path: Path
) -> None:
    """Stopped before its first layer, in a backward, in an evaluation, and in the very last one."""
    config = settings(model, tmp_path, **RUN)
    with killed_at(count) as why, pytest.raises(Stopped) as stopped:
        run_fit(config, ROWS, EVAL_ROWS, stop=why)
    assert stopped.value.exit_code == 75
    assert same(run_fit(config, ROWS, EVAL_ROWS, resume=True)[1], whole[1])
    assert_same_curve(config, whole[0])


def test_who_is_asked_and_says_nothing_changes_nothing(
    model: Path, whole: tuple[LemaConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    asked = 0

    def why() -> None:
        nonlocal asked
        asked += 1

    config = settings(model, tmp_path, **RUN)
    assert same(run_fit(config, ROWS, EVAL_ROWS, stop=why)[1], whole[1])
    assert_same_curve(config, whole[0])
    assert asked == ALL


class Kill(TrainerCallback):
    """Sends this process a signal when an event of a step comes."""

    def __init__(self, event: str, step: int, number: signal.Signals = signal.SIGTERM) -> None:
        def kill(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                os.kill(os.getpid(), number)

        setattr(self, event, kill)


def stopped_and_resumed(config: LemaConfig, where: str, callback: Any = None) -> None:
    """Train until a callback, or whatever else, stops it after a step; then to the end."""
    with pytest.raises(Stopped) as stopped:
        train(config, callbacks=[callback] if callback else [])
    assert stopped.value.exit_code == 75
    assert stopped.value.where == str(Path(config.output_dir) / where)
    train(config, resume=True)


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LemaConfig]:
    """Return the settings of a run in a directory of a name; the one in `whole` has been made."""
    place = tmp_path_factory.mktemp("command")
    write = config_writer(model, place)

    def named(name: str) -> LemaConfig:
        given = {
            "max_steps": 3,
            "save_steps": 0,
            "lora_dropout": 0.1,
            "output_dir": str(place / name),
        }
        return LemaConfig.from_yaml(write(**given))

    train(named("whole"))
    return named


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_the_optimizers_step_is_taken_whole(
    command: Callable[[str], LemaConfig], number: signal.Signals
) -> None:
    config = command(number.name)
    before = signal.getsignal(number)
    stopped_and_resumed(config, "checkpoint-2", Kill("on_pre_optimizer_step", 1, number))
    assert signal.getsignal(number) is before
    assert_same_adapter(Path(command("whole").output_dir), Path(config.output_dir))


@pytest.mark.slow
def test_a_checkpoint_is_written_whole(
    command: Callable[[str], LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = command("saving")
    killed: list[str] = []

    def save(*arguments: Any, **options: Any) -> None:
        if not killed:
            killed.append("once")
            os.kill(os.getpid(), signal.SIGTERM)
        save_adapter(*arguments, **options)

    monkeypatch.setattr("lema.train.trainer.save_adapter", save)
    stopped_and_resumed(LemaConfig(**{**config.to_dict(), "save_steps": 2}), "checkpoint-2")
    assert killed
    assert_same_adapter(Path(command("whole").output_dir), Path(config.output_dir))


def test_a_signal_in_the_last_optimizer_step_cuts_nothing_short(
    command: Callable[[str], LemaConfig],
) -> None:
    config = command("last")
    train(config, callbacks=[Kill("on_pre_optimizer_step", 2)])
    assert_same_adapter(Path(command("whole").output_dir), Path(config.output_dir))


def test_a_file_stops_a_run_once(command: Callable[[str], LemaConfig]) -> None:
    config = command("file")
    file = Path(config.output_dir) / "stop"
    file.parent.mkdir()
    file.touch()
    stopped_and_resumed(config, "checkpoint-0")
    assert not file.exists()
    assert_same_adapter(Path(command("whole").output_dir), Path(config.output_dir))


def test_the_file_is_looked_for_once_in_a_while(tmp_path: Path) -> None:
    now = 10.0
    stop = StopOnSignal(tmp_path / "stop", clock=lambda: now)
    assert stop.why() is None
    (tmp_path / "stop").touch()
    now += POLL_INTERVAL * 0.9
    assert stop.why() is None
    now += POLL_INTERVAL * 0.2
    assert stop.why() == f"the file {tmp_path / 'stop'}"
    # whatever else ends the run: nothing was done that the file asked for
    with (
        pytest.raises(KeyError),
        stop,
    ):
        raise KeyError
    assert (tmp_path / "stop").exists()


TWICE = """
import ctypes, os, signal, time
from lema.train import stop

stop.SAME_SIGNAL = 0.1
with stop.StopOnSignal() as asked:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked.why(), flush=True)
    while asked._timer is None:  # a thread sees the signals, too
        time.sleep(0.01)
    asked._timer.join()
    print("again", flush=True)
    ctypes.PyDLL(None).sleep(60)  # a library that does not let go of the interpreter
"""
WITHIN_A_LIBRARY = """
import ctypes, threading
from lema.train import stop

class Told(threading.Timer):
    def run(self):
        super().run()
        print("again", flush=True)

threading.Timer, stop.SAME_SIGNAL = Told, 0.1
with stop.StopOnSignal() as asked:
    print("first", flush=True)
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, (ctypes.c_char * 64)()
    lock(mutex)
    lock(mutex)  # for ever; no signal interrupts it
"""


@pytest.mark.parametrize("program", [TWICE, WITHIN_A_LIBRARY], ids=["noted", "within a library"])
def test_a_second_signal_ends_the_process_at_once_and_what_comes_twice_at_once_came_once(
    program: str,
) -> None:
    """Also where the main thread has not come to note the first."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() in ("SIGTERM\n", "first\n")
        if program is WITHIN_A_LIBRARY:
            child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "again\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=20) == -signal.SIGTERM


STOPPED_BETWEEN = """
import os, signal, threading
from lema.train import stop

again = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
with stop.StopOnSignal() as asked:
    os.kill(os.getpid(), signal.SIGTERM)
    again.start()
again.join()
print(asked.why(), "told", flush=True)
"""


def test_a_signal_that_comes_twice_ends_no_run_that_has_stopped_in_between() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_BETWEEN], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "SIGTERM told\n"), done.stderr


BREAK = """
import os, signal
signal.SIGBREAK = signal.SIGUSR2  # as a console of Windows has one, besides Ctrl-C
from lema.train.stop import SIGNALS, StopOnSignal
assert signal.SIGBREAK in SIGNALS
with StopOnSignal() as stopping:
    assert stopping.why() is None
    os.kill(os.getpid(), signal.SIGBREAK)
    print(stopping.why())
assert signal.getsignal(signal.SIGBREAK) is signal.SIG_DFL
"""


def test_the_consoles_other_key_stops_a_run_where_there_is_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BREAK], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "SIGUSR2\n"), done.stderr
