"""Every verb with every option at its edges: numbers, texts, paths, links and devices, and settings
beside them.

Each case is one command line, drawn from the seed and its number. It must end with the exit code of
its kind in a sentence, touch nothing outside of its own directory, and leave neither processes nor
sockets.
"""

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer

from faults import watch
from faults.extremes import LENGTHS, VALUES
from faults.outcome import Outcome
from faults.patience import TooLong, patience
from faults.tinymodel import TinyModel, tiny_model
from faults.touched import Touched, orphans
from lema.cli.app import app
from lema_tools.doctor.machine import LAUNCHED

__all__ = ["LINES", "run", "verbs"]

REQUIRED = "exit code of its kind in a sentence; nothing touched outside, nothing left running"
WALL = 240.0  # seconds that a command may wait

# Command lines that succeed and take little time, by verb.
LINES: Mapping[str, tuple[str, ...]] = {
    "train": ("{config}",),
    "plan": ("{config}", "--profile", "cpu"),
    "backends": (),
    "consolidate": ("{adapter}", "whole"),
    "data": ("{config}",),
    "chat": ("{adapter}", "--max-new-tokens", "2"),
    "demo": ("{file}",),
    "doctor": ("--quick", "--directory", "{empty}"),
    "eval": ("{adapter}", "--data", "{rows}"),
    "generate": ("{adapter}", "--prompt", "a", "--max-new-tokens", "2"),
    "init": (
        "{model}",
        "--device-memory",
        "1GB",
        "--data",
        "{rows}",
        "--output",
        "new.yaml",
        "--profile",
        "cpu",
    ),
    "export": ("{adapter}", "exported", "--for", "vllm"),
    "merge": ("{adapter}", "merged"),
    "models": ("{model}",),
    "prepare": ("{model}", "prepared"),
    "profile": ("{config}", "--steps", "1"),
    "prove": (
        *("{model}", "--steps", "1", "--tokens", "8", "--micro-batches", "1"),
        *("--rank", "2", "--output", "proof"),
    ),
    "report": ("{run}",),
    "serve-learner": ("{model}", "--set", "device=cpu", "--max-length", "32", "--check"),
    "shard": ("{adapter}", "shards", "--tp", "2"),
    "watch": ("{run}", "--once"),
    "config show": ("{config}",),
    "config schema": (),
    "config import": ("{config}",),
}
SLOW = {"prove", "doctor", "profile"}  # of which one in ten is run

NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "0.5",
    "-0.0",
    "1e-300",
    "5e-324",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-1e308",
    "1e400",
    "1_000",
    "0x10",
    "\uff11",
    "1e",
    "1.",
]
NUMBERS += [str(2**64), str(-(2**64)), str(2**63 - 1), "1" * 400]
LARGE = ["100000", str(2**31 - 1), str(2**31), str(2**32 - 1), str(2**32), "1e9"]
TEXTS = [
    "",
    " ",
    "a" * 10**6,
    "a/" * 3000,
    "\x1b[31mred",
    "\x07",
    "\u202egnp",
    "\udcff",
    "é",
    "\n",
    "a\rb",
    "\u2028",
]
TEXTS += [
    "-",
    "--",
    "=",
    "{}",
    "[",
    "%s",
    "$HOME",
    "~nosuchuser/x",
    "none",
    "auto",
    "cpu",
    "nosuch",
    "a,b",
    "hub:x",
    "*",
]
PLACES = [
    "{link}",
    "{nowhere}",
    "{linked}",
    "{device}",
    "{full}",
    "{pipe}",
    "{rows}",
    "{model}",
    "{adapter}",
    "{run}",
    "{config}",
    "{empty}",
]
PLACES += ["{file}", "{file}/x", ".", "..", "../x", "x/y/z", "/proc/self/status"]
EDGES = {"number": NUMBERS, "large": LARGE, "text": TEXTS, "place": PLACES}
# A demo takes half a minute, so its directory is always one that is refused.
NO_DEMO = ["{file}", "{file}/x", "{device}", "{link}", "{pipe}", "/proc/self/status", "a" * 10**6]
# Options that say how much is done: what is large takes as long as it says.
AMOUNTS = {
    "--steps",
    "--tokens",
    "--micro-batches",
    "--rank",
    "--max-new-tokens",
    "--limit",
    "--batch-size",
    "--rows",
}
WRITTEN = {"--output", "--trace", "--plot", "--merged"}  # options that name what is written
# Directories that may be written into where a user names them: a copy, and one that no link leads
# to, take their place.
NAMED = {"{adapter}": "{run}", "{linked}": "{empty}"}
# Options that name a directory whose disk is measured, by writing to it: also where others do not
# write, because it is not empty.
MEASURED = {"--directory"}
# settings that name a place to write to, always one of the case
OUTPUTS = {
    "output_dir",
    "offload_dir",
    "data_cache",
}


@cache
def verbs() -> Mapping[str, Any]:
    """Return the commands of the whole command line, by their words."""
    return dict(_commands(typer.main.get_command(app), ""))


def _commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, one in inner.items():
        yield from _commands(one, f"{words} {name}".strip())


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Run `count` command lines, of all verbs in turn."""
    started = time.perf_counter()
    made = tiny_model()
    names = list(LINES)
    # what Python writes beside its modules is not the command's doing
    sys.dont_write_bytecode = True
    _make_kept(made)

    def case(number: int) -> str:
        draw = Random(f"{seed}:{number}")
        verb = names[number % len(names)]
        if verb in SLOW and draw.random() < 0.9:
            verb = draw.choice([name for name in names if name not in SLOW])
        place = made.fresh()
        words = _line(verb, made, place, draw)
        try:
            wrong = _run(words, made, place)
        except TooLong as late:
            wrong = f"took more than {late}"
        os.chdir(made.place)
        shutil.rmtree(place, ignore_errors=True)
        return wrong and f"seed {seed}, {' '.join(word[:60] for word in words)!r}: {wrong}"

    with _alone():
        seen = watch.watched(count, case, made.place, report, growth=None)
    if (left := orphans()) != []:
        seen = replace(seen, failures=(*seen.failures, *left))
    return watch.outcome("every option of every verb at its edges", REQUIRED, count, seen, started)


@contextmanager
def _alone() -> Iterator[None]:
    """Let commands find nothing of a launcher in the environment in a `with` block: a group of
    processes has sockets until the process ends."""
    told = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(told)


def _make_kept(made: TinyModel) -> None:
    """Make what links lead to, and what no command may touch."""
    kept = made.place / "kept"
    kept.mkdir(exist_ok=True)
    (kept / "private.txt").write_text("private\n", encoding="utf-8")


def _places(made: TinyModel, place: Path) -> dict[str, str]:
    """Make the files of a case; return them by the names that lines have for them."""
    kept = made.place / "kept"
    work = place / "work"
    for name in ("work", "home", "cache", "tmp", "empty"):
        (place / name).mkdir()
    shutil.copytree(made.place / "out", place / "run")
    (place / "file").write_text("a: b\n", encoding="utf-8")
    (place / "link").symlink_to(kept / "private.txt")
    (place / "linked").symlink_to(kept)
    (place / "nowhere").symlink_to(kept / "nothing.txt")
    os.mkfifo(place / "pipe")
    names = {
        name: str(place / name)
        for name in ("run", "file", "link", "linked", "nowhere", "empty", "pipe")
    }
    # as /dev/null and /dev/full; a file where nobody may make one
    for name, minor in (
        ("device", 3),
        ("full", 7),
    ):
        try:
            os.mknod(place / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        except PermissionError:
            (place / name).touch()
        names[name] = str(place / name)
    names |= {"model": str(made.place / "model"), "adapter": str(made.place / "out")}
    names |= {"rows": str(made.place / "rows.jsonl"), "config": str(made.config(place))}
    os.chdir(work)
    return names


def _line(verb: str, made: TinyModel, place: Path, draw: Random) -> list[str]:
    """Return the words of a case: the line of a verb with one to three changes."""
    names = _places(made, place)
    line = list(LINES[verb])
    options = [
        one
        for one in verbs()[verb].params
        if one.param_type_name == "option" and one.name != "help"
    ]
    arguments = [
        at
        for at, word in enumerate(line)
        if word[:2] != "--" and (at == 0 or line[at - 1][:2] != "--")
    ]
    if verb == "demo":
        line = [draw.choice(NO_DEMO)]
        arguments = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if arguments and (not options or draw.random() < 0.15):
            at = draw.choice(arguments)
            value = _value("", draw)
            # into a directory that a user names, whatever is there
            written = at > 0 or verb == "report"
            line[at] = NAMED.get(value, value) if written else value
        elif options:
            _change(line, draw.choice(options), draw)
        else:
            line.append(draw.choice(("--nosuch", "-h", _value("", draw))))
    return [*verb.split(), *(_filled(word, names) for word in line)]


def _change(line: list[str], option: Any, draw: Random) -> None:
    """Give an option a value at an edge, in its place or at the end."""
    name = draw.choice(option.opts)
    if option.is_flag:
        line.append(name)
    elif name == "--set":
        line += ["--set", _setting(draw)]
    elif name in line[:-1] and draw.random() < 0.8:
        line[line.index(name) + 1] = _value(name, draw)
    elif draw.random() < 0.1:
        line.append(name)  # without a value
    else:
        line += (
            [name, _value(name, draw)] if draw.random() < 0.8 else [f"{name}={_value(name, draw)}"]
        )


def _setting(draw: Random) -> str:
    from lema.config import LemaConfig

    name = draw.choice([one for one in LemaConfig.defaults() if one not in LENGTHS])
    if name in OUTPUTS:
        place = draw.choice(PLACES)
        return f"{name}={NAMED.get(place, place)}"
    value = draw.choice(VALUES) if draw.random() < 0.7 else _value("", draw)
    return f"{name}={value}"


def _value(name: str, draw: Random) -> str:
    kinds = ["number", "text", "place"] + ["large"] * (name not in AMOUNTS)
    value = draw.choice(EDGES[draw.choice(kinds)])
    # A pipe that a user names is waited for, as `lema train <(...)` needs it; nothing is written
    # onto one. And a file that a command does not read may be what a user wants to have written
    # anew.
    if value == ("{rows}" if name in WRITTEN else "{pipe}"):
        return "{file}"
    return _of_the_case(name, value)


def _of_the_case(option: str, value: str) -> str:
    """Return the place of the case that is named in the place of another one, if the option says
    where to write.
    """
    if option in MEASURED and value == "{model}":
        return "{run}"
    return NAMED.get(value, value) if option in WRITTEN | MEASURED else value


def _filled(word: str, names: Mapping[str, str]) -> str:
    for name, path in names.items():
        word = word.replace(f"{{{name}}}", path)
    return word


def _run(words: list[str], made: TinyModel, place: Path) -> str:
    """Run a command line; say what is wrong with how it ended, or with what it touched."""
    touched = Touched(place, made.place, made.place / "cases")
    with _at_home(place), touched.watched(), patience(WALL, waiting=True):
        wrong = watch.command(*words)
    return "; ".join(filter(None, (wrong, touched.said())))


@contextmanager
def _at_home(place: Path) -> Iterator[None]:
    """Have a home, a cache and temporary files in the directory of a case."""
    given = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "MPLCONFIGDIR": "cache"}
    before = {name: os.environ.get(name) for name in given}
    directory = tempfile.tempdir
    os.environ.update({name: str(place / one) for name, one in given.items()})
    tempfile.tempdir = None
    try:
        yield
    finally:
        tempfile.tempdir = directory
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
