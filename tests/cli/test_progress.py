"""Progress: a bar on a terminal, one line per measurement elsewhere, driven by the events of
`transformers`.
"""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from lema.cli.progress import ByteProgress, ProgressDisplay, progress_callback

LOGS = {
    "loss": 2.34567,
    "learning_rate": 1e-4,
    "grad_norm": 0.5,
    "tokens_per_second": 3400.0,
    "bytes_read": 1_200_000_000,
    "memory": 512_000_000,
}
SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"


class Clock:
    """Ten seconds pass each time `tick` is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 10


def pipe() -> Console:
    # As in a log file: far narrower than the lines written.
    return Console(file=io.StringIO(), width=40, force_terminal=False)


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_elsewhere_each_measurement_is_one_line() -> None:
    console = pipe()
    clock = Clock()
    display = ProgressDisplay(console, clock)
    display.start(total=4)
    for step in (1, 2):
        clock.tick()
        display.advance(step)
        display.show(LOGS, epoch=0.5)
    display.show({"eval_loss": 2.5, "eval_perplexity": 12.18249})
    display.close()
    measured = "loss 2.3457  lr 1.00e-04  grad 0.500  3.4k tok/s  1.2 GB read  512 MB memory"
    assert written(console).splitlines() == [
        f"step 1/4  epoch 0.50  {measured}  30s left",
        f"step 2/4  epoch 0.50  {measured}  20s left",
        "step 2/4  eval loss 2.5000  perplexity 12.18",
    ]


def test_a_resumed_run_reckons_with_the_steps_it_does_itself() -> None:
    console = pipe()
    clock = Clock()
    display = ProgressDisplay(console, clock)
    display.start(total=100, done=90)
    clock.tick()
    display.advance(91)
    display.show({"loss": 1.0})
    assert written(console) == "step 91/100  loss 1.0000  1m 30s left\n"


def test_rows_for_machines_are_not_shown() -> None:
    console = pipe()
    display = ProgressDisplay(console)
    display.start(total=1)
    display.show({"train_runtime": 3.0})
    display.show({"loss": 1.0, "[bold]": 3, "learning_rate": None})
    assert written(console) == "step 0/1  loss 1.0000\n"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_a_bar_that_fits(width: int) -> None:
    console = terminal(width)
    clock = Clock()
    display = ProgressDisplay(console, clock)
    display.start(total=4)
    clock.tick()
    display.advance(1)
    display.show(LOGS, epoch=0.5)
    display.close()
    # What stays on the screen: the last two lines drawn, without the codes that move the cursor.
    frame = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", written(console)).splitlines()[-2:]
    assert frame[0].startswith("step 1/4")
    assert frame[0].rstrip().endswith("30s left")
    assert (
        frame[1].rstrip()
        == "loss 2.3457  lr 1.00e-04  grad 0.500  3.4k tok/s  1.2 GB read  512 MB memory"
    )
    assert all(len(line) <= width for line in frame)


def test_a_terminal_is_left_as_it_was_even_when_nobody_ends_the_training() -> None:
    console = terminal()
    display = ProgressDisplay(console)
    display.start(total=4)
    assert HIDE_CURSOR in written(console)
    assert SHOW_CURSOR not in written(console)
    display.close()
    assert SHOW_CURSOR in written(console)
    length = len(written(console))
    display.close()
    assert len(written(console)) == length


def test_an_evaluation_on_a_terminal_stays_above_the_bar() -> None:
    console = terminal()
    display = ProgressDisplay(console)
    display.start(total=4)
    display.advance(2)
    display.show({"eval_loss": 2.5})
    display.show({"loss": 1.0})
    display.close()
    assert "step 2/4  eval loss 2.5000\n" in written(console)


def fire(console: Console, tmp_path: Path, first_process: bool) -> None:
    """What a training loop of two steps tells its callbacks, the way `transformers` tells it."""
    state = TrainerState(max_steps=2, is_world_process_zero=first_process, epoch=0.0)
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    control = TrainerControl()
    unused: Any = None
    callbacks = CallbackHandler([progress_callback(ProgressDisplay(console))], *[unused] * 4)
    callbacks.on_train_begin(args, state, control)
    for step in (1, 2):
        state.global_step = step
        state.epoch = step / 2
        callbacks.on_step_end(args, state, control)
        callbacks.on_log(args, state, control, {"loss": float(step)})
    callbacks.on_log(args, state, control, {"eval_loss": 3.0})
    callbacks.on_evaluate(args, state, control, {"eval_loss": 3.0})
    callbacks.on_train_end(args, state, control)


def test_the_callback_shows_what_transformers_reports_once(tmp_path: Path) -> None:
    console = pipe()
    fire(console, tmp_path, first_process=True)
    lines = written(console).splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["step 1/2", "epoch 0.50", "loss 1.0000"],
        ["step 2/2", "epoch 1.00", "loss 2.0000"],
        ["step 2/2", "epoch 1.00", "eval loss 3.0000"],
    ]


def test_only_the_first_process_draws(tmp_path: Path) -> None:
    console = pipe()
    fire(console, tmp_path, first_process=False)
    assert written(console) == ""


def test_bytes_have_a_bar_on_a_terminal() -> None:
    console = terminal()
    clock = Clock()
    display = ByteProgress(console, clock)
    clock.tick()
    display(500_000_000, 2_000_000_000)
    assert HIDE_CURSOR in written(console)
    display.close()
    display.close()
    assert SHOW_CURSOR in written(console)
    assert re.search(r"500 MB of 2\.0 GB .*━.* 50\.0 MB/s  30s left", written(console))


def test_bytes_are_silent_elsewhere_and_summed_up_in_words() -> None:
    console = pipe()
    clock = Clock()
    display = ByteProgress(console, clock)
    display(0, 10)
    clock.tick()
    display(3_000_000_000, 3_000_000_000)
    display.close()
    assert written(console) == ""
    assert display.summary() == "3.0 GB in 10.0 s, 300 MB/s"
