"""Runs a command line to its end: every error becomes one message and the exit code of its kind."""

import errno
from collections.abc import Sequence

import typer

from lema.cli.misfits import misfit
from lema.cli.streams import full, text_streams
from lema.errors import (
    FAILING_DISK,
    WHOLE_DISK,
    ConfigError,
    DiskError,
    DiskFull,
    LemaError,
    MemoryLimitError,
    Stopped,
    is_out_of_memory,
)
from lema.storage.diskspace import SMALLER_FILES_HINT, is_full, is_too_large

__all__ = ["run"]

_FULL = "free some space; earlier files are untouched"
_DISK_FAILURES = {errno.EROFS: "choose a directory that may be written to"}
_DISK_FAILURES |= dict.fromkeys(FAILING_DISK, WHOLE_DISK)


def run(commands: typer.Typer, arguments: Sequence[str], *, by: str = "") -> int:
    """Run a command line `by` whom; return its exit code. An error is one message on standard
    error, or a traceback. What is printed is text, and a reader who goes away ends the printing
    alone."""
    with text_streams() as streams:
        code = _run(commands, arguments, by)
        for stream in streams:
            stream.flush()
        # Of a run the product is on the disk, of any other command it is what was printed.
        if code == 0 and any(map(full, streams)) and arguments[:1] != ["train"]:
            typer.echo(
                "error: what was printed could not be written; the disk may be full", err=True
            )
            code = DiskError.exit_code
    return code


def _run(commands: typer.Typer, arguments: Sequence[str], by: str) -> int:
    debug = "--debug" in arguments
    try:
        typer.main.get_command(commands).main(
            [a for a in arguments if a != "--debug"], prog_name="lema", obj=by
        )
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception as error:
        if debug:
            raise
        failure = _as_lema_error(error)
        typer.echo(f"{failure}" if isinstance(failure, Stopped) else f"error: {failure}", err=True)
        return failure.exit_code
    return 0


def _as_lema_error(error: Exception) -> LemaError:
    if isinstance(error, LemaError):
        return error
    if is_too_large(error):
        what = "a file became larger than this shell or its filesystem allows"
        return DiskError(what, where=_named(error), how=SMALLER_FILES_HINT)
    if is_full(error):
        return DiskFull("the disk is full", where=_named(error), how=_FULL)
    if isinstance(error, OSError) and error.errno in _DISK_FAILURES:
        return DiskError(str(error.strerror), where=_named(error), how=_DISK_FAILURES[error.errno])
    if isinstance(error, OSError) and error.strerror:
        return ConfigError(str(error.strerror), where=_named(error), how="give another path")
    if is_out_of_memory(error):
        message, *_ = str(error).splitlines() or [""]
        how = "lower prefetch_depth, micro_batch_size or max_length, or set device_memory"
        how += "; `lema plan` shows the memory by part"
        return MemoryLimitError(f"the device is out of memory: {message}", how=how)
    # torch's error is a RuntimeError
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        how = "lower micro_batch_size, host_memory or prefetch_depth"
        return MemoryLimitError("the machine is out of memory", how=how)
    if (unfit := misfit(error)) is not None:
        return unfit
    how = "LEMA does not know this error; run the command with --debug to see where it occurred"
    return LemaError(f"{type(error).__name__}: {error}", how=how)


def _named(error: Exception) -> str:
    return str(getattr(error, "filename", None) or "")
