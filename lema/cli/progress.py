# ruff: noqa: ARG002 - transformers defines the parameters of a callback, used or not.
"""The progress of training or writing: a bar on a terminal, one line per measurement anywhere
else.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from lema.config.printing import draws
from lema.config.units import human_bytes, human_count, human_duration

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["ByteProgress", "NoProgress", "ProgressDisplay", "TokenProgress", "progress_callback"]


Clock = Callable[[], float]  # seconds

# What a row of `logs` may hold, how it is shown, and in which order; a row need not have them all.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {loss:.4f}",
    "eval_loss": lambda loss: f"eval loss {loss:.4f}",
    "eval_perplexity": lambda value: f"perplexity {value:.2f}",
    "rewards/accuracies": lambda value: f"accuracy {value:.3f}",
    "rewards/margins": lambda value: f"margin {value:.3f}",
    "eval_rewards/accuracies": lambda value: f"accuracy {value:.3f}",
    "eval_rewards/margins": lambda value: f"margin {value:.3f}",
    "learning_rate": lambda rate: f"lr {rate:.2e}",
    "grad_norm": lambda norm: f"grad {f'{norm:#.3g}'.rstrip('.')}",
    "tokens_per_second": lambda rate: f"{human_count(rate)} tok/s",
    "bytes_read": lambda count: f"{human_bytes(count)} read",
    "memory": lambda count: f"{human_bytes(count)} memory",
}


class _Bar(Progress):
    """A bar with words before and after it and a line below it; nothing is drawn but on a
    terminal.
    """

    def __init__(
        self, console: Console, clock: Clock, *, below: str | None = None, transient: bool = False
    ) -> None:
        self.below = below
        self._clock = clock
        self._began = clock()
        alone = Column(no_wrap=True)
        before, after = (
            TextColumn(f"{{task.fields[{key}]}}", markup=False, table_column=alone)
            for key in ("done", "left")
        )
        columns = (before, BarColumn(bar_width=None), after)
        hidden = not draws(console)
        super().__init__(
            *columns,
            console=console,
            refresh_per_second=4,
            transient=transient,
            expand=True,
            disable=hidden,
        )
        self._task = self.add_task("", done="", left="")

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar and the line below; None: there is none."""
        yield from super().get_renderables()
        if self.below is not None:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")

    def show_below(self, line: str) -> None:
        """Show a line below the bar from its next drawing on."""
        self.below = line

    def update_task(self, **changes: Any) -> None:
        """Change what is shown."""
        self.update(self._task, **changes)

    def seconds(self) -> float:
        """Return how long the bar has been there."""
        return max(self._clock() - self._began, 1e-9)


class ProgressDisplay:
    """Shows steps and measurements, on a terminal with a bar, elsewhere as lines; lives from
    `start` to `close`.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self._console = console or Console()
        self._clock = clock
        self._bar: _Bar | None = None
        self._total = self._first = self._step = 0

    def start(self, total: int, done: int = 0) -> None:
        """Begin at step `done` of `total`; a run that resumes does not begin at 0."""
        self.close()
        self._total = total
        self._first = done
        self._bar = _Bar(self._console, self._clock, below="")
        self.advance(done)
        self._bar.start()

    def advance(self, step: int) -> None:
        """Step `step` is done."""
        self._step = step
        if self._bar is not None:
            self._bar.update_task(
                completed=step, total=max(1, self._total), done=self._done(), left=self._left()
            )

    def show(self, logs: Mapping[str, Any], epoch: float | None = None) -> None:
        """Show one row of measurements; rows with neither a loss nor an evaluation loss are not
        for people.
        """
        if "eval_loss" not in logs and "loss" not in logs:
            return
        described = "  ".join(
            shown(float(logs[key])) for key, shown in _SHOWN.items() if logs.get(key) is not None
        )
        if self._bar is not None and not self._bar.disable and "eval_loss" not in logs:
            self._bar.show_below(described)
            return
        at = "" if epoch is None else f"epoch {epoch:.2f}"
        parts = [self._done(), at, described, "" if "eval_loss" in logs else self._left()]
        # One line is one record: neither wrapped nor searched for markup or emoji.
        self._console.print(
            "  ".join(filter(None, parts)),
            soft_wrap=True,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def close(self) -> None:
        """Leave the terminal as it was; twice is harmless."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _done(self) -> str:
        return f"step {self._step}/{self._total}"

    def _left(self) -> str:
        """Say how long the rest takes by the steps of this process; rich's own estimate is not
        there after one step.
        """
        done = self._step - self._first
        if self._bar is None or done <= 0 or self._step >= self._total:
            return ""
        return f"{human_duration(self._bar.seconds() / done * (self._total - self._step))} left"


class ByteProgress:
    """Shows how many bytes of a whole are done, on a terminal only; call it with both numbers,
    and `close` it.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self._bar = _Bar(console or Console(stderr=True), clock, transient=True)
        self._bytes = 0
        self.close = self._bar.stop  # leaves the terminal as it was; twice is harmless

    def __call__(self, done: int, total: int) -> None:
        """`done` bytes of `total` are done."""
        self._bytes = done
        rate = done / self._bar.seconds()
        left = f"{human_bytes(rate)}/s" + (
            f"  {human_duration((total - done) / rate)} left" if rate else ""
        )
        self._bar.update_task(
            completed=done,
            total=total,
            done=f"{human_bytes(done)} of {human_bytes(total)}",
            left=left,
        )
        self._bar.start()

    def summary(self) -> str:
        """Say how much was done how fast, up to now: `1.4 GB in 0.9 s, 1.5 GB/s`."""
        seconds = self._bar.seconds()
        return (
            f"{human_bytes(self._bytes)} in {seconds:.1f} s, {human_bytes(self._bytes / seconds)}/s"
        )


class TokenProgress:
    """Shows how many of `total` texts are done and how fast tokens come, on a terminal; call it,
    and `close` it.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self._bar = _Bar(Console(stderr=True), time.monotonic, transient=True)
        self.close = self._bar.stop  # leaves the terminal as it was; twice is harmless
        self._total = total
        self._done = done
        self._tokens = 0
        self._bar.start()

    def __call__(self, tokens: int, texts: int = 0) -> None:
        """So many tokens have been made, one of each text that goes on; so many more texts are
        done.
        """
        self._tokens = self._tokens + tokens
        self._done = self._done + texts
        done = f"{self._done}/{self._total} texts"
        left = f"{human_count(self._tokens / self._bar.seconds())} tok/s"
        self._bar.update_task(completed=self._done, total=max(1, self._total), done=done, left=left)


class NoProgress:
    """Shows nothing, where the texts themselves are shown as they are made."""

    def __call__(self, tokens: int, texts: int = 0) -> None:
        """Take what `TokenProgress` takes."""

    def close(self) -> None:
        """Leave the terminal as it is."""


def progress_callback(display: ProgressDisplay | None = None) -> "TrainerCallback":
    """Return a callback of `transformers` that draws what the training loop reports, in the
    first process.
    """
    from transformers import TrainerCallback

    shown = display or ProgressDisplay()

    class ProgressCallback(TrainerCallback):
        shows_progress = True

        def on_train_begin(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            **kwargs: object,
        ) -> None:
            if state.is_world_process_zero:
                shown.start(state.max_steps, state.global_step)

        def on_step_end(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            **kwargs: object,
        ) -> None:
            if state.is_world_process_zero:
                shown.advance(state.global_step)

        def on_log(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            logs: Mapping[str, Any] | None = None,
            **kwargs: object,
        ) -> None:
            if state.is_world_process_zero and logs:
                shown.advance(state.global_step)
                shown.show(logs, state.epoch)

        def on_train_end(
            self,
            args: "TrainingArguments",
            state: "TrainerState",
            control: "TrainerControl",
            **kwargs: object,
        ) -> None:
            shown.close()

    return ProgressCallback()
