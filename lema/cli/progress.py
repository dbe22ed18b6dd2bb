# ruff: noqa: ARG002 - a callback's parameters are given by transformers, used or not.
"""The progress of training or writing: a bar on a terminal, one line per measurement anywhere else."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lema.config.units import human_bytes, human_count, human_duration

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["ByteProgress", "ProgressDisplay", "progress_callback"]


# What a row of `logs` may hold, how it is shown, and in which order; a row need not have them all.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {loss:.4f}",
    "eval_loss": lambda loss: f"eval loss {loss:.4f}",
    "eval_perplexity": lambda value: f"perplexity {value:.2f}",
    "learning_rate": lambda rate: f"lr {rate:.2e}",
    "grad_norm": lambda norm: f"grad {norm:.3g}",
    "tokens_per_second": lambda rate: f"{human_count(rate)} tok/s",
    "bytes_read": lambda count: f"{human_bytes(count)} read",
    "memory": lambda count: f"{human_bytes(count)} memory",
}


class ProgressDisplay:
    """Shows steps and measurements; lives from `start` to `close`.

    Args:
        console: where to draw; standard output by default. A terminal gets a bar, anything else lines.
        clock: seconds that only go forward.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live: Live | None = None
        self._measured = ""
        self._total = self._first = self._step = 0
        self._began = clock()

    def start(self, total: int, done: int = 0) -> None:
        """Begin at step `done` of `total`; a run that resumes does not begin at 0."""
        self.close()
        self._total, self._first, self._step, self._began = total, done, done, self._clock()
        self._measured = ""
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=4)
            self._live.start()

    def advance(self, step: int) -> None:
        """Step `step` is done."""
        self._step = step

    def show(self, logs: Mapping[str, Any], epoch: float | None = None) -> None:
        """Show one row of measurements; rows with neither a loss nor an evaluation loss are not for people."""
        if "eval_loss" not in logs and "loss" not in logs:
            return
        described = "  ".join(shown(float(logs[key])) for key, shown in _SHOWN.items() if logs.get(key) is not None)
        if self._live is not None and "eval_loss" not in logs:
            self._measured = described
            return
        parts = [f"step {self._step}/{self._total}"]
        if epoch is not None:
            parts.append(f"epoch {epoch:.2f}")
        parts.append(described)
        if "eval_loss" not in logs and self._left():
            parts.append(self._left())
        # One line is one record: neither wrapped nor searched for markup or emoji.
        self._console.print("  ".join(parts), soft_wrap=True, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        """Leave the terminal as it was; twice is harmless."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _drawn(self) -> Group:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, self._total), completed=self._step)
        head.add_row(f"step {self._step}/{self._total}", bar, self._left())
        return Group(head, Text(self._measured, no_wrap=True, overflow="ellipsis"))

    def _left(self) -> str:
        done = self._step - self._first
        if done <= 0 or self._step >= self._total:
            return ""
        return f"{human_duration((self._clock() - self._began) / done * (self._total - self._step))} left"


class ByteProgress:
    """Shows how many bytes of a whole are done, on a terminal only; call it with both numbers, and `close` it.

    Args:
        console: where to draw; standard error by default.
        clock: seconds that only go forward; they count from now on.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock, self._began = clock, clock()
        self._live: Live | None = None
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """`done` bytes of `total` are done."""
        self._done, self._total = done, total
        if self._live is None and self._console.is_terminal:
            self._live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def close(self) -> None:
        """Leave the terminal as it was; twice is harmless."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self) -> str:
        """Say how much was done how fast, up to now: `1.4 GB in 0.9 s, 1.5 GB/s`."""
        seconds = max(self._clock() - self._began, 1e-9)
        return f"{human_bytes(self._done)} in {seconds:.1f} s, {human_bytes(self._done / seconds)}/s"

    def _drawn(self) -> Table:
        rate = self._done / max(self._clock() - self._began, 1e-9)
        left = f"  {human_duration((self._total - self._done) / rate)} left" if rate else ""
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, self._total), completed=self._done)
        head.add_row(f"{human_bytes(self._done)} of {human_bytes(self._total)}", bar, f"{human_bytes(rate)}/s{left}")
        return head


def progress_callback(display: ProgressDisplay | None = None) -> "TrainerCallback":
    """A `transformers.TrainerCallback` that draws what the training loop reports. Imports transformers.

    Only the first process of a group draws.

    Args:
        display: what to draw on. Whoever gives one can close it when training fails, before the error is printed.
    """
    from transformers import TrainerCallback

    shown = display or ProgressDisplay()

    class ProgressCallback(TrainerCallback):
        """Draws what the training loop reports."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin at the step training begins at."""
            if state.is_world_process_zero:
                shown.start(state.max_steps, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Move on."""
            if state.is_world_process_zero:
                shown.advance(state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
        ) -> None:
            """Show the numbers just measured."""
            if state.is_world_process_zero and logs:
                shown.advance(state.global_step)
                shown.show(logs, state.epoch)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Leave the terminal as it was."""
            shown.close()

    return ProgressCallback()
