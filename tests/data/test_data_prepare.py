"""Files in, tokens out: what is kept, what is cut, what is counted, and what is refused."""

import subprocess
import sys
import tracemalloc
from collections import UserDict

import numpy as np
import pytest

from lema.data import load_rows, needs_tokenizer, prepare_data
from lema.errors import DataError


def ids(*lengths, first=1):
    return [{"input_ids": list(range(first, first + length))} for length in lengths]


def test_rows_keep_their_order_and_their_origin(write, tokenizer):
    one = write("b.jsonl", [{"text": "the river"}, {"text": "the mill"}])
    two = write("a.txt", "\nthe bridge\n")
    data = prepare_data([one, two], tokenizer, max_length=32)
    assert [tokenizer.decode(row["input_ids"]) for row in data] == [
        "<s>the river</s>",
        "<s>the mill</s>",
        "<s>the bridge</s>",
    ]
    assert [data.origin(i) for i in range(3)] == [f"{one}:1", f"{one}:2", f"{two}:2"]
    assert data.origin(-1) == f"{two}:2" and data[-1] == data[2] == data[2:][0]
    with pytest.raises(IndexError):
        data[3]


def test_long_rows_are_cut_and_counted():
    rows = [row | {"labels": row["input_ids"]} for row in ids(4, 9)]
    rows.append({"input_ids": list(range(8)), "labels": [-100] * 6 + [6, 7]})
    data = prepare_data(rows, max_length=5)
    assert [row["input_ids"] for row in data] == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
    counts = data.counts
    assert (counts.rows, counts.truncated, counts.dropped) == (2, 1, 1)
    # the first token of a row has nothing to be predicted from
    assert (counts.tokens, counts.trained_tokens) == (
        9,
        7,
    )
    assert "1 rows truncated (4 tokens cut off, 4 of them to be trained on); 1 rows dropped" in str(
        counts
    )


def test_a_cut_text_does_not_end(tokenizer):
    [row] = prepare_data([{"text": "the river " * 20}], tokenizer, max_length=8)
    assert len(row["input_ids"]) == 8 and tokenizer.eos_token_id not in row["input_ids"]


def test_long_rows_are_dropped_and_counted():
    data = prepare_data(ids(4, 9, 5), max_length=5, overlong="drop")
    assert [len(row["input_ids"]) for row in data] == [4, 5]
    assert (data.counts.truncated, data.counts.dropped) == (0, 1)
    assert [data.origin(i) for i in range(2)] == ["rows:1", "rows:3"]


def test_a_long_row_is_named_where_it_is_an_error(write):
    path = write("a.jsonl", ids(4, 9))
    with pytest.raises(DataError, match="9 tokens, more than max_length=5") as caught:
        prepare_data(path, max_length=5, overlong="error")
    assert caught.value.where == f"{path}:2"
    assert len(prepare_data(path, max_length=9, overlong="error")) == 2


def test_nothing_left_is_an_error(write):
    path = write("a.jsonl", ids(9, 9))
    with pytest.raises(DataError, match="2 were dropped") as caught:
        prepare_data(path, max_length=5, overlong="drop")
    assert caught.value.where == str(path)


@pytest.mark.parametrize("data", [[], iter(())])
def test_no_data_is_an_error(data):
    with pytest.raises(DataError, match="no rows"):
        prepare_data(data, max_length=8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [{"text": "a"}]}, "one dictionary \\(of train\\)"),
        ([{"input_ids": [1, 2]}, "a.jsonl"], "rows:2"),
        (["a.jsonl", {"input_ids": [1, 2]}], "files or rows"),
        ([[1, 2]], "should be a dictionary, not list"),
    ],
)
def test_data_of_another_shape_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        prepare_data(data, max_length=8)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"text": "a"}, {"text": "b"}, {"messages": []}], 3),
        ([{"text": "a"}, {"body": "b"}], 2),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, 2]}], 2),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], 2),
    ],
)
def test_a_file_of_mixed_rows_names_the_first_that_differs(write, tokenizer, rows, line):
    path = write("a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        prepare_data(path, tokenizer, max_length=32)
    assert caught.value.where.startswith(f"{path}:{line}")


def test_files_of_different_kinds_go_together(write, tokenizer):
    files = [
        write("a.jsonl", [{"text": "a"}]),
        write("b.jsonl", [{"prompt": "a", "completion": "b"}]),
    ]
    assert len(prepare_data(files, tokenizer, max_length=32)) == 2


def test_a_row_with_nothing_to_learn_is_named(write):
    path = write(
        "a.jsonl",
        [{"input_ids": [1, 2, 3], "labels": labels} for labels in ([1, 2, 3], [1, -100, -100])],
    )
    with pytest.raises(DataError, match="no token to train on") as caught:
        prepare_data(path, max_length=8)
    assert caught.value.where == f"{path}:2"


def test_only_tokens_do_without_a_tokenizer(write, tokenizer):
    tokens = write("a.jsonl", ids(3))
    text = write("b.jsonl", [{"text": "the river"}])
    assert not needs_tokenizer(tokens)
    assert needs_tokenizer([tokens, text])
    with pytest.raises(DataError, match="no tokenizer") as caught:
        prepare_data([tokens, text], max_length=8)
    assert caught.value.where == f"{text}:1"


def test_rows_may_be_arrays_and_any_mapping():
    rows = (UserDict(input_ids=np.array([1, 2, n])) for n in range(3, 6))
    assert [row["input_ids"][2] for row in prepare_data(rows, max_length=8)] == [3, 4, 5]


@pytest.mark.parametrize(("option", "value"), [("max_length", 1), ("overlong", "cut")])
def test_wrong_options_are_named(option, value):
    with pytest.raises(DataError) as caught:
        prepare_data(ids(3), **({"max_length": 8} | {option: value}))
    assert caught.value.where == option


def test_the_same_data_give_the_same_data_set(write):
    path = write("a.jsonl", ids(3, 4, 5))
    one = prepare_data(path, max_length=8)
    two = prepare_data(path, max_length=8)
    assert list(one) == list(two) and one.fingerprint() == two.fingerprint()
    other = prepare_data([*ids(3, 4), *ids(5, first=2)], max_length=8)
    assert other.fingerprint() != one.fingerprint()
    assert one.select([0, 2, 1]).fingerprint() != one.fingerprint()


@pytest.mark.parametrize(
    ("wanted", "expected"), [(0.2, 2), (3, 3), (0.01, None), (10, None), (1.0, None), (0, None)]
)
def test_a_split_is_a_partition_drawn_by_the_seed(wanted, expected):
    rows = [{"input_ids": [1, n]} for n in range(10)]
    data = prepare_data([*rows, {"input_ids": [1] * 99}], max_length=8, overlong="drop")
    if expected is None:
        with pytest.raises(DataError, match="evaluation split"):
            data.split(wanted, seed=1)
        return
    train, evaluation = data.split(wanted, seed=1)
    seen = [row["input_ids"][1] for row in train], [row["input_ids"][1] for row in evaluation]
    assert len(seen[1]) == expected == evaluation.counts.rows
    assert sorted(seen[0] + seen[1]) == list(range(10)) and seen == (
        sorted(seen[0]),
        sorted(seen[1]),
    )
    assert [train.origin(i) for i in range(len(train))] == [f"rows:{n + 1}" for n in seen[0]]
    assert train.counts.tokens + evaluation.counts.tokens == data.counts.tokens
    assert train.counts.dropped + evaluation.counts.dropped == data.counts.dropped == 1
    assert [list(part) for part in data.split(wanted, seed=1)] == [list(train), list(evaluation)]
    assert (
        len(
            {
                tuple(r["input_ids"][1] for r in data.split(wanted, seed=seed)[1])
                for seed in range(8)
            }
        )
        > 1
    )


def test_large_data_cost_about_eight_bytes_a_token():
    rows = ({"input_ids": list(range(n, n + 1000))} for n in range(1000, 1300))
    tracemalloc.start()
    data = prepare_data(rows, max_length=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.counts.tokens == 300_000
    assert peak < 12 * data.counts.tokens  # two lists of Python ints would be 72


@pytest.mark.slow
def test_import_costs_nothing_heavy(write):
    path = write("a.jsonl", ids(3))
    code = (
        "import sys, lema.data as d\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        f"print(len(d.load_rows({str(path)!r})), sorted(heavy & set(sys.modules)))\n"
        "print(all(getattr(d, name) for name in d.__all__), hasattr(d, 'absent'))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "1 []", "True False"]
    assert len(load_rows(path)) == 1
