"""A start that is killed while it tokenises leaves its parts; the next one tokenises the rest, and
the files are the same as if nothing had happened."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal

import pytest
from kepttokens import all_of, chats, entries, write_all

from lema.data import cache, files, prepare_data, read
from lema.data.dataset import ROW
from lema.errors import DataError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Everything is kept, in pieces of few rows, by two processes."""
    monkeypatch.setattr(cache, "SMALL", 0)
    monkeypatch.setattr(files, "PIECE_BYTES", 2000)
    monkeypatch.setattr(files, "PIECE_ROWS", 16)
    monkeypatch.setattr(cache, "usable_threads", lambda: 2)


@pytest.fixture
def make(make_tokenizer, templates, tmp_path):
    return lambda data, length=30: prepare_data(
        data, make_tokenizer(templates["plain"]), max_length=length, cache=tmp_path / "cache"
    )


@pytest.fixture
def tokenised(tmp_path, monkeypatch):
    """Count the rows tokenised since this was asked before, without those of killed workers that
    are not gone yet.
    """
    log = tmp_path / "tokenised"
    original = read.tokenize_rows
    turn = [0]
    log.touch()

    def counted(*arguments):
        with log.open("ab", buffering=0) as file:
            for found in original(*arguments):
                file.write(bytes(turn))
                yield found

    def count():
        turn[0] += 1
        return log.read_bytes().count(turn[0] - 1)

    monkeypatch.setattr(read, "tokenize_rows", counted)
    return count


def when(parts, do, patch):
    """Have a start do something when it has written so many parts; return the list it counts
    them in.
    """
    told = []

    @contextlib.contextmanager
    def line():
        yield lambda *_: told.append(1) or (do() if len(told) == parts else None)

    patch.setattr(cache, "_line", line)
    return told


def killed(start, parts, monkeypatch):
    """Have a process start, and be killed when it has written so many parts."""
    with monkeypatch.context() as patch:
        when(parts, lambda: os.kill(os.getpid(), signal.SIGKILL), patch)
        process = FORK.Process(target=start)
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def parts_of(entry):
    return [
        json.loads(line)["about"]
        for line in (entry / "unfinished" / "parts.jsonl").read_text().splitlines()
    ]


def rows_of(parts):
    return sum(
        part["sizes"][1] // ROW.itemsize + part["dropped"] + part["left_out"] for part in parts
    )


class Whole:
    """Data, and what one start without a kill makes of them."""

    def __init__(self, data, make, folder, tokenised, monkeypatch):
        with monkeypatch.context() as patch:
            told = when(-1, None, patch)
            self.data = data
            made = make(data)
        [self.entry] = entries(folder)
        self.files = self.written()
        self.known = all_of(made)
        self.num_parts = len(told)
        self.rows = tokenised()
        shutil.rmtree(folder / "cache")

    def written(self):
        return {path.name: path.read_bytes() for path in (self.entry / "tokens").iterdir()}


@pytest.fixture
def whole(write, make, tmp_path, tokenised, monkeypatch):
    found = Whole(write_all(write), make, tmp_path, tokenised, monkeypatch)
    assert (
        found.files.keys() == {"about.json", "rows.bin", "tokens.bin", "skipped.jsonl"}
        and found.num_parts > 20
    )
    return found


@pytest.mark.parametrize("parts", [1, 4, 17, "all"])
def test_what_a_killed_start_has_tokenised_is_not_tokenised_again(
    whole, make, tokenised, monkeypatch, parts
):
    parts = whole.num_parts if parts == "all" else parts
    killed(lambda: make(whole.data), parts, monkeypatch)
    tokenised()
    found = parts_of(whole.entry)
    assert len(found) == parts and not (whole.entry / "tokens").exists()
    again = make(whole.data)
    assert tokenised() == whole.rows - rows_of(found) < whole.rows
    assert f"after {parts:,} parts that a start before had made" in again.notes[0]
    assert whole.written() == whole.files and all_of(again) == whole.known
    assert list(whole.entry.glob("unfinished*")) == [] and tokenised() == 0


def test_a_start_that_is_killed_again_and_again_comes_to_its_end(
    whole, make, tokenised, monkeypatch
):
    for done in (3, 6, 9):
        killed(lambda: make(whole.data), 3, monkeypatch)
        assert len(parts_of(whole.entry)) == done
    done = rows_of(parts_of(whole.entry))
    tokenised()
    make(whole.data)
    assert tokenised() == whole.rows - done and whole.written() == whole.files


DAMAGES = {
    "tokens.bin cut": ("tokens.bin", lambda content: content[:-4], 11),
    "tokens.bin longer": ("tokens.bin", lambda content: content + b"more", 12),
    "tokens.bin changed": ("tokens.bin", lambda content: bytes([content[0] ^ 1]) + content[1:], 0),
    "tokens.bin zeros": ("tokens.bin", lambda content: content[:-40] + bytes(40), 11),
    "rows.bin changed": ("rows.bin", lambda content: content[:-1] + bytes([content[-1] ^ 1]), 11),
    "a line cut": ("parts.jsonl", lambda content: content[:-9], 11),
    "a line of nothing": ("parts.jsonl", lambda content: content + b"[]\n", 12),
    "a count changed": (
        "parts.jsonl",
        lambda content: content.replace(b'"left_out": 0', b'"left_out": 1', 1),
        0,
    ),
    "skipped.jsonl gone": ("skipped.jsonl", lambda _: b"", 3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_read_back_are_made_anew(whole, make, tokenised, monkeypatch, damage):
    killed(lambda: make(whole.data), 12, monkeypatch)
    name, change, good = DAMAGES[damage]
    found = parts_of(whole.entry)
    file = whole.entry / "unfinished" / name
    if name == "skipped.jsonl":
        good = next(number for number, part in enumerate(found) if part["sizes"][2])
    before = file.read_bytes()
    file.write_bytes(change(before))
    assert file.read_bytes() != before
    tokenised()
    assert all_of(make(whole.data)) == whole.known and whole.written() == whole.files
    assert tokenised() == whole.rows - rows_of(found[:good])


def test_parts_of_other_pieces_are_not_taken(whole, make, tokenised, monkeypatch):
    killed(lambda: make(whole.data), 12, monkeypatch)
    tokenised()
    monkeypatch.setattr(files, "PIECE_BYTES", 2500)
    assert all_of(make(whole.data)) == whole.known and tokenised() == whole.rows


def test_parts_of_other_settings_or_other_data_are_not_taken(whole, make, tokenised, monkeypatch):
    killed(lambda: make(whole.data), 12, monkeypatch)
    tokenised()
    assert "after" not in make(whole.data, length=29).notes[0] and tokenised() == whole.rows
    chatty = whole.data[0]
    chatty.write_text(chatty.read_text().replace("stone", "brick"))
    assert "after" not in make(whole.data).notes[0] and tokenised() == whole.rows


def test_parts_that_nobody_goes_on_with_go_as_entries_do(whole, make, write, tmp_path, monkeypatch):
    killed(lambda: make(whole.data), 12, monkeypatch)
    monkeypatch.setattr(cache, "BOUND", 1)
    make(write("chats2.jsonl", list(chats(30))))
    assert whole.entry not in entries(tmp_path) and len(entries(tmp_path)) == 1


def test_of_two_starts_at_once_one_goes_on_where_the_other_was_killed(
    whole, make, tokenised, monkeypatch
):
    (written, ready), (go, waits) = FORK.Pipe(), FORK.Pipe()

    def kill():
        ready.send(None)
        waits.recv()
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        when(5, kill, patch)
        first = FORK.Process(target=make, args=(whole.data,))
        first.start()
    written.recv()
    tokenised()
    second = FORK.Process(target=make, args=(whole.data,))
    second.start()
    assert not (whole.entry / "tokens").exists()
    go.send(None)
    for process in (first, second):
        process.join()
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert whole.written() == whole.files and tokenised() < whole.rows


def test_an_entry_that_is_removed_while_a_start_waits_for_it_is_made_anew(whole, make, monkeypatch):
    original = cache.lock

    def remove(descriptor, **how):
        taken = original(descriptor, **how)
        if not how:
            monkeypatch.setattr(cache, "lock", original)
            whole.entry.rmdir()
        return taken

    monkeypatch.setattr(cache, "lock", remove)
    assert all_of(make(whole.data)) == whole.known and whole.written() == whole.files


def test_without_locks_nothing_that_another_may_be_writing_is_taken(
    whole, make, tokenised, monkeypatch
):
    killed(lambda: make(whole.data), 12, monkeypatch)
    tokenised()
    before = {path: path.read_bytes() for path in (whole.entry / "unfinished").iterdir()}

    def without(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    assert all_of(make(whole.data)) == whole.known and whole.written() == whole.files
    assert tokenised() == whole.rows and before == {path: path.read_bytes() for path in before}


def test_ctrl_c_leaves_no_process_and_its_parts(whole, make, tokenised, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        when(7, interrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            make(whole.data)
    assert multiprocessing.active_children() == []
    found = parts_of(whole.entry)
    assert len(found) == 7 and tokenised()
    make(whole.data)
    assert whole.written() == whole.files and tokenised() == whole.rows - rows_of(found)


def test_a_killed_worker_is_an_error_and_the_next_start_goes_on(
    whole, make, tokenised, monkeypatch
):
    # A worker that holds no lock and writes to no pipe: it dies as it begins its piece. Of the
    # pieces before it, all but the few that are under way at once have been written by then.
    begun = FORK.Value("i", 0)
    original = read.tokenize_rows
    parent = os.getpid()

    def dies(*arguments):
        with begun.get_lock():
            begun.value += 1
            number = begun.value
        if number == 12 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(read, "tokenize_rows", dies)
        with pytest.raises(DataError, match="ended unexpectedly"):
            make(whole.data)
    assert multiprocessing.active_children() == []
    found = parts_of(whole.entry)
    assert len(found) >= 4 and tokenised()
    make(whole.data)
    assert whole.written() == whole.files and tokenised() == whole.rows - rows_of(found)
