"""A data set's place in a mixture: rates that sum to 1, styles by name, and the order of any
number of rows.
"""

import math
import tracemalloc
from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lema.data import Sampling
from lema.data.mixing.interleave import WINDOW, Interleaving
from lema.data.mixing.permutation import Permutation, shuffled_row
from lema.data.mixing.sampling import SamplingError, Style, check_rates
from lema.errors import ConfigError

RATES = st.lists(st.floats(1e-4, 1), min_size=1, max_size=7).map(
    lambda weights: {
        f"data{place}": weight / math.fsum(weights) for place, weight in enumerate(weights)
    }
)

ORDER = [7, 3, 5, 4, 6, 0, 2, 1, 9, 8]
EPOCHS = [1, 4, 3, 0, 2, 0, 3, 4, 1, 2]
SLOTS = [
    ("b", 0),
    ("a", 0),
    ("c", 0),
    ("a", 1),
    ("b", 1),
    ("a", 2),
    ("c", 1),
    ("a", 3),
    ("b", 2),
    ("a", 4),
]
SAMPLES = [("b", 0), ("a", 0), ("a", 1), ("c", 0), ("b", 1)]


@pytest.mark.parametrize("style", ["PMD", "pmd", "Pmd", Style.PMD])
def test_a_style_is_named_in_capitals_or_not(style: str) -> None:
    assert Sampling("text", 1, style) == Sampling(name="text", rate=1.0, style=Style.PMD, suffix="")
    assert Sampling("text", 1).style is Style.PADDED
    assert Sampling("text", 0.5, style, "_small").full_name == "text_small"


@pytest.mark.parametrize("style", ["CONTRASTIVE", "contrastive"])
def test_contrastive_is_refused_by_its_name(style: str) -> None:
    with pytest.raises(ConfigError, match="CONTRASTIVE is not supported") as caught:
        Sampling("text", 1.0, style)
    assert "PADDED, PMD" in caught.value.how


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (("", 1.0), "name"),
        ((" ", 1.0), "name"),
        ((3, 1.0), "name"),
        (("text", 0), "rate"),
        (("text", -0.5), "rate"),
        (("text", 1.5), "rate"),
        (("text", math.nan), "rate"),
        (("text", math.inf), "rate"),
        (("text", True), "rate"),
        (("text", "0.5"), "rate"),
        (("text", 1.0, "packed"), "style"),
        (("text", 1.0, None), "style"),
        (("text", 1.0, ["PMD"]), "style"),
        (("text", 1.0, "PMD", None), "suffix"),
    ],
)
def test_values_that_make_no_sampling_are_refused(values: tuple, where: str) -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(*values)
    assert caught.value.where == where and repr(
        values[["name", "rate", "style", "suffix"].index(where)]
    ) in str(caught.value)


def test_pydantic_reads_samplings_and_lists_what_is_wrong_with_all_of_them() -> None:
    adapter = TypeAdapter(list[Sampling])
    read = adapter.validate_python(
        [{"name": "text", "rate": 1, "style": "pmd"}, {"name": "chat", "rate": 0.25}]
    )
    assert read == [Sampling("text", 1.0, Style.PMD), Sampling("chat", 0.25)]
    assert adapter.validate_json(adapter.dump_json(read)) == read
    wrong = [
        {"name": "text", "rate": 2.0},
        {"name": "text", "rate": 1.0, "style": "contrastive"},
        {"name": "text", "rate": "1.0"},
        {"name": "text", "rate": 1.0, "weight": 3},
        {"rate": 1.0},
    ]
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(wrong)
    assert {error["loc"][0] for error in caught.value.errors()} == set(range(len(wrong)))


@pytest.mark.parametrize(
    "rates", [[1.0], [0.7, 0.3], [1 / 3] * 3, [0.3333333] * 3, [0.1] * 10, [0.999999, 1e-6]]
)
def test_rates_that_sum_to_one_are_a_mixture(rates: list[float]) -> None:
    check_rates([Sampling(f"data{place}", rate) for place, rate in enumerate(rates)])


@pytest.mark.parametrize("rates", [[0.5], [0.7, 0.2], [0.6, 0.6], [0.5, 0.500002], [0.333] * 3])
def test_rates_that_do_not_are_refused_with_their_sum(rates: list[float]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rates(
            [Sampling(f"data{place}", rate) for place, rate in enumerate(rates)],
            "post_lora_datasets[1]",
        )
    assert (
        f"{sum(rates):.9g}" in caught.value.what and caught.value.where == "post_lora_datasets[1]"
    )
    assert all(f"data{place} {rate:g}" in caught.value.what for place, rate in enumerate(rates))


def test_a_data_set_is_given_once_and_there_is_one() -> None:
    with pytest.raises(ConfigError, match="has text more than once"):
        check_rates([Sampling("text", 0.5), Sampling("text", 0.5, "PMD")])
    with pytest.raises(ConfigError, match="no data sets"):
        check_rates([])
    check_rates([Sampling("text", 0.5), Sampling("text", 0.5, suffix="_other")])


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 2000), seed=st.integers(-(2**70), 2**70))
def test_an_order_has_everything_once(count: int, seed: int) -> None:
    order = Permutation(count, "rows", seed)
    assert sorted(map(order, range(count))) == list(range(count))


def test_an_order_of_few_has_everything_once() -> None:
    for count in range(1, 150):
        assert sorted(map(Permutation(count, 7), range(count))) == list(range(count))


@given(count=st.integers(2**40, 2**62), place=st.integers(0, 2**39))
def test_an_order_of_very_many_takes_no_memory(count: int, place: int) -> None:
    order = Permutation(count, 1)
    assert 0 <= order(place) < count and order(place) == Permutation(count, 1)(place) != order(
        place + 1
    )


def test_every_order_of_few_is_as_likely() -> None:
    """Chi-squared over the orders that 3,000 keys give: for each count, within five deviations
    of its mean.
    """
    for count in (2, 3, 4):
        found = Counter(
            tuple(map(Permutation(count, "likely", key), range(count))) for key in range(3_000)
        )
        expected = 3_000 / math.factorial(count)
        chi = sum((found[order] - expected) ** 2 / expected for order in permutations(range(count)))
        degrees = math.factorial(count) - 1
        assert chi < degrees + 5 * math.sqrt(2 * degrees)


def test_what_follows_a_row_is_any_other_row() -> None:
    """Chi-squared over pairs of neighbours within a long order: those of a poor shuffle keep
    their distance.
    """
    count = 20_000
    bins = 20
    row = list(map(Permutation(count, "neighbours"), range(count)))
    found = Counter(
        (first * bins // count, second * bins // count) for first, second in pairwise(row)
    )
    expected = (count - 1) / bins**2
    chi = sum((found[a, b] - expected) ** 2 / expected for a in range(bins) for b in range(bins))
    assert abs(chi - bins**2) < 5 * math.sqrt(2 * bins**2)


def test_an_order_is_the_same_for_ever() -> None:
    """Written down: with another order, checkpoints would resume on other data."""
    assert list(map(Permutation(10, "rows", 42), range(10))) == ORDER
    assert [shuffled_row(5, index, "rows", 42)[1] for index in range(10)] == EPOCHS
    turns = Interleaving({"a": 0.5, "b": 0.3, "c": 0.2}, "turns", 42, 0)
    assert [turns.slot(slot) for slot in range(10)] == SLOTS
    assert [turns.sample(index) for index in range(5)] == SAMPLES


def test_places_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="0 things"):
        Permutation(0)
    for place in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5)(place)


@given(count=st.integers(1, 60), epoch=st.integers(0, 50), key=st.integers(0, 9))
def test_every_row_comes_once_an_epoch_in_another_order(count: int, epoch: int, key: int) -> None:
    drawn = [shuffled_row(count, index, key) for index in range(epoch * count, (epoch + 2) * count)]
    first = drawn[:count]
    second = drawn[count:]
    assert {number for number, _ in first} == {epoch} and {number for number, _ in second} == {
        epoch + 1
    }
    assert sorted(row for _, row in first) == sorted(row for _, row in second) == list(range(count))
    if count > 30:  # the odds that two orders are alike are none
        assert [row for _, row in first] != [row for _, row in second]


@settings(deadline=None)
@given(rates=RATES, first=st.integers(0, 10**12), count=st.integers(1, 80))
def test_turns_are_counted_without_being_counted(
    rates: dict[str, float], first: int, count: int
) -> None:
    """What a slot says of the slots before it agrees with going through them, from any place on."""
    turns = Interleaving(rates)
    seen: dict[str, int] = {}
    for slot in range(first, first + count):
        name, taken = turns.slot(slot)
        assert seen.get(name, taken) == taken
        seen[name] = taken + 1
        # rates are not quite exact
        assert abs(taken - slot * rates[name]) < (0.5 if len(rates) == 2 else 2) + 1e-3
    assert len(rates) > 1 or turns.slot(first) == ("data0", first)


@settings(max_examples=25, deadline=None)
@given(rates=RATES, window=st.integers(0, 10**9))
def test_rates_hold_over_any_number_of_windows(rates: dict[str, float], window: int) -> None:
    counts = Interleaving(rates, 3).counts(window * WINDOW)
    assert sum(counts.values()) == window * WINDOW and list(counts) == list(rates)
    for name, rate in rates.items():
        assert abs(counts[name] - window * WINDOW * rate) < 2 + 1e-15 * window * WINDOW


@settings(max_examples=8, deadline=None)
@given(rates=RATES, window=st.integers(0, 10**6), rest=st.integers(0, WINDOW))
def test_samples_of_a_window_are_its_slots_in_another_order(
    rates: dict[str, float], window: int, rest: int
) -> None:
    turns = Interleaving(rates, "turns", 5)
    first = window * WINDOW
    samples = [turns.sample(index) for index in range(first, first + WINDOW)]
    slots = [turns.slot(slot) for slot in range(first, first + WINDOW)]
    assert sorted(samples) == sorted(slots)
    most = max(Counter(name for name, _ in slots).values())
    # the odds that so many come in the same order are none
    assert WINDOW - most < 20 or samples != slots
    taken: dict[str, list[int]] = {}
    for name, which in samples:
        taken.setdefault(name, []).append(which)
    assert all(
        numbers == list(range(numbers[0], numbers[0] + len(numbers))) for numbers in taken.values()
    )
    before = turns.counts(first)
    after = turns.counts(first + rest)
    given_by = Counter(name for name, _ in samples[:rest])
    assert {name: after[name] - before[name] for name in rates} == {
        name: given_by[name] for name in rates
    }


def test_the_order_in_which_data_sets_are_listed_changes_nothing() -> None:
    rates = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.15, "e": 0.1}
    backwards = dict(reversed(rates.items()))
    assert list(map(Interleaving(rates, 1).sample, range(300))) == list(
        map(Interleaving(backwards, 1).sample, range(300))
    )


def test_a_very_small_rate_is_kept_exactly() -> None:
    rates = {"most": 0.99999, "rare": 0.00001}
    for samples in (WINDOW * 10**3, WINDOW * 10**8):
        assert Interleaving(rates).counts(samples)["rare"] == round(samples * 1e-5)


def test_memory_does_not_grow_with_the_samples() -> None:
    def peak(first: int) -> int:
        turns = Interleaving({"a": 0.6, "b": 0.4}, first)
        tracemalloc.start()
        for index in range(first, first + 500):
            shuffled_row(10**15, turns.sample(index)[1], first)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)
    assert peak(10**14) < 100_000
