"""A text that is shown as it is made, token by token."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lema.errors import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ShownText", "draws_text", "print_text"]

UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a character's bytes to


def draws_text() -> bool:
    """Whether standard output is a terminal, where a text is shown as it is made."""
    return sys.stdout.isatty()


def print_text(text: str) -> None:
    """Print a part of a text at once, without a line's end."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


class ShownText:
    """Shows one text while it is made; `transformers` calls it a streamer.

    The first tokens that it is given are the prompt's, which is not shown. A character is shown
    when all its bytes are there, and a string that the text may stop at never is.

    Args:
        tokenizer: decodes the tokens.
        stops: strings that the text ends before.
        show: is called with each part of the text.

    Attributes:
        text: what was shown.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stops: Sequence[str] = (),
        show: Callable[[str], object] = print_text,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stops = [stops] if isinstance(stops, str) else list(stops)
        self._show = show
        self._tokens: list[int] | None = None

    def put(self, value: Any) -> None:
        """Take the prompt's tokens, `[1, length]`, and then each new one, `[1]`."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += value.reshape(-1).tolist()
        self._advance(final=False)

    def end(self) -> None:
        """Show the rest, and end the line."""
        self._advance(final=True)
        self._show("\n")

    def _advance(self, *, final: bool) -> None:
        text = str(self._tokenizer.decode(self._tokens or [], skip_special_tokens=True))
        cuts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if cuts:
            text = text[: min(cuts)]
        elif not final:
            text = text[: len(text) - self._withheld(text)]
        if text.startswith(self.text) and len(text) > len(self.text):
            self._show(text[len(self.text) :])
            self.text = text

    def _withheld(self, text: str) -> int:
        """Return how many characters at the end may be a part of something else."""
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        return max(
            [unfinished]
            + [
                length
                for stop in self._stops
                for length in range(1, len(stop))
                if text.endswith(stop[:length])
            ]
        )
