"""Packed tokens: written whole or not at all, read a block at a time, and distrusted."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema.data import TokenDataset, prepare_data
from lema.data.mixing.permutation import shuffled_row
from lema.data.packed import PackedTokens, write_packed
from lema.errors import ConfigError, DataError, DiskError
from lema.storage import atomic

ROWS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10, 11]]
FLAT = [token for row in ROWS for token in row]


def blocks(path: Path, block: int = 2) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in PackedTokens(path, block)]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def header_of(directory: Path, **changes: object) -> None:
    file = directory / "train.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "tokens",
    [
        ROWS,
        FLAT,
        lambda: iter(FLAT),
        lambda: (row for row in ROWS),
        [{"input_ids": row} for row in ROWS],
        [np.array(row, np.uint16) for row in ROWS],
        [torch.tensor(row) for row in ROWS if row],
        np.array(FLAT, np.int32),
    ],
    ids=[
        "rows",
        "ids",
        "ids taken once",
        "rows taken once",
        "dictionaries",
        "arrays",
        "tensors",
        "one array",
    ],
)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_come_back_in_whole_blocks(tmp_path: Path, tokens: object, dtype: str) -> None:
    given_tokens = tokens() if callable(tokens) else tokens
    file = write_packed(
        given_tokens, tmp_path / "text_small", dtype, vocab_size=12, tokenizer="tiny"
    )
    assert file == tmp_path / "text_small" / "train.bin" and names(file.parent) == {
        "train.bin",
        "train.json",
    }
    assert file.read_bytes() == np.array(FLAT, {"uint16": "<u2", "uint32": "<u4"}[dtype]).tobytes()
    found = PackedTokens(file, 3)
    assert len(found) == 3 and found.header.tokenizer == "tiny" and found.header.num_tokens == 11
    assert [found.block(place).tolist() for place in range(3)] == [FLAT[:3], FLAT[3:6], FLAT[6:9]]
    assert found.block(0).dtype == np.int64 and type(found.block(0)) is np.ndarray
    assert found[1]["labels"].tolist() == found[1]["input_ids"].tolist() == FLAT[3:6]
    assert found[-1]["input_ids"].tolist() == FLAT[6:9] and len(found[1:]) == 2
    found.verify()


def test_a_tokenised_data_set_is_packed(tmp_path: Path) -> None:
    data = prepare_data([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], max_length=8)
    assert isinstance(data, TokenDataset)
    write_packed(data, tmp_path)
    assert blocks(tmp_path) == [[1, 2], [3, 4]]


def test_both_parts_of_a_data_set_lie_in_its_directory(tmp_path: Path) -> None:
    write_packed([1, 2], tmp_path)
    validation = write_packed([3, 4], tmp_path, "uint32", split="val")
    assert names(tmp_path) == {"train.bin", "train.json", "val.bin", "val.json"}
    assert blocks(tmp_path) == [[1, 2]] and blocks(validation) == [[3, 4]]


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=200), block=st.integers(2, 60)
)
def test_blocks_are_the_tokens_cut(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], block: int
) -> None:
    file = write_packed(tokens, tmp_path_factory.mktemp("cut"))
    if len(tokens) < block:
        with pytest.raises(DataError, match="fewer than one block"):
            PackedTokens(file, block)
        return
    whole = len(tokens) // block
    assert [token for row in blocks(file, block) for token in row] == tokens[: whole * block]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 2**30))
def test_blocks_have_an_order_of_seed_and_epoch_and_each_comes_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, epoch: int
) -> None:
    found = PackedTokens(write_packed(range(120), tmp_path_factory.mktemp("order")), 3)
    first = epoch * len(found)
    order = [shuffled_row(len(found), index, seed)[1] for index in range(first, first + len(found))]
    assert sorted(token for row in order for token in found.block(row)) == list(range(120))
    assert order != sorted(order)  # forty blocks in the order of the data: the odds are none


def test_a_file_larger_than_memory_is_read_a_block_at_a_time(tmp_path: Path) -> None:
    """A sparse file of 64 GiB: what is not written takes no room, and reads as zeros."""
    file = write_packed([0], tmp_path, vocab_size=10)
    num_tokens = 2**35
    os.truncate(file, 2 * num_tokens)
    header_of(tmp_path, num_tokens=num_tokens, sha256=None)
    with file.open("r+b") as out:
        out.seek(-2 * 1024, os.SEEK_END)
        out.write(np.full(1024, 7, "<u2").tobytes())
    # whose header is read as any text is, through a buffer of a megabyte
    found = PackedTokens(tmp_path, 1024)
    assert len(found) == 2**25
    tracemalloc.start()
    assert found.block(len(found) - 1).tolist() == [7] * 1024
    for index in range(200):
        assert not found.block(shuffled_row(len(found) - 1, index, 0)[1]).any()
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_rows_are_written_without_being_gathered(tmp_path: Path) -> None:
    tracemalloc.start()
    write_packed((np.full(4096, row % 100) for row in range(2000)), tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000  # the file has 16 MB
    write_packed((token % 100 for token in range(300_000)), tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 6_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("tokens", "options", "what", "where"),
    [
        (
            [[1, 2], [3, 70_000]],
            {},
            "id 70000 is outside the vocabulary of 65,536",
            "row 1, position 1",
        ),
        (
            [[1, 2], [3, 50]],
            {"vocab_size": 50},
            "id 50 is outside the vocabulary of 50",
            "row 1, position 1",
        ),
        ([[1, -2]], {}, "id -2 is outside", "row 0, position 1"),
        ([1, 2, 2**16], {}, "id 65536 is outside", "tokens from 0 on, position 2"),
        (
            [1, 2, 2**32],
            {"dtype": "uint32"},
            "id 4294967296 is outside",
            "tokens from 0 on, position 2",
        ),
        ([1] * 70_000 + [-1], {}, "id -1 is outside", "tokens from 65,536 on, position 4464"),
        ([[1.5, 2.0]], {}, "not a list of token ids", "row 0"),
        ([[1], ["a"]], {}, "not a list of token ids", "row 1"),
        ([[1], [[2], [3, 4]]], {}, "not a list of token ids", "row 1"),
        ([{"text": "a"}], {}, "not a list of token ids", "row 0"),
        ([[True, False]], {}, "not a list of token ids", "row 0"),
        ([], {}, "there are no tokens", "train.bin"),
        ([[], []], {}, "there are no tokens", "train.bin"),
    ],
)
def test_tokens_that_are_none_are_refused_and_nothing_is_left(
    tmp_path: Path, tokens: object, options: dict, what: str, where: str
) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        write_packed(tokens, tmp_path, **options)
    assert where in caught.value.where and caught.value.how
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int32"}, "'int32'"),
        ({"split": "test"}, "'test' is not a part"),
        ({"vocab_size": 70_000}, "70,000 tokens does not fit into uint16"),
        ({"vocab_size": 0}, "0 tokens"),
    ],
)
def test_settings_of_packing_are_checked_before_anything_is_written(
    tmp_path: Path, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_packed([1], tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("missing", ["train.bin", "train.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_packed([1, 2], tmp_path)
    write_packed([1, 2], tmp_path, split="val")
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=f"{missing} is missing") as caught:
        PackedTokens(tmp_path, 2)
    assert caught.value.where == str(tmp_path / missing)
    assert "write_packed" in caught.value.how and (
        missing == "train.json" or "val.bin" in caught.value.how
    )


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing") as caught:
        PackedTokens(tmp_path / "no" / "train.bin", 2)
    assert "there are no packed tokens" in caught.value.how


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int16"}, "dtype is 'int16', not uint16 or uint32"),
        ({"dtype": ["uint16"]}, "dtype is"),
        ({"dtype": "uint32"}, "22 bytes, and its header says 11 tokens of uint32, which are 44"),
        ({"num_tokens": 10}, "22 bytes, and its header says 10"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"num_tokens": 2**70}, "num_tokens is"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tokenizer": 3}, "tokenizer is 3"),
        ({"sha256": 3}, "sha256 is 3"),
        ({"extra": 3}, "unknown keys extra"),
        ({"format": "other"}, "not the header of packed tokens"),
        ({"version": 2}, "version 2"),
    ],
)
def test_a_header_is_distrusted(tmp_path: Path, changes: dict, message: str) -> None:
    write_packed(FLAT, tmp_path)
    header_of(tmp_path, **changes)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        PackedTokens(tmp_path, 2)
    assert str(tmp_path) in caught.value.where and caught.value.how


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "lema packed tokens", "version": 1}']
)
def test_a_header_that_is_none_is_damaged(tmp_path: Path, content: bytes) -> None:
    write_packed(FLAT, tmp_path)
    (tmp_path / "train.json").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.json is damaged"):
        PackedTokens(tmp_path, 2)


@pytest.mark.parametrize("size", [0, 21, 20, 24])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, size: int) -> None:
    os.truncate(write_packed(FLAT, tmp_path), size)
    with pytest.raises(DataError, match=r"train\.bin is damaged: it has"):
        PackedTokens(tmp_path, 2)


def test_other_bytes_of_the_same_length_are_found_when_asked_for(tmp_path: Path) -> None:
    file = write_packed(FLAT, tmp_path)
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(DataError, match="sha256"):
        PackedTokens(file, 2).verify()
    header_of(tmp_path, sha256=None)
    PackedTokens(file, 2).verify()  # nothing to compare with


def test_a_token_beyond_the_vocabulary_is_named_by_its_place(tmp_path: Path) -> None:
    file = write_packed([1, 2, 3, 4, 5, 30, 6, 7], tmp_path, tokenizer="tiny")
    found = PackedTokens(file, 3, vocab_size=30)
    assert found.block(0).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="id 30 is outside the vocabulary of 30 tokens") as caught:
        found.block(1)
    assert caught.value.where == f"{file}, token 5" and "tiny" in caught.value.how
    assert PackedTokens(file, 3, vocab_size=31).block(1).tolist() == [4, 5, 30]
    # what the header says is checked too, whatever the model knows
    header_of(tmp_path, vocab_size=10)
    with pytest.raises(DataError, match="vocabulary of 10 tokens"):
        PackedTokens(file, 3, vocab_size=31).block(1)


def test_blocks_that_are_none_are_refused(tmp_path: Path) -> None:
    found = PackedTokens(write_packed(FLAT, tmp_path), 5)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            found.block(index)
    for index in (-3, 2):
        with pytest.raises(IndexError):
            found[index]
    with pytest.raises(DataError, match="blocks of 1 tokens"):
        PackedTokens(tmp_path, 1)
    with pytest.raises(DataError, match="11 tokens, fewer than one block of 12"):
        PackedTokens(tmp_path, 12)


def fail_after(good: int, real, code: int = errno.ENOSPC):
    """Stand in for `real`, which fails once it has worked `good` times."""
    calls = iter(range(10**6))

    def call(*args, **options):
        if next(calls) >= good:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return call


@pytest.mark.parametrize("good", range(2))
@pytest.mark.parametrize("step", ["open_partial", "os.fsync", "Path.replace", "Path.unlink"])
def test_a_failure_leaves_the_old_the_new_or_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, good: int
) -> None:
    write_packed([1, 2, 3, 4], tmp_path)
    target, name = {"open_partial": (atomic, step), "os.fsync": (os, "fsync")}.get(
        step, (Path, step[5:])
    )
    with monkeypatch.context() as patched:
        patched.setattr(target, name, fail_after(good, getattr(target, name)))
        if step == "Path.unlink" and good:
            # only the old header is removed where all goes well
            write_packed([5, 6, 7, 8], tmp_path)
        else:
            with pytest.raises(DiskError, match=r"train\.bin could not be written"):
                write_packed([5, 6, 7, 8], tmp_path)
    found = None
    if (tmp_path / "train.json").exists():
        found = blocks(tmp_path)
        PackedTokens(tmp_path, 2).verify()  # never the header of other tokens
    assert found in (None, [[1, 2], [3, 4]], [[5, 6], [7, 8]])
    if good == 0 and step != "Path.replace":
        assert found == [[1, 2], [3, 4]]
    write_packed([9, 9], tmp_path)
    assert blocks(tmp_path) == [[9, 9]] and names(tmp_path) == {"train.bin", "train.json"}


KILLED = """
import os, signal, sys
from lema.data.packed import write_packed
def rows():
    yield [5, 6]
    os.kill(os.getpid(), signal.SIGKILL)
write_packed(rows(), sys.argv[1])
"""


def test_a_killed_run_leaves_what_was_there_and_is_swept_by_the_next(tmp_path: Path) -> None:
    write_packed([1, 2, 3, 4], tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 3
    assert blocks(tmp_path) == [[1, 2], [3, 4]]
    write_packed([5, 6], tmp_path)
    assert blocks(tmp_path) == [[5, 6]] and names(tmp_path) == {"train.bin", "train.json"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=r"train\.bin could not be written") as caught:
        write_packed([1], tmp_path / "file" / "text")
    assert caught.value.where == str(tmp_path / "file" / "text" / "train.bin")
