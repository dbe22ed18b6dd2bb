"""Kept tokens are those that would be made again, row by row; they are made once, and again
where they are damaged.
"""

import hashlib
import json
import multiprocessing
import os
import tracemalloc

import numpy as np
import pytest
from kepttokens import all_of, chats, entries, said, write_all

from lema.data import cache, files, prepare_data, read
from lema.data.dataset import ROW
from lema.data.forms import Forms
from lema.data.preference import prepare_preferences
from lema.errors import DataError, DiskError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Everything is kept, in pieces of few rows, by three processes."""
    monkeypatch.setattr(cache, "SMALL", 0)
    monkeypatch.setattr(files, "PIECE_BYTES", 2000)
    monkeypatch.setattr(files, "PIECE_ROWS", 16)
    monkeypatch.setattr(cache, "usable_threads", lambda: 3)


@pytest.fixture
def make(make_tokenizer, templates, tmp_path):
    """Prepare files as settings say, by default with the cache."""

    def prepare(data, *, kept=True, template=templates["plain"], **settings):
        settings = {"max_length": 30, **settings}
        folder = tmp_path / "cache" if kept else None
        return prepare_data(data, make_tokenizer(template), **settings, cache=folder)

    return prepare


def notes_of(data):
    return [note for note in data.notes if "kept in" not in note and "listed in" not in note]


def refuse(*_):
    raise AssertionError("a row is tokenised")


def test_kept_tokens_are_those_made_in_memory(write, make):
    data = write_all(write)
    memory = make(data, kept=False)
    first = make(data)
    second = make(data)
    assert memory.counts.truncated and memory.counts.dropped and memory.counts.left_out == 35
    assert memory.counts.rows == 120 + 90 + 60 + 35 + 200 - memory.counts.dropped
    assert all_of(memory) == all_of(first) == all_of(second)
    assert notes_of(memory) == notes_of(first) == notes_of(second) != []
    assert "by 3 processes" in first.notes[0] and not any(
        "processes" in note for note in second.notes
    )


def test_parts_of_kept_tokens_are_those_of_tokens_in_memory(write, make):
    data = write_all(write)
    memory = make(data, kept=False)
    kept = make(data)
    for one, other in zip(memory.split(0.2, seed=3), kept.split(0.2, seed=3), strict=True):
        assert all_of(one)[:4] == all_of(other)[:4] and one.notes == tuple(notes_of(other))
    assert all_of(memory.select([7, 3, 200]))[:4] == all_of(kept.select([7, 3, 200]))[:4]


def test_a_second_start_tokenises_no_row(write, make, monkeypatch):
    data = write_all(write)
    first = make(data)
    monkeypatch.setattr(read, "tokenize_rows", refuse)
    monkeypatch.setattr(cache, "_write", refuse)
    assert all_of(make(data)) == all_of(first)
    with pytest.raises(AssertionError, match="a row is tokenised"):
        make(data, max_length=29)


def test_a_fingerprint_is_computed_once(write, make, monkeypatch):
    data = write("chats.jsonl", list(chats(40)))
    parts = make(data).split(0.25, seed=1)
    found = [part.fingerprint() for part in parts]
    monkeypatch.setattr("lema.data.dataset.TokenDataset._row", refuse)
    assert [part.fingerprint() for part in make(data).split(0.25, seed=1)] == found
    with pytest.raises(AssertionError):
        make(data).split(0.25, seed=2)[0].fingerprint()


def test_whatever_changes_tokens_is_another_entry(write, make, templates, tmp_path):
    data = write("chats.jsonl", list(chats(40)))
    make(data)
    changes = [
        {"max_length": 31},
        {"overlong": "drop"},
        {"vocab_size": 4000},
        {"template": templates["marked"]},
        {"forms": Forms(train_on="all")},
        {"forms": Forms(chat_template=templates["strict"])},
        {"forms": Forms(columns={"role": "role"})},
    ]
    for number, change in enumerate(changes, 2):
        assert all_of(make(data, **change)) == all_of(make(data, kept=False, **change))
        assert len(entries(tmp_path)) == number, change
    about = data.stat()
    data.write_text(data.read_text().replace("stone", "brick"))
    # same size, same time, and small: its content tells
    os.utime(data, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (
        all_of(make(data)) == all_of(make(data, kept=False))
        and len(entries(tmp_path)) == len(changes) + 2
    )
    make(data)
    assert len(entries(tmp_path)) == len(changes) + 2


@pytest.mark.parametrize(
    "row", ["{broken", '{"messages": []}', '{"text": "another kind"}', '{"messages": "\\u0000"}']
)
def test_a_bad_row_is_the_same_error(write, make, tmp_path, row):
    lines = [json.dumps(chat) for chat in chats(80)]
    path = write("chats.jsonl", "\n".join([*lines[:70], row, *lines[70:75], "{later", *lines[75:]]))
    found = []
    for kept in (False, True):
        with pytest.raises(DataError) as caught:
            make(path, kept=kept)
        found.append(str(caught.value))
    assert found[0] == found[1] and f"{path}:71" in found[0]
    [entry] = entries(tmp_path)
    assert list(entry.iterdir()) == [], "half an entry was left"
    assert multiprocessing.active_children() == []


def test_an_error_of_a_later_file_comes_after_one_of_an_earlier_row(write, make):
    lines = [json.dumps(chat) for chat in chats(80)]
    good = write("a.jsonl", "\n".join([*lines, '{"messages": []}']))
    empty = write("b.jsonl", "\n\n")
    for kept in (False, True):
        with pytest.raises(DataError, match=r"a\.jsonl:81"):
            make([good, empty], kept=kept)
        with pytest.raises(DataError, match="holds no rows"):
            make([empty, good], kept=kept)


def test_data_of_which_no_row_is_left_are_the_same_error(write, make):
    path = write("chats.jsonl", list(chats(20)))
    for kept in (False, True, True):
        with pytest.raises(DataError, match="no rows to train on: 20 were dropped"):
            make(path, kept=kept, max_length=3)


DAMAGES = {
    "tokens.bin": lambda content: content[:-4],
    "rows.bin": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    "about.json": lambda content: content.replace(b'"dropped": 0', b'"dropped": 1'),
    "skipped.jsonl": lambda content: content + b"{}\n",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tokens_are_made_anew_and_it_is_said(write, make, tmp_path, name):
    data = write("chats.jsonl", list(chats(40)))
    first = make(data)
    known = all_of(first)
    [entry] = entries(tmp_path)
    file = entry / "tokens" / name
    before = file.read_bytes()
    file.write_bytes(DAMAGES[name](before))
    assert file.read_bytes() != before
    mended = make(data)
    assert all_of(mended) == known and file.read_bytes() == before
    assert name in mended.notes[0] and "makes them again" in mended.notes[0]
    assert make(data).notes == first.notes[1:]


def bent(tokens, name, column, value):
    """Write a number into the kept rows, or another value into what is kept of them, with the
    digests that belong.
    """
    about = json.loads((tokens / "about.json").read_bytes())["about"]
    if name == "rows.bin":
        rows = np.fromfile(tokens / name, ROW)
        rows[column][1] = value
        rows.tofile(tokens / name)
        about["rows"] = hashlib.sha256(rows.tobytes()).hexdigest()
    else:
        about[column] = value
    whole = {"about": about, "sha256": hashlib.sha256(json.dumps(about).encode()).hexdigest()}
    (tokens / "about.json").write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        *(("rows.bin", "start", value) for value in (-1, 2**40, 2**63 - 1)),
        *(("rows.bin", "length", value) for value in (-1, 2**31 - 1)),
        *(("rows.bin", "source", value) for value in (-1, 1)),
        *(("about.json", "notes", value) for value in (1, None)),
        *(("about.json", "dropped", value) for value in ([], "x")),
        ("about.json", "sizes", {}),
    ],
)
def test_kept_rows_that_lead_elsewhere_are_made_anew_whatever_their_digest_says(
    write, make, tmp_path, name, column, value
):
    """A row of two thousand million tokens would be read into memory."""
    data = write("chats.jsonl", list(chats(10)))
    known = all_of(make(data))
    bent(entries(tmp_path)[0] / "tokens", name, column, value)
    mended = make(data)
    assert all_of(mended) == known and "LEMA makes them again" in mended.notes[0]


def test_a_missing_file_is_made_anew(write, make, tmp_path):
    data = write("chats.jsonl", list(chats(40)))
    first = make(data)
    (entries(tmp_path)[0] / "tokens" / "rows.bin").unlink()
    assert all_of(make(data)) == all_of(first)


def test_data_that_change_while_they_are_read_are_not_kept(write, make, tmp_path, monkeypatch):
    data = write("chats.jsonl", list(chats(40)))
    original = cache._write

    def change(*arguments):
        original(*arguments)
        data.write_text(data.read_text() + "\n")

    monkeypatch.setattr(cache, "_write", change)
    with pytest.raises(
        DataError, match="the data or the tokenizer's files changed while LEMA read them"
    ):
        make(data)
    assert list(entries(tmp_path)[0].iterdir()) == []


def test_the_entry_used_longest_ago_goes_unless_it_is_in_use(write, make, tmp_path, monkeypatch):
    paths = [write(f"{name}.jsonl", list(chats(30))) for name in "abcd"]
    made = []
    places = []
    for number, path in enumerate(paths[:3]):
        made.append(make(path))
        [place] = set(entries(tmp_path)) - set(places)
        places.append(place)
        os.utime(place, (number, number))
    assert all_of(make(paths[0])) == all_of(made[0])  # used again: now the latest
    del made[2:]  # the third is in no use any more
    size = sum(file.stat().st_size for file in places[0].rglob("*") if file.is_file())
    monkeypatch.setattr(cache, "BOUND", 3 * size + size // 2)
    make(paths[3])
    assert places[2] not in entries(tmp_path), "none was removed, or one that is in use"
    assert {places[0], places[1]} < set(entries(tmp_path)) and len(entries(tmp_path)) == 3
    assert made[1][0] == make(paths[1])[0]


def test_a_folder_that_cannot_be_written_to_is_an_error_with_a_way_out(write, make, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DiskError) as caught:
        make(write("chats.jsonl", list(chats(30))))
    assert "data_cache: false" in str(caught.value)


def test_the_users_cache_may_be_missing_but_it_is_said(write, make, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(cache, "folder_of", lambda _: tmp_path / "cache")  # the default
    path = write("chats.jsonl", list(chats(30)))
    data = make(path)
    assert "tokens are not kept" in data.notes[0] and all_of(data) == all_of(make(path, kept=False))


def test_small_data_are_not_kept(write, make, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 1 << 20)
    make(write("chats.jsonl", list(chats(30))))
    assert not (tmp_path / "cache").exists()


def test_the_default_folder_is_below_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder_of(True) == tmp_path / "lema" / "tokens"
    assert cache.folder_of(False) is None and cache.folder_of("/x") == cache.Path("/x")


def test_skipped_rows_are_listed_by_file_and_line(write, make, tmp_path):
    rows = [{"text": "the river " * count} for count in (2, 40, 3, 50)]
    path = write("a.jsonl", rows)
    for overlong, why in (("truncate", "truncated"), ("drop", "dropped")):
        listed = list(make(path, overlong=overlong).skipped())
        assert [(one["file"], one["line"], one["why"]) for one in listed] == [
            (str(path), 2, why),
            (str(path), 4, why),
        ]
        assert listed == list(make(path, kept=False, overlong=overlong).skipped())
        assert list(make(path, overlong=overlong).skipped(1)) == listed[:1]


@pytest.mark.parametrize("labelled", [False, True])
def test_kept_preferences_are_those_made_in_memory(
    write, make_tokenizer, templates, tmp_path, labelled
):
    pairs = [
        {"prompt": said(n, 6), "chosen": said(n, 7) + " yes", "rejected": said(n, 5 + n % 30)}
        for n in range(90)
    ]
    if labelled:
        pairs = pairs[:60]
    path = write("pairs.jsonl", pairs)
    tokenizer = make_tokenizer(templates["plain"])
    how = {"labelled": labelled, "max_length": 40}
    memory, *kept = (
        prepare_preferences(path, tokenizer, **how, cache=folder)
        for folder in (None, tmp_path / "c", tmp_path / "c")
    )
    assert memory.counts.truncated
    for one in kept:
        assert (
            list(one) == list(memory)
            and one.fingerprint() == memory.fingerprint()
            and one.counts == memory.counts
        )
        assert [one._label(n, 0) for n in range(len(one))] == [
            memory._label(n, 0) for n in range(len(memory))
        ]
    assert len(memory) == (120 if labelled else 90)


def test_memory_does_not_grow_with_the_tokens(write, make):
    grown = []
    for count in (200, 2200):
        path = write(f"{count}.txt", "".join(f"{said(n, 60)}\n" for n in range(count)))
        make(path, max_length=1000)  # what is imported and compiled once
        for which in ("first", "second"):
            tracemalloc.start()
            data = make(path, max_length=1000 + (which == "first"))
            total = sum(len(row["input_ids"]) for row in data)
            grown.append((tracemalloc.get_traced_memory()[1], total))
            tracemalloc.stop()
    for (few, tokens), (many, more) in zip(grown[:2], grown[2:], strict=True):
        assert more - tokens > 100_000
        assert many - few < 2000 * 40, "tokens would take 240 bytes a row"
