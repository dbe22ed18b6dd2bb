"""kill -9 at a change of the disk that a verb makes: what bears its name is whole, and the verb,
begun again, ends as the one that nothing disturbed.

`generate --resume` goes on behind the texts that are there; every other verb begins again in the
same place.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from faults import forked
from faults.diskseam import DiskSeam
from faults.outcome import Outcome
from faults.tinymodel import TinyModel, tiny_model

__all__ = ["run"]

FAULT = (
    "kill -9 before, after and within every change of the disk by merge, prepare, shard, "
    "consolidate, report, "
)
FAULT += "generate --resume"
REQUIRED = (
    "no half file has a name that is read; begun again, the same bytes, and nothing beside them"
)
DIED = 0  # a mark
TEXTS = 3


@dataclass(frozen=True)
class Verb:
    """A verb, and where it writes.

    Attributes:
        words: what `lema` is told; `{place}` has the model, the adapter and its shards, and `{out}`
            is where it writes.
        out: the name of what it writes: a file or a directory.
        again: words for when it has been killed.
        grows: whether its file may have its first lines alone.
    """

    words: Sequence[str]
    out: str
    again: Sequence[str] = ()
    grows: bool = False


GENERATE = (
    "generate",
    "{place}/out",
    "--prompts",
    "{place}/prompts.txt",
    "--max-new-tokens",
    "2",
    "--output",
    "{out}",
)
VERBS = {
    "merge": Verb(("merge", "{place}/out", "{out}", "--max-shard-size", "2KB"), "merged"),
    "prepare": Verb(("prepare", "{place}/model", "{out}"), "prepared"),
    "prepare, one file": Verb(("prepare", "{place}/model", "{out}"), "prepared.safetensors"),
    "prepare, quantised": Verb(
        ("prepare", "{place}/model", "{out}", "--quantize", "int8"), "quantised"
    ),
    "shard": Verb(("shard", "{place}/out", "{out}", "--tp", "2"), "shards"),
    "consolidate": Verb(("consolidate", "{place}/shards", "{out}"), "adapter"),
    "report": Verb(("report", "{place}/out", "--output", "{out}"), "page.html"),
    "generate": Verb((*GENERATE, "--batch-size", "1"), "texts.jsonl", ("--resume",), grows=True),
}


def run(count: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Kill every verb at every change; with a count, at so many changes in all, drawn anew for
    each verb in turn.
    """
    began = time.monotonic()
    failures = list[str]()
    cases = 0
    made = tiny_model()
    _prepare(made)
    draw = random.Random(seed)
    for index, (name, verb) in enumerate(VERBS.items()):
        whole, changes = _whole(made, verb)
        number = count // len(VERBS) + (index < count % len(VERBS)) if count else changes
        for at in (
            range(changes) if number >= changes else sorted(draw.sample(range(changes), number))
        ):
            cases += 1
            if wrong := _case(made, verb, whole, at):
                failures.append(f"{name}, killed at change {at} of {changes}: {wrong}")
            if report is not None:
                report(f"{name}, change {at} of {changes}{': ' + wrong if wrong else ''}")
    return Outcome(
        FAULT, REQUIRED, cases, cases - len(failures), tuple(failures), time.monotonic() - began
    )


def _prepare(made: TinyModel) -> None:
    """Write the prompts and the shards that verbs read."""
    (made.place / "prompts.txt").write_text(
        "".join(f"the miller {number}\n" for number in range(TEXTS))
    )
    if not (made.place / "shards").exists():
        words = ["shard", str(made.place / "out"), str(made.place / "shards"), "--tp", "2"]
        ended = forked.run(lambda: _lema(words), made.place / "log")
        if ended.code:
            raise RuntimeError(f"the adapter could not be sharded ({ended.code}): {ended.said}")


def _lema(words: Sequence[str]) -> int:
    from lema.cli.app import app
    from lema.cli.exitcodes import run as run_command

    with contextlib.redirect_stdout(io.StringIO()):
        return run_command(app, list(words))


def _words(made: TinyModel, verb: Verb, place: Path) -> list[str]:
    return [word.format(place=made.place, out=place / verb.out) for word in verb.words]


def _whole(made: TinyModel, verb: Verb) -> tuple[dict[str, str], int]:
    """Return what the verb leaves where nothing disturbs it, and how many changes of the disk it
    makes.
    """
    place = made.fresh()
    told = made.place / "changes.txt"
    ended = forked.warm(
        lambda: _killed(_words(made, verb, place), place, -1, told), made.place / "log"
    )
    if ended.code:
        raise RuntimeError(f"the verb that nothing disturbs ended with {ended.code}: {ended.said}")
    return _left(place), int(told.read_text(encoding="ascii"))


def _killed(words: Sequence[str], place: Path, at: int, told: Path) -> int:
    """Run the verb, and die at a change of the disk below `place`; below 0: count them."""
    seen = 0

    def look(kind: str, path: Path, done: float) -> None:
        nonlocal seen
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    DiskSeam(place, look).install()
    code = _lema(words)
    told.write_text(str(seen), encoding="ascii")
    return code


def _case(made: TinyModel, verb: Verb, whole: dict[str, str], at: int) -> str:
    place = made.fresh()
    log = made.place / "log"
    words = _words(made, verb, place)
    ended = forked.run(lambda: _killed(words, place, at, made.place / "changes.txt"), log)
    if ended.code != -signal.SIGKILL:
        return f"it was not killed, and ended with {ended.code}: {ended.said[-300:]}"
    there = {name: digest for name, digest in _left(place).items() if not name.startswith(".")}
    if there and not verb.grows and there != whole:
        return f"half of it has its name: {sorted(there)}"
    if not there or verb.grows:
        ended = forked.run(lambda: _lema([*words, *verb.again]), log)
        if ended.code:
            return f"begun again it ended with {ended.code}: {ended.said[-300:]}"
        if (left := _left(place)) != whole:
            return f"begun again it left {sorted(left.items() ^ whole.items())[:4]}"
    shutil.rmtree(place)
    return ""


def _left(place: Path) -> dict[str, str]:
    """Return all files below a place, by their names, each as a digest; a report has the time in
    it.
    """
    files = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {str(path.relative_to(place)): sha256(path.read_bytes()).hexdigest() for path in files}
