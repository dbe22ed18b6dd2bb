"""`lema watch`: a run in a terminal, while it trains or afterwards."""

import math
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.config.printing import draws
from lema.config.units import MEMORY_PARTS, human_bytes, human_count, human_duration
from lema_tools.rundir import METRICS, RECENT, Memory, MetricsTail, Run, amount, by_step, read_run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["curve", "picture", "watch"]

COLOURS = (
    "cyan",
    "yellow",
    "magenta",
    "green",
    "blue",
    "red",
    "bright_cyan",
    "bright_yellow",
    "bright_magenta",
)
CURVE = (3, 8, 14)
OTHERS = 26  # lines of the curve: the least, usual and most; about how many all others take
POLL_SECONDS = 0.05  # seconds, where nothing tells that a key was pressed
LARGEST = 6  # parts of memory that are named


def watch(
    output_dir: Annotated[
        Path, typer.Argument(metavar="OUTPUT_DIR", help="The output_dir of the run.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Seconds between updates.")
    ] = 1.0,
) -> None:
    """Show the loss, speed, time, memory and remaining time of a run. q leaves, and the run
    continues.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    tail = MetricsTail(output_dir / METRICS)
    run = read_run(output_dir, tail)
    if not once and draws(console) and run.state == "running":
        with (
            suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
            _key() as key,
        ):
            while run.state == "running":
                live.update(picture(run, console.width, console.height), refresh=True)
                if key(every) in ("q", "Q"):
                    break
                run = read_run(output_dir, tail)
    console.print(picture(run, console.width))


@contextmanager
def _key() -> Iterator[Any]:
    """Give a function that waits so many seconds for a key and returns it; empty: none was pressed.
    Without a keyboard it only waits."""
    source = sys.stdin.fileno()
    if not os.isatty(source):
        yield _no_key
        return
    try:
        import termios
        import tty
    except ModuleNotFoundError:  # Windows
        yield _console_key
        return
    before = termios.tcgetattr(source)
    tty.setcbreak(source)  # in which Ctrl-C still interrupts
    try:
        yield (
            lambda seconds: (
                os.read(source, 1).decode(errors="replace") if _ready(source, seconds) else ""
            )
        )
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _console_key(seconds: float) -> str:
    """Wait so many seconds for a key of a Windows console and return it; empty: none was
    pressed.
    """
    console: Any = import_module("msvcrt")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if console.kbhit():
            return str(console.getwch())
        time.sleep(POLL_SECONDS)
    return ""


def _ready(source: int, seconds: float) -> bool:
    return bool(select.select([source], [], [], seconds)[0])


def picture(run: Run, width: int, height: int | None = None) -> "RenderableType":
    """Return all that is shown of a run, on a screen of that `height`, with the key that leaves it;
    None: as high as it is. What a low screen has no room for is what comes last."""
    from rich.console import Group
    from rich.text import Text

    least, usual, most = CURVE
    lines = usual if height is None else min(most, max(least, height - OTHERS))
    gap = [] if height is not None and height < OTHERS + usual else [Text()]
    shown: list[RenderableType] = [_head(run, width, keys=height is not None), *gap]
    if run.trained:
        curves = _loss(run, max(20, width - 12), lines)
        shown += [
            *curves,
            *gap,
            _numbers(run),
            *gap,
            *_times(run, width),
            *gap,
            *_memories(run, width),
            *gap,
        ]
    else:
        shown.append(Text("No step has been logged yet.", "dim"))
    return Group(*shown, _files(run))


def _head(run: Run, width: int, *, keys: bool) -> "Text":
    from rich.text import Text

    steps = "" if run.steps is None else f"/{run.steps:,}"
    colour = {"running": "green", "ended": "blue", "stopped": "yellow"}[run.state]
    text = Text.assemble((str(run.directory), "bold"), "  ", (run.state, f"bold {colour}"))
    text.append(f" ({run.holder})" if run.holder else "", "dim")
    text.append("  q leaves" if keys else "", "dim")
    text.append(f"\nstep {run.step:,}{steps}")
    if run.steps:
        bar_width = max(10, min(40, width - 50))
        done = round(bar_width * min(1.0, run.step / run.steps))
        text.append_text(
            Text.assemble("  ", ("━" * done, colour), ("━" * (bar_width - done), "bright_black"))
        )
        text.append(f"  {100 * min(1.0, run.step / run.steps):.0f}%")
    if run.phases:
        text.append(f"  phase {run.phases[-1][0]}")
    if (left := run.seconds_left) is not None:
        text.append(f"  {human_duration(left)} left")
    elif (took := amount(run.summary, "train_runtime")) is not None:
        text.append(f"  took {human_duration(took)}")
    if run.signs:
        text.append_text(_signs(run))
    return text


def _signs(run: Run) -> "Text":
    """Return a line that says that the run may learn nothing, or did not for a while."""
    from rich.text import Text

    last = run.signs[-1]
    count = run.dead_steps
    since = (
        f"since {count:,} step{'s' * (count > 1)}"
        if count
        else f"step {int(amount(last, 'step') or 0):,}"
    )
    return Text(
        f"\nthis run may learn nothing, {since}: {last.get('why')}",
        "bold red" if count else "yellow",
    )


def curve(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """Draw numbers over steps in Braille, `width` times `height` characters of two by four dots;
    what is not finite leaves a gap."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return []
    first, last = (finite[0][0], finite[-1][0])
    values = [value for _, value in finite]
    low = min(values)
    high = max(values)
    wide = 2 * width - 1
    tall = 4 * height - 1
    columns: dict[int, list[float]] = {}
    for step, value in finite:
        columns.setdefault(round(wide * (step - first) / max(1, last - first)), []).append(value)
    dots = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, column in sorted(columns.items()):
        y = round(tall * (high - sum(column) / len(column)) / ((high - low) or 1.0))
        for px, py in _line(before, (x, y)):
            dots[py // 4][px // 2] |= (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)[
                4 * (px % 2) + py % 4
            ]
        before = (x, y)
    return ["".join(chr(0x2800 + cell) for cell in row) for row in dots]


def _line(start: tuple[int, int] | None, end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    x0, y0 = start or end
    count = max(abs(end[0] - x0), abs(end[1] - y0), 1)
    for at in range(count + 1):
        yield round(x0 + (end[0] - x0) * at / count), round(y0 + (end[1] - y0) * at / count)


def _loss(run: Run, width: int, height: int) -> "Iterator[Text]":
    from rich.text import Text

    points = by_step(run.trained, "loss")
    finite = [value for _, value in points if math.isfinite(value)]
    lines = curve(points, width, height)
    for at, line in enumerate(lines):
        label = (
            f"{max(finite):9.4g} "
            if at == 0
            else f"{min(finite):9.4g} "
            if at == len(lines) - 1
            else " " * 10
        )
        yield Text.assemble((label, "dim"), (line, "cyan"))
    if lines:
        left = f"step {points[0][0]:,}"
        right = f"{points[-1][0]:,}"
        yield Text(
            " " * 10 + left + "loss".center(max(0, width - len(left) - len(right))) + right, "dim"
        )


def _numbers(run: Run) -> "Table":
    from rich.table import Table
    from rich.text import Text

    last = run.trained[-1]
    recent = run.trained[-RECENT:]
    rates = [value for _, value in by_step(recent, "tokens_per_second")]
    cells = [
        ("loss", _shown(last, "loss", "{:.4f}")),
        ("learning rate", _shown(last, "learning_rate", "{:.2e}")),
    ]
    cells.append(("gradient norm", _shown(last, "grad_norm", "{:.3g}")))
    cells.append(("tokens/s", human_count(sum(rates) / len(rates)) if rates else "-"))
    seconds = run.seconds_per_step
    cells.append(("a step", "-" if seconds is None else f"{seconds:.3g} s"))
    steps = run.trained[-1]["step"] - (run.trained[-2]["step"] if len(run.trained) > 1 else 0)
    moved = [("from disk, a step", "bytes_read"), ("over the link, a step", "bytes_uploaded")]
    cells += [(name, human_bytes((amount(last, key) or 0) / max(1, steps))) for name, key in moved]
    if run.evaluated:
        evaluation = run.evaluated[-1]
        cells.append(
            (f"evaluation, step {evaluation['step']:,}", _shown(evaluation, "eval_loss", "{:.4f}"))
        )
    table = Table.grid(padding=(0, 3))
    half = math.ceil(len(cells) / 2)
    for at in range(half):
        table.add_row(
            *(
                Text(*styled)
                for name, value in cells[at::half]
                for styled in ((name, "dim"), (value, "bold"))
            )
        )
    return table


def _times(run: Run, width: int) -> "Iterator[Text]":
    from rich.text import Text

    sums: dict[str, float] = {}
    for _, _, parts in run.seconds[-RECENT:]:
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    sums = {name: value for name, value in sums.items() if value}
    total = sum(sums.values())
    if not total:
        return
    yield Text("where a step's time goes, of the latest steps", "bold")
    yield _bar([value / total for value in sums.values()], width)
    yield _legend({name: f"{100 * value / total:.1f}%" for name, value in sums.items()})


def _memories(run: Run, width: int) -> "Iterator[Text]":
    from rich.text import Text

    for memory in run.memories:
        title = f"{memory.name}: plan {human_bytes(memory.planned)}"
        title += f" of {human_bytes(memory.limit)}" if memory.limit else ""
        title += (
            "" if memory.measured is None else f", measured {human_bytes(memory.measured)} at most"
        )
        yield Text(title, "bold")
        parts = _largest(memory)
        most = max(memory.planned, memory.measured or 0, 1)
        yield _bar([size / most for size in parts.values()], width)
        if memory.measured is not None:
            yield Text("▔" * max(1, round(width * memory.measured / most)), "white")
        yield _legend({name: human_bytes(size) for name, size in parts.items()})


def _largest(memory: Memory) -> dict[str, int]:
    ordered = sorted(memory.parts.items(), key=lambda part: -part[1])
    shown = {MEMORY_PARTS.get(name, name): size for name, size in ordered[:LARGEST]}
    remainder = sum(size for _, size in ordered[LARGEST:])
    return shown | ({"the rest": remainder} if remainder else {})


def _bar(parts: Sequence[float], width: int) -> "Text":
    """Draw fractions of a width beside each other; one that is there at all has a character
    where there is room.
    """
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    begun = 0.0
    for part, colour in zip(parts, _colours(), strict=False):
        cells = round((begun + part) * width) - round(begun * width)
        text.append("█" * cells, colour)
        begun += part
    return text


def _legend(parts: Mapping[str, str]) -> "Text":
    from rich.text import Text

    text = Text()
    for (name, value), colour in zip(parts.items(), _colours(), strict=False):
        text.append_text(Text.assemble(("■ ", colour), f"{name} ", (value, "bold"), "   "))
    return text


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _files(run: Run) -> "Text":
    from rich.text import Text

    names = [str(checkpoint.relative_to(run.directory)) for checkpoint in run.checkpoints]
    shown = (
        "none yet"
        if not names
        else ", ".join(names[-3:]) + (f" and {len(names) - 3} before" * (len(names) > 3))
    )
    return Text.assemble(("checkpoints  ", "dim"), shown)


def _shown(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return form.format(value) if isinstance(value, int | float) else "-"
