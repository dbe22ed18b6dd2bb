"""Answers of the base model beside those of its adapter."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lema.errors import ConfigError, printable

if TYPE_CHECKING:
    from lema.train.inference.texts import Completion
    from lema.train.model import LemaModel

__all__ = ["TITLES", "Base", "check_compared", "print_compared", "side_by_side", "with_base"]
__all__ += ["width_of_two"]

TITLES = ("base model", "adapter")
WIDE = 100  # columns from which two answers stand side by side

Base = Annotated[
    bool, typer.Option("--base", help="Show the base model's answer beside that of the adapter.")
]


def check_compared(model: "LemaModel") -> None:
    """Refuse, with `ConfigError`, a model without an adapter, which has nothing to compare."""
    if model.lora_manager is None:
        raise ConfigError(
            "there is no adapter to compare the base model with",
            where="--base",
            how="name the directory of an adapter, or leave --base out",
        )


def with_base(
    model: "LemaModel",
    of_base: Iterator[list["Completion"]],
    of_adapter: Iterator[list["Completion"]],
) -> Iterator[tuple[list["Completion"], list["Completion"]]]:
    """Yield each batch of the adapter with the same batch of the base model, which is made first.

    Args:
        model: has an adapter.
        of_base: makes a batch each time it is asked, while the adapter is left out.
        of_adapter: makes the same batches with it.
    """
    adapter = model.lora_manager
    assert adapter is not None, "check_compared refuses a model without one"
    while True:
        with adapter.disable_adapter():
            base_batch = next(of_base, None)
        if base_batch is None:
            return
        yield next(of_adapter), base_batch


def width_of_two(terminal: bool) -> int | None:
    """Return the columns of a terminal in which two texts stand side by side; None: they do not."""
    width = shutil.get_terminal_size().columns if terminal else 0
    return width if width >= WIDE else None


def print_compared(texts: tuple[str, str], terminal: bool) -> None:
    """Print the text of the base model and that of the adapter."""
    width = width_of_two(terminal)
    if width is None:
        lines = [f"{title}: {printable(text)}" for title, text in zip(TITLES, texts, strict=True)]
    else:
        lines = list(side_by_side(TITLES, texts, width))
    typer.echo("\n".join(lines))


def side_by_side(titles: tuple[str, str], texts: tuple[str, str], width: int) -> Iterator[str]:
    """Yield the lines of two texts beside each other, each below its title."""
    half = (width - 3) // 2
    columns = [
        [title, "-" * len(title), *_wrapped(printable(text), half)]
        for title, text in zip(titles, texts, strict=True)
    ]
    for row in range(max(map(len, columns))):
        left, right = (column[row] if row < len(column) else "" for column in columns)
        yield f"{left:{half}} | {right}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return [
        line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, width) or [""]
    ]
