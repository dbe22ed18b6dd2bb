"""The standard streams of a command: text alone goes there, and whoever reads them may go away."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lema.errors import NO_TEXT, printable

__all__ = ["TextStream", "full", "text_streams"]

# What draws bars and colours on a terminal (ECMA-48, control sequences), and goes back to the
# beginning of a line.
DRAWING = r"\x1b\[[0-9;?]*[A-Za-z]|\r"
ON_TERMINAL = re.compile(f"{DRAWING}|{NO_TEXT.pattern}")
IN_FILE = re.compile(rf"\r|{NO_TEXT.pattern}")


class TextStream:
    """A standard stream that writes out what is no text, and takes what is written after its reader
    has gone.

    Attributes:
        lost: the error that ended the writing; None: it goes on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._control_pattern = ON_TERMINAL if stream.isatty() else IN_FILE
        self._keeps = re.compile(DRAWING if stream.isatty() else r"\r")
        self.lost: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, and return how many characters it has."""
        if self.lost is None:
            try:
                self._stream.write(self._encodable(self._control_pattern.sub(self._shown, text)))
            except (OSError, ValueError) as error:  # the latter of a stream that was closed
                self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Have what was written with its reader."""
        if self.lost is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _shown(self, match: re.Match[str]) -> str:
        return match[0] if self._keeps.fullmatch(match[0]) else printable(match[0])

    def _encodable(self, text: str) -> str:
        """Write out what the locale's encoding has no character for."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _lose(self, error: Exception) -> None:
        """Let the descriptor lead nowhere, because Python writes once more as it ends, what
        waits in its buffer.
        """
        self.lost = error
        if isinstance(error, OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Record(logging.LogRecord):
    """What a library logs, as text."""

    def getMessage(self) -> str:  # noqa: N802 - as logging calls it
        return "\n".join(map(printable, super().getMessage().split("\n")))


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    shown = Warning("\n".join(map(printable, str(message).split("\n"))))
    # it is for who uses the command, to whom a line of code says nothing
    if category is UserWarning:
        return f"warning: {shown}\n"
    return _formatted(shown, category, printable(filename), lineno, line)


_formatted = warnings.formatwarning


@contextmanager
def text_streams() -> Iterator[list[TextStream]]:
    """Let the process write text alone to its standard streams, log and warn in such, for the
    length of a `with` block; give the two. A stream that is closed is left out."""
    before = (sys.stdout, sys.stderr)
    factory = logging.getLogRecordFactory()
    form = warnings.formatwarning
    wrapped = [TextStream(stream) if stream is not None else None for stream in before]
    sys.stdout, sys.stderr = wrapped
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _warning
    try:
        yield [stream for stream in wrapped if stream is not None]
    finally:
        for stream in wrapped:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = form


def full(stream: TextStream) -> bool:
    """Whether what was written is lost, though its reader has not gone."""
    return isinstance(stream.lost, OSError) and stream.lost.errno != errno.EPIPE
