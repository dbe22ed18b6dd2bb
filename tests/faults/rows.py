"""Broken rows and files of data: each ends in an error that names the file, and the line where
there is one.

What can be wrong with a row is tried on the first line of a file and on the third, as lines of JSON
and in a list.
"""

import csv
import gzip
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from faults.outcome import Outcome
from faults.patience import TooLong, patience
from faults.words import word_tokenizer
from lema.data import prepare_data
from lema.errors import DataError

__all__ = ["forms", "run"]

SECONDS = 20.0  # a million tokens take some
VOCABULARY = 4
TEXT = {"text": "a b"}
USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ASSISTANT]}
TALK = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}
TASK = {"instruction": "a", "output": "b"}
IDS = {"input_ids": [0, 1, 2], "labels": [-100, 1, 2]}


@dataclass(frozen=True)
class Form:
    """A file with something wrong in it.

    Attributes:
        what: is wrong.
        name: of the file.
        content: its bytes; None: nothing is written, or `make` does.
        line: which must be named; None: the file is enough.
        make: makes the file, where bytes do not.
    """

    what: str
    name: str
    content: bytes | None
    line: int | None = None
    make: Callable[[Path], object] | None = None


def message(**changes: Any) -> dict[str, Any]:
    """A chat whose answer says something else; a value of None takes a key away."""
    return {
        "messages": [
            USER,
            {key: one for key, one in (ASSISTANT | changes).items() if one is not None},
        ]
    }


# What the rows before it are, and the broken row.
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "text: null": (TEXT, {"text": None}),
    "text: empty": (TEXT, {"text": ""}),
    "text: blank": (TEXT, {"text": " \n\t"}),
    "text: a number": (TEXT, {"text": 7}),
    "text: a list": (TEXT, {"text": ["a"]}),
    "text: NUL": (TEXT, {"text": "a\0b"}),
    "text: half a character": (TEXT, {"text": "a \ud83d b"}),
    "text: a million tokens": (TEXT, {"text": "a " * 1_000_000}),
    "role: missing": (CHAT, message(role=None)),
    "role: null": (CHAT, {"messages": [USER, {"role": None, "content": "b"}]}),
    "role: a number": (CHAT, message(role=1)),
    "role: a slip": (
        CHAT,
        {"messages": [USER, ASSISTANT, message(role="asistant")["messages"][1]]},
    ),
    "content: missing": (CHAT, message(content=None)),
    "content: null": (CHAT, {"messages": [USER, {"role": "assistant", "content": None}]}),
    "content: a number": (CHAT, message(content=3.5)),
    "content: an object": (CHAT, message(content={"text": "b"})),
    "content: a picture": (CHAT, message(content=[{"type": "image", "url": "x"}])),
    "content: NUL": (CHAT, message(content="b\0")),
    "content: half a character": (CHAT, message(content="\udc00")),
    "messages: empty": (CHAT, {"messages": []}),
    "messages: text": (CHAT, {"messages": "a"}),
    "messages: an object": (CHAT, {"messages": USER}),
    "messages: of text": (CHAT, {"messages": ["a", "b"]}),
    "messages: no answer": (CHAT, {"messages": [USER]}),
    "messages: the answer first": (CHAT, {"messages": [ASSISTANT, USER]}),
    "messages: tools are a number": (CHAT, CHAT | {"tools": 3}),
    "talk: no speaker": (TALK, {"conversations": [{"value": "a"}, {"from": "gpt", "value": "b"}]}),
    "talk: nothing said": (
        TALK,
        {"conversations": [{"from": "human"}, {"from": "gpt", "value": "b"}]},
    ),
    "talk: unknown speaker": (
        TALK,
        {"conversations": [{"from": "dog", "value": "a"}, *TALK["conversations"]]},
    ),
    "talk: a number": (
        TALK,
        {"conversations": [{"from": "human", "value": 1}, {"from": "gpt", "value": "b"}]},
    ),
    "pair: empty completion": (PAIR, PAIR | {"completion": ""}),
    "pair: null completion": (PAIR, PAIR | {"completion": None}),
    "pair: text and a chat": (PAIR, PAIR | {"completion": [ASSISTANT]}),
    "pair: a number": (PAIR, PAIR | {"prompt": 3}),
    "pair: the user completes": (PAIR, {"prompt": [USER], "completion": [USER]}),
    "task: empty output": (TASK, TASK | {"output": " "}),
    "task: a number": (TASK, TASK | {"instruction": 3}),
    "task: input a list": (TASK, TASK | {"input": ["a"]}),
    "ids: negative": (IDS, IDS | {"input_ids": [0, -1, 2]}),
    "ids: beyond the vocabulary": (IDS, IDS | {"input_ids": [0, 4, 2]}),
    "ids: enormous": (IDS, IDS | {"input_ids": [0, 2**70, 2]}),
    "ids: fractions": (IDS, IDS | {"input_ids": [0.0, 1.0, 2.0]}),
    "ids: true": (IDS, IDS | {"input_ids": [True, 1, 2]}),
    "ids: text": (IDS, IDS | {"input_ids": ["0", "1", "2"]}),
    "ids: null": (IDS, IDS | {"input_ids": [0, None, 2]}),
    "ids: NaN": (IDS, IDS | {"input_ids": [0, float("nan"), 2]}),
    "ids: a table": (IDS, IDS | {"input_ids": [[0, 1, 2]]}),
    "ids: empty": (IDS, IDS | {"input_ids": []}),
    "ids: a number": (IDS, IDS | {"input_ids": 5}),
    "ids: an object": (IDS, IDS | {"input_ids": {"0": 1}}),
    "ids: only one": (IDS, {"input_ids": [1], "labels": [1]}),
    "labels: too few": (IDS, IDS | {"labels": [1, 2]}),
    "labels: too many": (IDS, IDS | {"labels": [0, 1, 2, 2]}),
    "labels: all masked": (IDS, IDS | {"labels": [-100] * 3}),
    "labels: only the first": (IDS, IDS | {"labels": [0, -100, -100]}),
    "labels: another mask": (IDS, IDS | {"labels": [-1, 1, 2]}),
    "labels: beyond the vocabulary": (IDS, IDS | {"labels": [0, 1, 9]}),
    "labels: fractions": (IDS, IDS | {"labels": [-100.0, 1.0, 2.0]}),
    "mask: too short": (IDS, IDS | {"attention_mask": [1]}),
    "mask: all padding": (IDS, IDS | {"attention_mask": [0, 0, 0]}),
    "schema: no columns": (TEXT, {}),
    "schema: unknown columns": (TEXT, {"txt": "a", "n": 1}),
    "schema: a list": (TEXT, [TEXT]),
    "schema: a number": (TEXT, 3),
    "schema: text": (TEXT, "a"),
    "schema: null": (TEXT, None),
}
# What stands in a line in the place of JSON.
RAW: dict[str, bytes] = {
    "JSON: cut off": b'{"text": "a',
    "JSON: single quotes": b"{'text': 'a'}",
    "JSON: a comma too many": b'{"text": "a",}',
    "JSON: a name twice": b'{"text": "a", "text": "b"}',
    "JSON: a control character": b'{"text": "a\x01"}',
    "JSON: nested too deep": b'{"text": ' + b"[" * 100_000,
    "JSON: thousands of digits": b'{"text": ' + b"9" * 5000 + b"}",
    "bytes: NUL": b'{"text": "a\0"}',
    "bytes: not UTF-8": b'{"text": "caf\xe9"}',
    "bytes: half a character": b'{"text": "\xed\xa0\x80"}',
    "bytes: a mark within": b'\xef\xbb\xbf\xef\xbb\xbf{"text": "a"}',
    "bytes: binary": bytes(range(1, 32)),
}
OTHER = "schema: another kind than the rows before"
TABLES: dict[str, tuple[list[list[str]], int]] = {
    "no column to train on": ([["a", "b"], ["1", "2"]], 2),
    "a cell too many": ([["text"], ["a"], ["a", "b"]], 3),
    "a cell too few": ([["prompt", "completion"], ["a", "b"], ["a"]], 3),
    "an empty cell": ([["text", "n"], ["a", "1"], ["", "2"]], 3),
    "a column twice": ([["text", "text"], ["a", "b"]], 1),
    "a column without a name": ([["text", ""], ["a", "b"]], 1),
    "ids that are no list": ([["input_ids"], ["[0, 1]"], ["0 1"]], 3),
    "ids that are text": ([["input_ids"], ["[0, 1]"], ['["0"]']], 3),
    "messages that are no JSON": ([["messages"], [json.dumps([USER, ASSISTANT])], ["{'role'}"]], 3),
}


def forms() -> Iterator[Form]:
    """Yield every broken file there is, those of one kind after those of another."""
    for what, (good, bad) in ROWS.items():
        for before in (0, 2):
            texts = [json.dumps(row) for row in [good] * before + [bad]]
            yield Form(what, "rows.jsonl", "\n".join(texts).encode() + b"\n", before + 1)
            if what != "text: a million tokens":
                yield Form(what, "rows.json", ("[" + ",\n".join(texts) + "]").encode(), before + 1)
    for what, raw in RAW.items():
        for before in (0, 2):
            good = json.dumps(TEXT).encode() + b"\n"
            yield Form(what, "rows.jsonl", good * before + raw + b"\n", before + 1)
    for bad in (PAIR, TASK, CHAT, TALK, IDS):
        yield Form(OTHER, "rows.jsonl", f"{json.dumps(TEXT)}\n{json.dumps(bad)}\n".encode(), 2)
    for what, (table, line) in TABLES.items():
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(table)
        yield Form(what, "rows.csv", written.getvalue().encode(), line)
    yield Form("a quote that is not closed", "rows.csv", b'text\nfine\n"never\n', 3)
    yield Form("a NUL in a table", "rows.csv", b"text\nfine\na\0\n", 3)
    yield Form("a table that is not UTF-8", "rows.csv", b"text\ncaf\xe9\n", 2)
    yield Form("a text with a NUL", "rows.txt", b"fine\na\0b\n", 2)
    yield Form("a text that is not UTF-8", "rows.txt", b"fine\ncaf\xe9\n", 2)
    yield from _files()


def _files() -> Iterator[Form]:
    for kind in ("jsonl", "json", "csv", "txt", "parquet"):
        yield Form("nothing in the file", f"rows.{kind}", b"")
        yield Form("no such file", f"rows.{kind}", None)
        yield Form("a pipe", f"rows.{kind}", None, make=os.mkfifo)
    for kind in ("jsonl", "json", "csv", "txt"):
        yield Form("only blank lines", f"rows.{kind}", b"\n \n\n")
        yield Form("only a mark", f"rows.{kind}", b"\xef\xbb\xbf")
        yield Form("UTF-16", f"rows.{kind}", '{"text": "a"}\n'.encode("utf-16"), 1)
        yield Form("compressed", f"rows.{kind}", gzip.compress(b'{"text": "a"}\n'), 1)
        yield Form("a device", f"rows.{kind}", None, make=lambda file: file.symlink_to("/dev/zero"))
    yield Form("only the names of the columns", "rows.csv", b"text\n")
    yield Form("an empty list", "rows.json", b"[]")
    yield Form("of a kind that is not read", "rows.jsonl.gz", b"")
    yield Form("a directory without data", "rows", None, make=Path.mkdir)
    yield Form("of a kind that could run code", "rows.pkl", b"")
    for what, table in {
        "no column to train on": {"n": [1, 2]},
        "a null": {"text": ["a", None]},
        "numbers for text": {"text": [1, 2]},
        "fractions for ids": {"input_ids": [[0.5, 1.0]]},
    }.items():
        yield Form(what, "rows.parquet", _parquet(table), 2 if what == "a null" else 1)
    whole = _parquet({"text": ["a b"] * 50})
    yield Form("cut off", "rows.parquet", whole[:-20], 1)
    yield Form("zeroed", "rows.parquet", b"\0" * len(whole), 1)
    yield Form("pages damaged", "rows.parquet", whole[:4] + b"\xff" * 60 + whole[64:], 1)


def _parquet(columns: dict[str, Any]) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return bytes(out.getvalue())


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Read `count` broken files, spread over all there are; there are more than 200, and not more
    than all are read.

    Args:
        count: of files.
        seed: which of them comes first.
        report: is told of each failure.
    """
    started = time.perf_counter()
    failures = []
    every = list(forms())
    step = max(1, len(every) // count)
    chosen = every if count >= len(every) // 2 else every[seed % step :: step]
    tokenizer = word_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        for number, form in enumerate(chosen):
            place = Path(name) / str(number)
            place.mkdir()
            wrong = _ending(form, place / form.name, tokenizer)
            if wrong is not None:
                failures.append(f"{form.what} in {form.name}, line {form.line}: {wrong}")
                if report is not None:
                    report(failures[-1])
    return Outcome(
        "broken data rows and files",
        "an error that names file and line",
        len(chosen),
        len(chosen) - len(failures),
        tuple(failures),
        time.perf_counter() - started,
    )


def _ending(form: Form, file: Path, tokenizer: Any) -> str | None:
    """What is wrong with how it ended; None: nothing."""
    if form.content is not None:
        file.write_bytes(form.content)
    if form.make is not None:
        form.make(file)
    try:
        with patience(SECONDS):
            prepare_data(file, tokenizer, max_length=64, overlong="error", vocab_size=VOCABULARY)
    except DataError as error:
        where = f"{file}:{form.line}"
        anywhere = form.line is None and error.where.startswith(str(file))
        named = anywhere or error.where == where or error.where.startswith(f"{where},")
        return None if named else f"says {error.where}: {error.what}"
    except TooLong:
        return f"took more than {SECONDS} s"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "was taken"
