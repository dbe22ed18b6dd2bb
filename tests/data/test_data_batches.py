"""Batches: the order is a function of seed and epoch, padding changes nothing, every row comes
once an epoch.
"""

import pytest
import torch

from lema.data import Batches, collate, prepare_data
from lema.errors import DataError

LENGTHS = [3, 5, 2, 7, 4, 4, 6, 2, 9, 3, 8]


@pytest.fixture
def data():
    rows = [{"input_ids": list(range(10 * n, 10 * n + length))} for n, length in enumerate(LENGTHS)]
    return prepare_data(rows, max_length=16)


def test_every_row_comes_once_an_epoch(data):
    batches = Batches(data, 4, seed=3)
    assert batches.steps_per_epoch == 3
    for epoch in range(3):
        seen = [
            batches.rows(step) for step in range(batches.before(epoch), batches.before(epoch + 1))
        ]
        assert [len(rows) for rows in seen] == [4, 4, 3]
        assert sorted(row for rows in seen for row in rows) == list(range(len(data)))


def test_order_depends_on_seed_and_epoch_only(data):
    def order(seed, epoch, size=4):
        batches = Batches(data, size, seed=seed)
        first = epoch * batches.steps_per_epoch
        return [
            row
            for step in range(first, first + batches.steps_per_epoch)
            for row in batches.rows(step)
        ]

    assert order(3, 0) == order(3, 0, size=1) == order(3, 0, size=11)
    assert len({tuple(order(seed, epoch)) for seed in (-1, 0, 3) for epoch in range(4)}) == 12


def test_order_is_the_same_for_ever():
    """Written down, since a new NumPy that shuffles otherwise would make old checkpoints resume
    on other data.
    """
    rows = prepare_data([{"input_ids": [1, n]} for n in range(8)], max_length=4)
    assert Batches(rows, 8, seed=42).rows(0) == [4, 1, 3, 6, 0, 7, 2, 5]
    assert Batches(rows, 8, seed=42).rows(1) == [1, 2, 5, 3, 6, 0, 4, 7]


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_step_is_reached_directly(data, shuffle):
    straight = Batches(data, 4, seed=5, shuffle=shuffle)
    whole = [(straight.rows(step), *straight.micro_batches([step])) for step in range(9)]
    for step in (8, 0, 4, 3, 7):
        fresh = Batches(data, 4, seed=5, shuffle=shuffle)
        assert fresh.rows(step) == whole[step][0] == straight.rows(step)
        assert torch.equal(fresh.micro_batches([step])[0]["input_ids"], whole[step][1]["input_ids"])


def test_unshuffled_is_the_order_of_the_data(data):
    batches = Batches(data, 4, shuffle=False)
    assert [batches.rows(step) for step in (0, 2, 3)] == [[0, 1, 2, 3], [8, 9, 10], [0, 1, 2, 3]]


def test_padding_is_on_the_right_and_neither_seen_nor_learnt(data):
    for pad in (0, 17):
        batches = Batches(data, 4, pad_token_id=pad)
        for step in range(3):
            (batch,), (rows,) = batches.micro_batches([step]), batches.groups([step])
            assert (
                batch["input_ids"].dtype
                == batch["labels"].dtype
                == batch["attention_mask"].dtype
                == torch.long
            )
            assert batch["input_ids"].shape[1] == max(LENGTHS[row] for row in rows)
            for place, row in enumerate(rows):
                length = LENGTHS[row]
                assert batch["input_ids"][place, :length].tolist() == data[row]["input_ids"]
                assert batch["labels"][place, :length].tolist() == data[row]["labels"]
                assert set(batch["input_ids"][place, length:].tolist()) <= {pad}
                assert set(batch["labels"][place, length:].tolist()) <= {-100}
                assert (
                    batch["attention_mask"][place, :length].all()
                    and not batch["attention_mask"][place, length:].any()
                )


def test_no_mask_where_nothing_is_padded():
    batch = collate(
        [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3, 4], "labels": [3, 4]}]
    )
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].tolist() == [[-100, 2], [3, 4]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "needs rows"),
        ([{"input_ids": [], "labels": []}], "needs tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids but 1 labels"),
        ([{"input_ids": [1, 2], "labels": [1, -100]}], "no token to train on"),
    ],
)
def test_batches_which_cannot_be_learnt_are_refused(rows, message):
    with pytest.raises(DataError, match=message):
        collate(rows)


def test_wrong_sizes_and_steps_are_refused(data):
    with pytest.raises(DataError, match="a batch cannot have 0 rows"):
        Batches(data, 0)
    with pytest.raises(DataError, match="data set is empty"):
        Batches([], 2)
    with pytest.raises(IndexError):
        Batches(data, 2).rows(-1)


def test_a_process_reads_its_share_of_each_batch_and_may_have_none() -> None:
    data = [{"input_ids": [1, 2, number], "labels": [1, 2, number]} for number in range(10)]
    processes = [
        Batches(data, 4, seed=3, rank=rank, size=3, micro_batch_size=2) for rank in range(3)
    ]
    whole = Batches(data, 4, seed=3)
    for step in range(6):
        found = [one.groups([step]) for one in processes]
        assert [row for share in found for group in share for row in group] == whole.groups([step])[
            0
        ]
        assert [not share for share in found] == [False, step % 3 == 2, True]
        assert [len(one.micro_batches([step])) for one in processes] == [
            len(share) for share in found
        ]
