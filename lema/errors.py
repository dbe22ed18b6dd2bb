"""Every error a user can meet: what went wrong, where, and how to fix it.

One tree, rooted in `LemaError`. Each class carries the exit code the command line ends with, so a
script can tell a mistyped config from a full disk without reading the message.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "DISTRIBUTION",
    "AdapterError",
    "BackendUnavailable",
    "ConfigError",
    "DataError",
    "DeadRun",
    "DiskError",
    "DiskFull",
    "LemaError",
    "MemoryLimitError",
    "ModelError",
    "NonFiniteError",
    "ReadError",
    "Stopped",
    "WeightsError",
    "installing",
    "listed",
    "message_of",
    "named_in",
    "printable",
    "unreadable",
]

DISTRIBUTION = "lema-lora"  # what an index calls this project; `lema` is another one there
# What the system says of a disk that fails, or of a server of files that is gone, whatever is in
# the file.
FAILING = (
    "EIO",
    "ESTALE",
    "ENXIO",
    "ENODEV",
    "EREMOTEIO",
    "ETIMEDOUT",
    "EHOSTDOWN",
    "ENOTCONN",
    "EUCLEAN",
    "EBADMSG",
)
FAILING_DISK = frozenset(getattr(errno, name) for name in FAILING if hasattr(errno, name))
WHOLE_DISK = (
    "check the disk (dmesg names it) or the network that leads to it, or copy the file from "
    "another place"
)

# Terminals obey these, print them in another order, or print none.
NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# of drivers, and of libraries of kernels that allocate themselves
SAYINGS = ("out of memory", "status_alloc_failed")


def installing(extra: str = "") -> str:
    """Return the command that installs LEMA, with one of its extras."""
    return f'pip install "{DISTRIBUTION}[{extra}]"' if extra else f"pip install {DISTRIBUTION}"


def listed(items: list[str], most: int = 14) -> str:
    """Lines of a list for a message: the first items, as far as they have 125 characters each,
    and how many more.
    """
    lines = [f"\n  - {' '.join(item.split())[:400]}" for item in items]
    shown = next(
        (n for n in range(min(most, len(lines)), 1, -1) if sum(map(len, lines[:n])) <= 125 * most),
        1,
    )
    return "".join(lines[:shown]) + (
        f"\n  and {len(lines) - shown:,} more" if len(lines) > shown else ""
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device is out of memory. The host's memory is not meant (`MemoryError`)."""
    # torch's, which is not imported for the sake of its errors
    named = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, RuntimeError) and (
        named or any(saying in str(error).lower() for saying in SAYINGS)
    )


def message_of(error: Exception) -> str:
    """Return an error's message, with its type if the message may say nothing alone, as in
    `KeyError: 'x'`.
    """
    return (
        str(error)
        if isinstance(error, ValueError | OSError | ImportError)
        else f"{type(error).__name__}: {error}"
    )


def printable(text: str) -> str:
    """Return a text as it may go to a terminal: what is no character there, or a command to it,
    is written out.
    """
    return NO_TEXT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class LemaError(Exception):
    """What went wrong, where (file, key, line, layer), and how to fix it.

    Args:
        what: one sentence saying what is wrong.
        where: the file, key, line, row or layer concerned; empty when there is no one place.
        how: what the user can do about it; empty when nothing can be said.
    """

    exit_code = 1
    max_length = 2000  # characters of each part: what is told of may have millions

    def __init__(self, what: str, *, where: str = "", how: str = "") -> None:
        # Lines of each, so that a message has 20 at most.
        self.what, self.where, self.how = map(self._shortened, (what, where, how), (16, 2, 2))
        super().__init__(self.what)

    def _shortened(self, text: str, most: int) -> str:
        text = printable(text)
        shortened = "\n".join(text.split("\n", most)[:most])[: self.max_length]
        more = len(text) - len(shortened)
        return f"{shortened} ... and {more:,} characters more" if more else text

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.how:
            lines.append(f"  {'next:' if isinstance(self, Stopped) else 'fix: '}  {self.how}")
        return "\n".join(lines)

    def locate(self, where: str) -> None:
        """Name the place more closely than could be told where this was raised."""
        self.where = where

    def explain(self, how: str) -> None:
        """Say more of what the user can do than could be told where this was raised."""
        self.how = how


class ConfigError(LemaError):
    """A setting is unknown, malformed, or contradicts another."""

    exit_code = 2


class BackendUnavailable(ConfigError):
    """The requested backend cannot run here; the message says what is missing."""


class ModelError(ConfigError):
    """The model cannot be streamed, or no module matches the adapter's targets."""


class DataError(LemaError):
    """Training data is missing, malformed, empty, or has nothing to train on."""

    exit_code = 3


class WeightsError(DataError):
    """A model file is missing, damaged, unsafe, or does not hold the tensors the model needs."""


class AdapterError(DataError):
    """An adapter on disk is missing, damaged, or does not fit the model."""


class MemoryLimitError(LemaError):
    """The memory allowed is too small for the work asked."""

    exit_code = 4


class NonFiniteError(LemaError):
    """A loss, gradient or weight became NaN or infinite; the optimizer made no step."""

    exit_code = 5


class DeadRun(LemaError):
    """Training stopped because nothing was learnt for many steps; the checkpoint of before is
    kept.
    """

    exit_code = 5


class DiskError(LemaError):
    """The disk is full, read-only, or failed while writing; what was there before is untouched."""

    exit_code = 6


class DiskFull(DiskError):
    """The disk, or the user's quota of it, is full; what was there before is untouched."""


class ReadError(DiskError):
    """Reading a layer's weights failed, in a prefetch thread or in the training thread."""


class Stopped(LemaError):
    """Training stopped on request, with a checkpoint that resumes."""

    exit_code = 75


def unreadable(
    file: object,
    error: BaseException,
    kind: type[LemaError] = DataError,
    what: str = "",
    how: str = "",
) -> LemaError:
    """Return the error of a file that could not be read: where its disk failed, a `ReadError` that
    says so, because nothing is known of what is in the file; else one of `kind`, with `what` to say
    and `how` to mend it."""
    why = getattr(error, "strerror", None) or error
    numbered = re.search(r"\(os error (\d+)\)", str(error))  # as libraries in Rust say it
    if (int(numbered[1]) if numbered else getattr(error, "errno", None)) in FAILING_DISK:
        return ReadError(
            f"the disk failed while the file was read: {why}", where=str(file), how=WHOLE_DISK
        )
    return kind(what or f"the file cannot be read: {why}", where=str(file), how=how)


@contextmanager
def named_in(source: object) -> Iterator[None]:
    """Add the name of a file to an error that is raised in the block, unless the error names it
    already.
    """
    try:
        yield
    except LemaError as error:
        if source is not None and str(source) not in str(error):
            named = f"{error.where} (named in {source})"
            error.locate(named if error.where else str(source))
        raise
