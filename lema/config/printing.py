"""Output for a reader: lines, rows that are a table on a terminal and tab-separated columns
anywhere else; and silence.

PEFT imports bitsandbytes, and transformers torchao, wherever these are installed, which log
warnings of kernels that they could not load. Where a command cannot do without them
(`lema.cli.libraries.import_libraries`) LEMA hushes them for its whole process, and where they are
imported in a user's (`lema.lazy_exports`) for as long as that takes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["draws", "hush", "hushed", "line_printer", "print_table"]

CHATTY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def draws(console: "Console") -> bool:
    """Whether bars can be drawn on a console: it is a terminal, and one that goes back in a line,
    as TERM=dumb does not; that takes lines, as a file does."""
    return console.is_terminal and not console.is_dumb_terminal


def line_printer(console: "Console") -> Callable[[str], None]:
    """Return what prints a line as one record, whatever the terminal's width; a path in it may
    hold brackets.
    """
    return partial(console.print, soft_wrap=True, markup=False, emoji=False)


def print_table(
    rows: "Iterable[Sequence[str | Text]]",
    console: "Console",
    *,
    headers: Sequence[str] = (),
    amounts: bool = False,
) -> None:
    """Print rows; anywhere but on a terminal each as soon as it is there, so that the reader of a
    pipe can follow. The first cell of a row names a section, which a table without `headers` shows
    once for all rows of it. A table aligns a last column of `amounts` on the right. A quiet console
    prints nothing."""
    if console.quiet:
        return
    if not console.is_terminal:
        for row in chain([headers] if headers else [], rows):
            console.file.write(
                "\t".join(str(cell).replace("\t", " ").replace("\n", " ") for cell in row) + "\n"
            )
            console.file.flush()
        return
    from rich.table import Table

    all_rows = list(rows)
    width = max(map(len, [headers, *all_rows]))
    table = Table(box=None, pad_edge=False, show_header=bool(headers))
    for column in range(width):
        right = amounts and column == width - 1
        title = headers[column] if headers else ""
        table.add_column(
            title, justify="right" if right else "left", no_wrap=column == 0, overflow="fold"
        )
    last = ""
    for row in all_rows:
        table.add_row("" if str(row[0]) == last and not headers else row[0], *row[1:])
        last = str(row[0])
    console.print(table, markup=False, highlight=False)


def hush() -> None:
    """Let the chatty libraries log errors only, for the rest of the process."""
    for name in CHATTY:
        _set_level(logging.getLogger(name), logging.ERROR)


@contextmanager
def hushed() -> Iterator[None]:
    """Let the chatty libraries log errors only, for the length of a `with` block."""
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    hush()
    try:
        yield
    finally:
        for name, level in levels.items():
            _set_level(logging.getLogger(name), level)


def _set_level(logger: logging.Logger, level: int) -> None:
    """Set a level that is another one, because setting it empties a cache of every logger of the
    process.
    """
    if logger.level != level:
        logger.setLevel(level)
