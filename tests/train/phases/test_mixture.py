"""Mixtures: a sample is a function of seed, stage and place alone; rows come once an epoch, at
exact rates.
"""

import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema.data import Sampling, prepare_data
from lema.data.mixing.interleave import WINDOW
from lema.data.mixture import Draw, Mixture
from lema.data.packed import PackedTokens, write_packed
from lema.errors import ConfigError, DataError

BLOCK = 8
FOREVER = [
    ("1", 5555, 61),
    ("2", 749, 108),
    ("1", 5555, 19),
    ("1", 5555, 7),
    ("1", 5555, 64),
    ("1", 5555, 8),
    ("1", 5555, 9),
    ("0", 40003, 1),
]
FINGERPRINT = "034fda9424f95798020a3a726f4a87ca"


class Rows(Sequence):
    """Rows that are made when they are asked for: row n of them is the token n."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        assert 0 <= index < self.count
        return {"input_ids": [index] * 3, "labels": [index] * 3}


def batch_of(
    one: Mixture, start: int, count: int, rank: int = 0, size: int = 1, micro: int | None = None
):
    """The tokens of the rows that one of `size` processes has of `count` samples from `start`
    on.
    """
    return one.collated(one.rows(start, count, rank, size, micro), size)


def mixture(
    sizes: Sequence[int] = (5, 90, 400),
    rates: Sequence[float] = (0.2, 0.5, 0.3),
    seed: int = 3,
    **options,
):
    given_rates = [Sampling(f"data{place}", rate) for place, rate in enumerate(rates)]
    return Mixture(
        given_rates,
        {f"data{place}": Rows(size) for place, size in enumerate(sizes)},
        seed,
        BLOCK,
        **options,
    )


MIXTURES = st.lists(
    st.tuples(st.integers(1, 300), st.floats(1e-3, 1)), min_size=1, max_size=5
).flatmap(
    lambda pairs: st.builds(
        mixture,
        st.just([size for size, _ in pairs]),
        st.just([rate / math.fsum(rate for _, rate in pairs) for _, rate in pairs]),
        st.integers(-5, 2**64),
        stage=st.integers(0, 3),
    )
)


def again(one: Mixture, stage: int | None = None) -> Mixture:
    """The same mixture, which has not been asked anything."""
    sources = {name: Rows(len(source)) for name, source in one._sources.items()}
    return Mixture(
        one.samplings, sources, one.seed, one.block, stage=one.stage if stage is None else stage
    )


@settings(max_examples=30, deadline=None)
@given(one=MIXTURES, places=st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_sample_is_the_same_whenever_it_is_asked_for(one: Mixture, places: list[int]) -> None:
    found = [one.sample(place) for place in places]
    assert [one.sample(place) for place in reversed(places)] == found[::-1]
    assert [again(one).sample(place) for place in places] == found


@settings(max_examples=30, deadline=None)
@given(
    one=MIXTURES, first=st.integers(0, 10**9), batch=st.integers(1, 20), batches=st.integers(1, 5)
)
def test_a_run_goes_on_anywhere(one: Mixture, first: int, batch: int, batches: int) -> None:
    """Batches from any place on are those of the run that went through it, whatever their size."""
    count = batch * batches
    straight = one.rows(first, count)
    assert [
        row for start in range(first, first + count, batch) for row in again(one).rows(start, batch)
    ] == straight
    assert [again(one).sample(index) for index in range(first, first + count)] == straight


@settings(max_examples=30, deadline=None)
@given(
    one=MIXTURES,
    start=st.integers(0, 10**6),
    count=st.integers(1, 40),
    size=st.integers(1, 9),
    micro=st.none() | st.integers(1, 7),
)
def test_processes_share_the_same_batch(
    one: Mixture, start: int, count: int, size: int, micro: int | None
) -> None:
    shares = [again(one).rows(start, count, rank, size, micro) for rank in range(size)]
    assert sorted(row for share in shares for row in share) == sorted(one.rows(start, count))
    parts = [batch_of(again(one), start, count, rank, size, micro) for rank in range(size)]
    assert [part is None for part in parts] == [not share for share in shares]
    tokens = [row for part in parts if part is not None for row in part["input_ids"].tolist()]
    assert sorted(tokens) == sorted(batch_of(one, start, count)["input_ids"].tolist())
    if micro is not None:  # the micro-batches are the same, whatever the number of processes
        cut = [
            share[first : first + micro]
            for share in shares
            for first in range(0, len(share), micro)
        ]
        alone = one.rows(start, count, micro_batch_size=micro)
        assert sorted(cut) == sorted(
            alone[first : first + micro] for first in range(0, count, micro)
        )


@settings(max_examples=25, deadline=None)
@given(one=MIXTURES, samples=st.integers(1, 3000))
def test_every_row_comes_once_an_epoch_and_epochs_follow_each_other(
    one: Mixture, samples: int
) -> None:
    """Wherever one stops, a data set has given all rows of its epochs before, and of the last
    each once at most.
    """
    given_rows = Counter(map(one.sample, range(samples)))
    assert set(given_rows.values()) == {1}
    for name, source in one._sources.items():
        mine = [draw for draw in given_rows if draw.source == name]
        epochs, rest = divmod(len(mine), len(source))
        assert Counter(draw.epoch for draw in mine) == {
            **dict.fromkeys(range(epochs), len(source)),
            **({epochs: rest} if rest else {}),
        }


@settings(max_examples=25, deadline=None)
@given(one=MIXTURES, start=st.integers(0, 10**7), count=st.integers(0, 1500))
def test_rates_hold_and_counts_are_those_of_the_samples(
    one: Mixture, start: int, count: int
) -> None:
    drawn = Counter(one.sample(index).source for index in range(start, start + count))
    assert one.counts(count, start) == {name: drawn[name] for name in one._sources}
    windows = start // WINDOW * WINDOW
    for sampling in one.samplings:
        assert abs(one.counts(windows)[sampling.full_name] - sampling.rate * windows) < 2


def test_seeds_stages_and_epochs_have_orders_of_their_own() -> None:
    def order(seed: int, stage: int, first: int) -> tuple[Draw, ...]:
        rows = mixture(sizes=[WINDOW], rates=[1.0], seed=seed, stage=stage).rows(first, WINDOW)
        return tuple(row._replace(epoch=0) for row in rows)

    orders = {
        order(seed, stage, first) for seed in (0, 1) for stage in (0, 1) for first in (0, WINDOW)
    }
    assert len(orders) == 8
    sources = {
        tuple(draw.source for draw in mixture(seed=seed, stage=stage).rows(0, 64))
        for seed in (0, 1)
        for stage in (0, 1)
    }
    assert len(sources) == 4


def test_another_data_set_does_not_change_which_rows_come() -> None:
    """The n-th row of a data set is the same in any mixture: rates decide when it comes."""

    def rows_of(one: Mixture) -> set[Draw]:
        return {draw for draw in one.rows(0, 4 * WINDOW) if draw.source == "data1"}

    few = rows_of(mixture())
    many = rows_of(mixture(rates=(0.1, 0.8, 0.1)))
    assert len(few) < len(many) and few < many


def test_the_order_is_the_same_for_ever() -> None:
    """Written down: with another order, checkpoints would resume on other data."""
    assert [
        (draw.source[-1], draw.epoch, draw.row) for draw in mixture(seed=42, stage=1).rows(10**6, 8)
    ] == FOREVER
    assert mixture(seed=42).fingerprint() == FINGERPRINT


def test_a_fingerprint_is_of_what_decides_the_order() -> None:
    same = mixture().fingerprint()
    assert again(mixture()).fingerprint() == same
    others = [
        mixture(seed=4),
        mixture(stage=1),
        mixture(sizes=(6, 90, 400)),
        mixture(rates=(0.3, 0.4, 0.3)),
    ]
    assert len({same, *(one.fingerprint() for one in others)}) == 5


def test_memory_does_not_grow_with_the_data() -> None:
    def most(count: int) -> int:
        tracemalloc.start()
        one = mixture(
            sizes=(count, count // 3, 1),
            eval_sources={f"data{place}": Rows(count) for place in range(3)},
        )
        for step in range(20):
            batch_of(one, count // 2 + 4 * step, 4)
        one.validation(4)
        one.counts(count)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    most(1000)
    assert most(10**15) < 2 * most(1000) + 100_000


@pytest.fixture
def packed(tmp_path: Path) -> PackedTokens:
    return PackedTokens(write_packed(range(1, 101), tmp_path / "text", vocab_size=200), BLOCK)


@pytest.fixture
def chats():
    rows = [
        {"input_ids": [150 + n] * (2 + n % 7), "labels": [-100] + [150 + n] * (1 + n % 7)}
        for n in range(20)
    ]
    return prepare_data(rows, max_length=BLOCK)


def both(packed: PackedTokens, chats: object, **options: object) -> Mixture:
    samplings = [Sampling("text", 0.6, "PMD"), Sampling("chats", 0.4, "padded")]
    return Mixture(
        samplings,
        {"text": packed, "chats": chats, "other": []},
        5,
        BLOCK,
        pad_token_id=9,
        **options,
    )


def test_packed_blocks_and_padded_rows_share_a_batch(packed: PackedTokens, chats) -> None:
    one = both(packed, chats)
    batch = batch_of(one, 0, 40)
    rows = one.rows(0, 40)
    assert all(
        tensor.shape == (40, BLOCK) and tensor.dtype == torch.long for tensor in batch.values()
    )
    assert {draw.source for draw in rows} == {"text", "chats"}
    for place, draw in enumerate(rows):
        ids, labels, mask = (
            batch[key][place].tolist() for key in ("input_ids", "labels", "attention_mask")
        )
        if draw.source == "text":
            assert ids == labels == packed.block(draw.row).tolist() and mask == [1] * BLOCK
        else:
            row = chats[draw.row]
            padding = BLOCK - chats.num_tokens(draw.row)
            assert ids == row["input_ids"] + [9] * padding
            assert labels == row["labels"] + [-100] * padding
            assert mask == [1] * (BLOCK - padding) + [0] * padding


def test_rows_of_a_batch_are_put_together_by_length(packed: PackedTokens, chats) -> None:
    """The longest come first, those of packed tokens among them, in training as in validation."""
    one = both(packed, chats, eval_sources={"text": packed, "chats": list(chats)})
    for batch in (batch_of(one, 0, 40), one.validation(40)):
        lengths = batch["attention_mask"].sum(1).tolist()
        assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 7


def test_rows_are_padded_to_a_block_even_where_all_are_shorter() -> None:
    batch = batch_of(mixture(), 0, 4)
    assert batch["input_ids"].shape == (4, BLOCK)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 4
    assert batch["labels"].eq(-100).tolist() == [[False] * 3 + [True] * 5] * 4


def test_no_mask_where_nothing_is_padded(packed: PackedTokens) -> None:
    one = Mixture([Sampling("text", 1.0, "PMD")], {"text": packed}, 1, BLOCK)
    assert set(batch_of(one, 3, 5)) == {"input_ids", "labels"}


def test_what_is_learnt_from_never_writes_into_the_data(packed: PackedTokens, chats) -> None:
    one = both(packed, chats)
    before = batch_of(one, 0, 30)["labels"].clone()
    batch_of(one, 0, 30)["labels"].fill_(0)
    assert torch.equal(batch_of(one, 0, 30)["labels"], before)


def test_the_validation_batch_is_fixed_and_has_all_rates() -> None:
    held_out = {f"data{place}": Rows(1000 + place) for place in range(3)}
    batches = [
        mixture(seed=seed, stage=stage, sizes=sizes, eval_sources=held_out).validation(20)
        for seed, stage, sizes in [(0, 0, (5, 90, 400)), (1, 0, (5, 90, 400)), (0, 2, (7, 8, 9))]
    ]
    assert all(torch.equal(batch["input_ids"], batches[0]["input_ids"]) for batch in batches)
    one = mixture(eval_sources=held_out)
    shares = [one.validation(20, rank, 3, 2) for rank in range(3)]
    found = torch.cat([share["input_ids"] for share in shares]).tolist()
    assert sorted(found) == sorted(batches[0]["input_ids"].tolist())
    assert mixture(eval_sources=held_out).validation(1, 1, 2) is None


@settings(max_examples=25, deadline=None)
@given(one=MIXTURES, count=st.integers(1, 60))
def test_rows_held_out_come_as_often_as_their_rates_say(one: Mixture, count: int) -> None:
    """The first token of a row says which it is: data sets are told apart by their thousands
    here.
    """

    class Apart(Rows):
        def __init__(self, place: int) -> None:
            super().__init__(500)
            self.place = place

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {key: [1000 * self.place + index, 1] for key in ("input_ids", "labels")}

    held_out = {sampling.name: Apart(place) for place, sampling in enumerate(one.samplings)}
    batch = Mixture(one.samplings, one._sources, 0, BLOCK, eval_sources=held_out).validation(count)
    tokens = batch["input_ids"][:, 0].tolist()
    assert len(set(tokens)) == count  # no row twice
    found = Counter(token // 1000 for token in tokens)
    assert all(
        abs(found[place] - one.samplings[place].rate * count) < 2
        for place in range(len(one.samplings))
    )


def test_training_rows_are_never_validated_on_unasked() -> None:
    with pytest.raises(ConfigError, match="nothing to validate on") as caught:
        mixture().validation(4)
    assert caught.value.where == "eval_data"
    with pytest.raises(ConfigError, match="no data set 'data1'"):
        mixture(eval_sources={"data0": Rows(3), "data2": Rows(3)})


def test_an_unknown_data_set_is_named_with_those_like_it(packed: PackedTokens, chats) -> None:
    sources = {"fineweb": chats, "fineweb_small": packed, "other": chats}
    with pytest.raises(ConfigError, match="there is no data set 'finweb'") as caught:
        Mixture([Sampling("finweb", 1.0)], sources, 1, BLOCK)
    assert "did you mean fineweb" in caught.value.how and "other" not in caught.value.how
    with pytest.raises(ConfigError, match="'fineweb_smal'") as caught:
        Mixture([Sampling("fineweb", 1.0, "PMD", "_smal")], sources, 1, BLOCK)
    assert "fineweb_small" in caught.value.how
    with pytest.raises(ConfigError, match="'qqqq'") as caught:
        Mixture([Sampling("qqqq", 1.0)], sources, 1, BLOCK)
    assert "fineweb" in caught.value.how
    with pytest.raises(ConfigError, match="'text'") as caught:
        Mixture([Sampling("text", 1.0)], {}, 1, BLOCK)
    assert "give its rows" in caught.value.how


@pytest.mark.parametrize(("style", "suffix"), [("PADDED", "text"), ("PMD", "chats")])
def test_a_style_other_than_the_data_is_refused(
    packed: PackedTokens, chats, style: str, suffix: str
) -> None:
    with pytest.raises(ConfigError, match=f"has the style {style}"):
        Mixture([Sampling(suffix, 1.0, style)], {"text": packed, "chats": chats}, 1, BLOCK)


def test_data_that_do_not_fit_the_blocks_are_refused_before_training(
    packed: PackedTokens, chats
) -> None:
    with pytest.raises(DataError, match="blocks of 8 tokens, not of 4") as caught:
        Mixture([Sampling("text", 1.0, "PMD")], {"text": packed}, 1, 4)
    assert "train.bin" in caught.value.where
    with pytest.raises(DataError, match="has 5 tokens, more than a block of 4") as caught:
        Mixture([Sampling("chats", 1.0)], {"chats": chats}, 1, 4)
    assert caught.value.where == "rows:4" and "max_length" in caught.value.how
    with pytest.raises(DataError, match="'chats' is empty"):
        Mixture([Sampling("chats", 1.0)], {"chats": []}, 1, 4)


def test_a_row_of_another_source_is_refused_when_it_comes() -> None:
    one = Mixture(
        [Sampling("long", 1.0)], {"long": [{"input_ids": [1] * 9, "labels": [1] * 9}]}, 1, BLOCK
    )
    with pytest.raises(DataError, match="row of 'long' has 9 tokens") as caught:
        batch_of(one, 0, 1)
    assert caught.value.where == "row 0"


def test_a_token_beyond_the_vocabulary_is_met_with_its_file(tmp_path: Path) -> None:
    file = write_packed(np.full(16, 300), tmp_path)
    one = Mixture(
        [Sampling("text", 1.0, "PMD")],
        {"text": PackedTokens(file, BLOCK, vocab_size=256)},
        1,
        BLOCK,
    )
    with pytest.raises(DataError, match="id 300 is outside the vocabulary of 256") as caught:
        batch_of(one, 0, 2)
    assert str(file) in caught.value.where


def test_rates_and_places_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"sum to 0\.9, not to 1"):
        mixture(rates=(0.2, 0.4, 0.3))
    with pytest.raises(IndexError):
        mixture().sample(-1)
    with pytest.raises(IndexError):
        mixture().rows(-1, 2)
    with pytest.raises(DataError, match="a batch cannot have 0 samples"):
        batch_of(mixture(), 0, 0)
