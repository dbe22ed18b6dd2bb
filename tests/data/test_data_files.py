"""Every format gives the same rows, each with its line; every broken file and row is named."""

import gzip
import json
import re
import resource
import sys
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from faults.words import word_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lema.data import load_rows, prepare_data
from lema.data.files import pieces_of
from lema.data.sets.sources import find_files
from lema.errors import DataError

ROWS = [
    {"prompt": "a, b", "completion": 'say "x"\nand y'},
    {"prompt": "é\u2028ü", "completion": "z"},
]
CODECS = {"gzip": ".gz", "zstd": ".zst"}


def compressed(text, codec):
    return pa.compress(text.encode(), codec=codec, asbytes=True)


def write_arrow(path, rows, form):
    table = pa.Table.from_pylist(rows)
    with form(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=1500)
    return path


def test_formats_give_the_same_rows(write, tmp_path):
    write("a.jsonl", ROWS)
    write("b.json", json.dumps(ROWS, indent=1))
    write("c.json", "\n".join(json.dumps(row) for row in ROWS))
    write("d.csv", 'prompt,completion\n"a, b","say ""x""\nand y"\né\u2028ü,z\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "e.parquet")
    write_arrow(tmp_path / "f.arrow", ROWS, pa.ipc.new_stream)
    write_arrow(tmp_path / "g.arrow", ROWS, pa.ipc.new_file)
    for codec, ending in CODECS.items():
        write(
            f"h.jsonl{ending}", compressed("".join(f"{json.dumps(row)}\n" for row in ROWS), codec)
        )
    for file in sorted(tmp_path.iterdir()):
        assert [dict(row.values) for row in load_rows(file)] == ROWS, file.name


def test_origins_are_lines(write, tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "e.parquet")
    expected = {
        write("a.jsonl", '{"text": "a"}\n\n   \r\n{"text": "b"}'): [1, 4],
        write("b.json", '\n[\n  {"text":\n "a"},\n\n  {"text": "b"}\n]\n'): [3, 6],
        write("c.json", '{"text": "a"}\n{"text": "b"}\n'): [1, 2],
        write("d.csv", 'text,n\n"a\nb",1\n\nc,2\n'): [2, 5],
        write("e.txt", "one\n\ntwo\n"): [1, 3],
        tmp_path / "e.parquet": [1, 2],
        write("f.txt.gz", compressed("one\n\ntwo\n", "gzip")): [1, 3],
        write("g.jsonl.zst", compressed('{"text": "a"}\n\n   \r\n{"text": "b"}', "zstd")): [1, 4],
        write_arrow(tmp_path / "h.arrow", ROWS, pa.ipc.new_stream): [1, 2],
    }
    for file, lines in expected.items():
        rows = load_rows(file)
        assert [row.line for row in rows] == lines, file.name
        assert [row.origin for row in rows] == [f"{file}:{line}" for line in lines]


def test_txt_is_one_row_per_line(write):
    assert [
        row.values["text"] for row in load_rows(write("a.txt", "one \r\ntwo\u2028three\n"))
    ] == [
        "one ",
        "two\u2028three",
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_utf8_mark_is_taken_off(write, name):
    body = {"a.csv": "text\nhello\n", "a.txt": "hello\n"}.get(name, '{"text": "hello"}\n')
    [row] = load_rows(write(name, b"\xef\xbb\xbf" + body.encode()))
    assert row.values == {"text": "hello"}


def test_a_long_csv_cell_is_read_whole(write):
    long = "x" * 300_000
    [row] = load_rows(write("a.csv", f"text\n{long}\n"))
    assert row.values["text"] == long


BROKEN = {
    "cut off": ("a.jsonl", '{"text": "a"}\n{"text": "b\n', 2, "not JSON"),
    "cut off after a colon": ("a.jsonl", '{"text":\n"b"}\n', 1, "not JSON"),
    "two on a line": ("a.jsonl", '{"text": "a"} {"text": "b"}\n', 1, "more than one"),
    "not an object": ("a.jsonl", '{"text": "a"}\n"b"\n', 2, "must be a JSON object"),
    "array in jsonl": ("a.jsonl", '[{"text": "a"}]\n', 1, "belongs in a .json file"),
    "mark within": ("a.jsonl", b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n', 2, "not JSON"),
    "NUL": ("a.jsonl", b'{"text": "a"}\n\n{"text": "\0"}\n', 3, "NUL byte in column 11"),
    "NUL in txt": ("a.txt", b"one\ntwo\0\n", 2, "NUL byte"),
    "latin-1": ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', 2, "0xe9 in column 14"),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), 1, "UTF-16"),
    "UTF-16 without a mark": ("a.csv", "text\nab\n".encode("utf-16-le"), 1, "UTF-16"),
    "digits": ("a.jsonl", '{"text": ' + "9" * 5000 + "}\n", 1, "not usable JSON"),
    "json: comma": ("a.json", '[\n{"text": "a"}\n{"text": "b"}]', 3, "lacks a comma"),
    "json: cut": ("a.json", '[\n{"text": "a"},\n{"text": "b"', 3, "not JSON"),
    "json: no end": ("a.json", '[\n{"text": "a"},\n{"text": "b"}\n', 4, "is incomplete"),
    "json: more": ("a.json", '[{"text": "a"}]\n{}', 1, "followed by"),
    "json: inner": ("a.json", '[{"text": "a"},\n{"text": \nb}]', 3, "not JSON"),
    "json: number": ("a.json", '[{"text": "a"},\n3]', 2, "must be a JSON object"),
    "csv: cells": (
        "a.csv",
        "prompt,completion\na,b\nc,d,e\n",
        3,
        "3 cells in a row under 2 columns",
    ),
    "csv: too few": ("a.csv", "prompt,completion\na\n", 2, "1 cells"),
    "csv: quote": ("a.csv", 'text\nfine\n"never closed\n\n', 3, "not CSV"),
    "csv: repeated": ("a.csv", "text,text\na,b\n", 1, "repeated"),
    "csv: nameless": ("a.csv", "text,\na,b\n", 1, "empty or repeated"),
    "parquet": ("a.parquet", b"PAR1 and nothing else", 1, "not a whole parquet file"),
    "parquet: empty": ("a.parquet", b"", 1, "not a whole parquet file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rows_are_named(write, case):
    name, content, line, message = BROKEN[case]
    path = write(name, content)
    with pytest.raises(DataError, match=re.escape(f"{path}:{line}")) as caught:
        load_rows(path)
    assert message in str(caught.value)


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "word " * 50}] * 100), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a whole parquet file"):
        load_rows(path)


def test_rows_that_are_packed_by_gzip_need_no_library(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = write(
        "f.jsonl.gz", gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "two"}\n')
    )
    assert [row.values["text"] for row in load_rows(file)] == ["one", "two"]
    for broken in (file.read_bytes()[:-9], b"no such file", file.read_bytes()[:20] + bytes(30)):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"not a whole gz file|cannot be read") as caught:
            list(load_rows(file))
        assert str(file) in caught.value.where


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_file_that_needs_a_library_that_is_not_installed_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(b"rows")
    with pytest.raises(DataError, match="needs the library `pyarrow`") as raised:
        load_rows(tmp_path / name)
    assert raised.value.where == str(tmp_path / name)
    assert raised.value.how == 'pip install "lema-lora[parquet]"'
    (tmp_path / "b.txt").write_text("a row")
    assert len(load_rows(tmp_path / "b.txt")) == 1


@pytest.mark.parametrize("form", ["stream", "file", "gzip", "zstd"])
def test_a_file_that_was_cut_off_is_named(write, tmp_path, form):
    rows = [{"text": f"{n} word " * 50} for n in range(4000)]
    if form in CODECS:
        path = write(
            f"a.jsonl{CODECS[form]}",
            compressed("".join(f"{json.dumps(row)}\n" for row in rows), form),
        )
    else:
        path = write_arrow(tmp_path / "a.arrow", rows, getattr(pa.ipc, f"new_{form}"))
    assert [row.values for row in load_rows(path)] == rows
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"a\.(arrow:|jsonl\.)"):
        load_rows(path)


@pytest.mark.parametrize("codec", CODECS)
def test_lines_that_unpack_to_hundreds_of_times_their_file_are_refused(write, codec):
    """What is allowed is 4 MiB and 150 times the file, a row counted with 100 bytes more; no row
    of it is given out.
    """
    line = f"{'ab ' * 100}\n"
    harmless, bomb = (
        write(f"{n}.txt{CODECS[codec]}", compressed(line * n, codec)) for n in (9_000, 40_000)
    )
    assert sum(len(piece.content) for _, piece in pieces_of(harmless)) == len(line) * 9_000
    with pytest.raises(DataError, match="unpacks to hundreds of times its size") as caught:
        next(pieces_of(bomb))
    assert caught.value.where == str(bomb)
    assert caught.value.exit_code == 3


def test_columns_that_stand_for_more_memory_than_a_file_may_are_refused(tmp_path):
    """A dictionary of one long text stands for any number of them, which would be 800 MB at
    once.
    """
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": pa.array(["word " * 3_400_000] * 47)}), path, compression="zstd"
    )
    assert path.stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="unpacks to hundreds of times its size") as caught:
        load_rows(path)
    assert caught.value.where == str(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.json", "[]"), ("a.csv", "text\n"), ("a.txt", "\n")]
)
def test_a_file_without_rows_is_named(write, name, content):
    path = write(name, content)
    write("good.jsonl", ROWS)
    with pytest.raises(DataError, match="holds no rows") as caught:
        load_rows([path.parent / "good.jsonl", path])
    assert caught.value.where == str(path)


def test_directories_and_globs_have_a_fixed_order(write, tmp_path):
    for name in (
        "d/b.jsonl",
        "d/a.csv",
        "d/.hidden.jsonl",
        "d/README.md",
        "d/a.json.gz",
        "d/deep/c.jsonl",
        "e/a.jsonl",
    ):
        write(name, ROWS)
    assert [p.name for p in find_files(tmp_path / "d")] == ["a.csv", "b.jsonl"]
    found = find_files(str(tmp_path / "**" / "*.jsonl"))
    assert [p.relative_to(tmp_path).as_posix() for p in found] == [
        "d/b.jsonl",
        "d/deep/c.jsonl",
        "e/a.jsonl",
    ]
    assert [p.name for p in find_files([tmp_path / "e", tmp_path / "d" / "a.csv"])] == [
        "a.jsonl",
        "a.csv",
    ]


def test_a_name_with_brackets_is_a_name(write):
    assert load_rows(write("run[1].jsonl", ROWS))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.jsonl", "no such data file"),
        ("*.parquet", "no such data file"),
        ("a.docx", "cannot read a .docx file"),
    ],
)
def test_unreadable_paths_are_named(write, tmp_path, path, message):
    write("a.docx", "text")
    with pytest.raises(DataError, match=message) as caught:
        load_rows(tmp_path / path)
    assert path in caught.value.where
    assert caught.value.how


def test_no_paths_and_an_empty_directory_are_errors(tmp_path: Path):
    with pytest.raises(DataError, match="no data files were given"):
        load_rows([])
    with pytest.raises(DataError, match="holds no data files"):
        load_rows(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    suffix=st.sampled_from(
        [".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow", ".jsonl.gz", ".txt.zst"]
    ),
    where=st.integers(0, 200),
    junk=st.binary(min_size=0, max_size=6),
)
def test_damage_is_read_or_named_but_never_a_traceback(tmp_path, suffix, where, junk):
    good = {
        ".json": json.dumps(ROWS).encode(),
        ".csv": b'prompt,completion\n"a, b","c"\nd,e\n',
        ".txt": b"one\ntwo\n",
        ".parquet": b"PAR1" + bytes(80) + b"PAR1",
        ".arrow": b"ARROW1" + bytes(80) + b"ARROW1",
        ".jsonl.gz": compressed(json.dumps(ROWS[0]), "gzip"),
        ".txt.zst": compressed("one\ntwo\n", "zstd"),
    }.get(suffix, b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    path = tmp_path / f"x{suffix}"
    path.write_bytes(good[: where % len(good)] + junk + good[where % len(good) + len(junk) :])
    try:
        rows = load_rows(path)
    except DataError as error:
        assert str(path) in error.where
    else:
        assert rows


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json", "a.txt.gz"])
def test_a_row_too_long_to_be_tokenised_is_refused_by_its_line(tmp_path, name):
    """A tokenizer takes thirty times the memory of a text: of 200 MB, more than most machines
    have.
    """
    words = "word " * (17 * 2**20 // 5)
    row = words if ".txt" in name else json.dumps({"text": words})
    text = (
        f"text\nshort\n{words}\n"
        if name.endswith(".csv")
        else f"short\n{row}\n"
        if ".txt" in name
        else f"{row}\n"
    )
    file = tmp_path / name
    if name.endswith(".gz"):  # beside what is not packed so well
        text = text.replace("short", Random(0).randbytes(60_000).hex(" "), 1)
    file.write_bytes(compressed(text, "gzip") if name.endswith(".gz") else text.encode())
    with pytest.raises(DataError, match=r"more than 16 MiB|field limit") as caught:
        prepare_data(file, word_tokenizer(), max_length=8)
    line = 3 if name.endswith(".csv") else 2 if ".txt" in name else 1
    assert caught.value.where.startswith(f"{file}:{line}")


def test_a_tokenizer_that_panics_is_an_error_that_names_it(tmp_path):
    """It names a token before every text that it does not have; the library's panic is no
    `Exception`.
    """
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="the tokenizer fails on a text") as caught:
        prepare_data(
            [{"text": "a b"}], PreTrainedTokenizerFast.from_pretrained(tmp_path), max_length=8
        )
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    "rows", [["a"] * 300_000, ["a" * 1_000_000] * 50], ids=["many rows", "long rows"]
)
def test_a_file_of_columns_that_unpacks_without_end_is_refused(tmp_path, monkeypatch, rows):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(rows).dictionary_encode()}), file, compression="zstd")
    assert file.stat().st_size < 5000
    monkeypatch.setattr("lema.data.files.MAX_UNPACKED", 1 << 20)
    with pytest.raises(DataError, match="unpacks to hundreds of times its size"):
        load_rows(file)
