"""llama.cpp's programs where the user has them: they are located, run, and their last lines are in
the error where one fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from lema.errors import ConfigError, DiskFull, LemaError, ModelError, printable
from lema.storage.regular import expanded

__all__ = ["CONVERTER", "LORA_CONVERTER", "QUANTIZER", "VARIABLE", "locate", "run_program"]

CONVERTER = "convert_hf_to_gguf.py"
LORA_CONVERTER = "convert_lora_to_gguf.py"
QUANTIZER = "llama-quantize"
VARIABLE = "LLAMA_CPP"
"""The environment variable that names the directory of llama.cpp."""

# Where in a directory of llama.cpp its programs are: of its sources, of a build, or of the sources
# of llama-cpp-python, which have llama.cpp in `vendor`.
FOLDERS = (
    ".",
    "build/bin",
    "bin",
    "build/bin/Release",
    "vendor/llama.cpp",
    "vendor/llama.cpp/build/bin",
)
SOURCES = (
    "git clone https://github.com/ggml-org/llama.cpp, or unpack what `pip download --no-deps "
    "--no-binary llama-cpp-python llama-cpp-python` brings; then --llama-cpp DIR or "
    f"{VARIABLE}=DIR names the directory"
)
BUILD = (
    f"in llama.cpp's directory: cmake -B build, then cmake --build build --target {QUANTIZER}; "
    "q8_0, f16, bf16 and f32 need no such program"
)
MOST_LINES = 12  # of a program's output, for an error
LINE_LENGTH = 140
TRACE = re.compile(r"\s|Traceback \(most recent")  # where in a script an exception came from
FULL = re.compile(r"No space left on device|Disk quota exceeded")
# What a program says, by what the user can do about it.
REMEDIES = (
    (
        re.compile(r"No module named '(?P<name>gguf|sentencepiece|google|yaml|tqdm|requests)['.]"),
        "pip install gguf sentencepiece protobuf",
    ),
    (
        re.compile(r"pre-tokenizer was not recognized"),
        "llama.cpp has a list of the tokenizers that it reproduces, and this one is not in it; a "
        "newer llama.cpp may have it, and --adapter alone needs none",
    ),
    (
        re.compile(r"is not supported|not supported by|Architecture .* not supported"),
        "a newer llama.cpp may convert models of this type",
    ),
)
NO_REMEDY = "read its last lines above; a newer llama.cpp may convert this model"


def locate(program: str, directory: Path | None) -> Path:
    """Return where a program of llama.cpp is.

    Args:
        program: `CONVERTER`, `LORA_CONVERTER` or `QUANTIZER`.
        directory: of llama.cpp, as the user names it; None: the one that the environment variable
            `LLAMA_CPP` names. Programs on the PATH are taken, too.

    Raises:
        ConfigError: it is not there; the error says how to get it.
    """
    named = directory or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    names = (program, f"{program}.exe") if program == QUANTIZER else (program,)
    folders = [] if named is None else [expanded(named) / folder for folder in FOLDERS]
    # a script on the PATH need not be marked as a program
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for folder in folders:
        for name in names:
            if _is_file(folder / name):
                return (folder / name).resolve()
    what = f"llama.cpp's {program} is needed, and is not here"
    where = "the PATH" if named is None else f"{named} and the PATH"
    raise ConfigError(what, where=where, how=BUILD if program == QUANTIZER else SOURCES)


def _is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def run_program(
    program: Path,
    arguments: Sequence[str | Path],
    show: Callable[[str], object] = lambda _: None,
) -> None:
    """Run a program of llama.cpp until it ends; a script is run by this Python.

    Args:
        program: where it is.
        arguments: of its command line.
        show: takes each line that it prints, with the sign that ends it: a newline, or the carriage
            return of a progress bar.

    Raises:
        DiskFull: the disk was full.
        ModelError: it failed; its last lines are in the error.
    """
    command = [sys.executable] if program.suffix == ".py" else []
    command += [str(program), *map(str, arguments)]
    # Nothing is fetched: a tokenizer may name code of the hub, and the converters trust it.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    lines = deque[str](maxlen=MOST_LINES)
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        assert started.stdout is not None
        for line, end in _lines(started.stdout):
            show(line + end)
            if line.strip() and not TRACE.match(line):
                lines.append(line)
        code = started.wait()
    finally:
        started.kill()  # where an exception came first; a program that has ended is not disturbed
        started.wait()
        if started.stdout is not None:
            started.stdout.close()
    if code:
        raise _failure(program, code, list(lines))


def _lines(stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield what a program prints in lines, each with the sign that ended it."""
    text = b""
    while chunk := os.read(stream.fileno(), 1 << 16):
        pieces = re.split(rb"(\r\n|\n|\r)", text + chunk)
        text = pieces.pop()
        for line, end in zip(pieces[::2], pieces[1::2], strict=True):
            yield printable(line.decode("utf-8", "replace")), end.decode()
    if text:
        yield printable(text.decode("utf-8", "replace")), "\n"


def _failure(program: Path, code: int, lines: list[str]) -> LemaError:
    output = "\n".join(lines)
    ended = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    shown = "".join(f"\n  {line[:LINE_LENGTH]}" for line in lines)
    what = f"{program.name} {ended}; its last lines:{shown}" if lines else f"{program.name} {ended}"
    if FULL.search(output):
        return DiskFull(what, where=str(program), how="free space, or choose another directory")
    how = next((remedy for pattern, remedy in REMEDIES if pattern.search(output)), NO_REMEDY)
    return ModelError(what, where=str(program), how=how)
