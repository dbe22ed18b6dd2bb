"""Fades between mixtures, and data sets that are gone on with: a sample is a function of its
place, rates are kept.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema.config.problems import SettingsError
from lema.data import Sampling
from lema.data.mixing.interleave import PIECES, SHAPES, UNIT, WINDOW, Fade, Interleaving, _tables
from lema.data.mixing.sampling import Start, rates_of
from lema.data.mixture import Draw, Mixture
from lema.errors import ConfigError
from lema.train.phases.plan import PhasePlan

BLOCK = 8
ROWS = 4
STEP = BLOCK * ROWS
# of all shapes, written down: with others, runs would go on with other data
TABLES = "9d81f5d4821e6486ba71ac5bd06dbf3a"
SHAPE_NAMES = st.sampled_from(sorted(SHAPES))


def mix(*rates: tuple[str, float]) -> tuple[Sampling, ...]:
    return tuple(Sampling(name, rate) for name, rate in rates)


TEXT = mix(("text", 1.0))
BOTH = mix(("text", 0.3), ("chat", 0.7))
CHAT = mix(("chat", 1.0))


class Rows(Sequence):
    """So many rows; which they are does not matter here."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        assert 0 <= index < self.count
        return {"input_ids": [index % 100] * 3, "labels": [index % 100] * 3}


SOURCES = {name: Rows(size) for name, size in (("text", 1000), ("chat", 90), ("code", 41))}


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Sampling, ...]:
    names = draw(st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=3, unique=True))
    shares = [draw(st.integers(1, 99)) for _ in names]
    return tuple(
        Sampling(name, share / sum(shares)) for name, share in zip(names, shares, strict=True)
    )


def weight(fade: Fade, index: int) -> float:
    """The weight of the mixture before at a sample; 0 after the fade."""
    if index >= fade.samples:
        return 0.0
    weights, _ = _tables(fade.shape)
    piece, rest = divmod(index * PIECES, fade.samples)
    return (weights[piece] + (weights[piece + 1] - weights[piece]) * rest / fade.samples) / UNIT


def faded_rates(samplings: Sequence[Sampling], fade: Fade | None, index: int) -> dict[str, float]:
    """The rate of each data set at a sample: between those before and the stage's own, while
    they fade.
    """
    rates = rates_of(samplings)
    if fade is None:
        return rates
    share = weight(fade, index)
    before = rates_of(fade.before)
    names = [*rates, *(name for name in before if name not in rates)]
    return {
        name: share * before.get(name, 0.0) + (1 - share) * rates.get(name, 0.0) for name in names
    }


@given(SHAPE_NAMES, st.integers(1, 5000))
def test_every_slot_is_given_once_and_weights_fall_from_one_to_nothing(
    shape: str, samples: int
) -> None:
    fade = Fade(TEXT, samples, shape)
    given_before = [fade.num_before(count) for count in range(samples + 3)]
    assert {after - before for before, after in pairwise(given_before)} <= {0, 1}
    weights = [weight(fade, index) for index in range(samples)]
    assert weights[0] == 1.0 and weight(fade, samples) == weight(fade, 10**15) == 0.0
    assert weights == sorted(weights, reverse=True) and min(weights) > 0
    # every shape is even about its middle
    assert fade.num_before(10**15) == given_before[-1] == (samples + 1) // 2
    for count in range(0, samples, 1 + samples // 7):
        assert abs(given_before[count] - math.fsum(weights[:count])) <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ("linear", {0: 1.0, 100: 0.75, 200: 0.5, 300: 0.25, 399: 1 / 400}),
        (
            "cosine",
            {0: 1.0, 100: (1 + math.sqrt(0.5)) / 2, 200: 0.5, 300: (1 - math.sqrt(0.5)) / 2},
        ),
        ("sigmoid", {0: 1.0, 100: 0.92990, 160: 0.73419, 200: 0.5, 240: 0.26581, 300: 0.07010}),
    ],
)
def test_each_shape_is_its_formula(shape: str, at: dict[int, float]) -> None:
    fade = Fade(TEXT, 400, shape)
    assert {index: weight(fade, index) for index in at} == pytest.approx(at, abs=2e-5)


def test_the_weights_are_the_same_for_ever_and_no_rounding_of_them_is_close() -> None:
    """A cosine differs in its last bits between machines: none of those that are rounded is near
    a half.
    """
    told = str({shape: _tables(shape) for shape in sorted(SHAPES)})
    assert blake2b(told.encode(), digest_size=16).hexdigest() == TABLES
    for shape in SHAPES.values():
        for place in range(PIECES + 1):
            exact = UNIT * shape(place / PIECES)
            assert abs(exact - math.floor(exact) - 0.5) > 1e-6


def faded(
    own: Sequence[Sampling], fade: Fade | None, seed: int = 3, stage: int = 1, **options: Any
) -> Mixture:
    return Mixture(own, SOURCES, seed, BLOCK, stage=stage, fade=fade, **options)


@settings(max_examples=25, deadline=None)
@given(
    mixtures(),
    mixtures(),
    SHAPE_NAMES,
    st.integers(1, 3000),
    st.integers(0, 6000),
    st.integers(1, 30),
)
def test_a_sample_under_a_fade_is_a_function_of_its_place(
    before: Sequence[Sampling],
    own: Sequence[Sampling],
    shape: str,
    samples: int,
    first: int,
    count: int,
) -> None:
    fade = Fade(tuple(before), samples, shape)
    found = faded(own, fade).rows(first, count)
    again = faded(own, fade)
    assert [again.sample(index) for index in reversed(range(first, first + count))] == found[::-1]
    shares = [faded(own, fade).rows(first, count, rank, 3, 2) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == sorted(found)


@settings(max_examples=25, deadline=None)
@given(mixtures(), mixtures(), SHAPE_NAMES, st.integers(1, 3000), st.integers(1, 5000))
def test_rates_hold_under_a_fade_and_after_it(
    before: Sequence[Sampling], own: Sequence[Sampling], shape: str, samples: int, count: int
) -> None:
    """Of the first n slots a data set has the sum of its rates at each, give or take less than 5
    (two of them: 2).
    """
    fade = Fade(tuple(before), samples, shape)
    turns = Interleaving(rates_of(own), 1, fade=fade)
    names = {one.full_name for one in (*before, *own)}
    owed = dict.fromkeys(names, 0.0)
    taken = dict.fromkeys(names, 0)
    most = 2 if len(names) <= 2 else 5
    for slot in range(count):
        name, nth = turns.slot(slot)
        assert nth == taken[name]
        taken[name] += 1
        for one, rate in faded_rates(own, fade, slot).items():
            owed[one] += rate
        assert all(abs(owed[one] - taken[one]) < most + 1e-6 for one in names)


@settings(max_examples=20, deadline=None)
@given(
    mixtures(),
    mixtures(),
    SHAPE_NAMES,
    st.integers(1, 3000),
    st.integers(0, 5000),
    st.integers(0, 900),
)
def test_counts_under_a_fade_are_those_of_the_samples(
    before: Sequence[Sampling],
    own: Sequence[Sampling],
    shape: str,
    samples: int,
    start: int,
    count: int,
) -> None:
    one = faded(own, Fade(tuple(before), samples, shape))
    drawn = Counter(one.sample(index).source for index in range(start, start + count))
    found = one.counts(count, start)
    assert found == {name: drawn[name] for name in found} and sum(found.values()) == count


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(mixtures(), mixtures(), st.integers(1, 2500), st.integers(1, 4000))
def test_every_row_comes_once_an_epoch_under_a_fade_too(
    before: Sequence[Sampling], own: Sequence[Sampling], samples: int, count: int
) -> None:
    drawn = Counter(
        faded(own, Fade(tuple(before), samples)).sample(index) for index in range(count)
    )
    assert set(drawn.values()) == {1}
    for name, source in SOURCES.items():
        mine = sorted(draw.epoch * len(source) for draw in drawn if draw.source == name)
        epochs, rest = divmod(len(mine), len(source))
        ones = [epoch * len(source) for epoch in range(epochs) for _ in range(len(source))]
        assert mine == ones + [epochs * len(source)] * rest


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("samples", [64, 640, 6400, 64_000])
def test_shuffling_does_not_even_a_fade_out(shape: str, samples: int) -> None:
    """An eighth of the fade at a time, the share of the mixture before is its weight, within a
    tenth.
    """
    fade = Fade(TEXT, samples, shape)
    one = faded(CHAT, fade)
    part = samples // 8
    for first in range(0, samples, part):
        mean = math.fsum(weight(fade, index) for index in range(first, first + part)) / part
        assert one.counts(part, first)["text"] / part == pytest.approx(mean, abs=0.13)
    assert one.counts(1000, samples)["text"] == 0
    assert one.counts(samples)["text"] == pytest.approx(samples / 2, abs=1)


def test_rates_go_from_the_mixture_before_to_the_own_one() -> None:
    one = faded(BOTH, Fade(TEXT, 100_000, "linear"))
    counts = [one.counts(1000, start) for start in (0, 24_500, 49_500, 100_000, 10**9)]
    assert [given["text"] / 1000 for given in counts] == pytest.approx(
        [1.0, 0.825, 0.65, 0.3, 0.3], abs=0.05
    )
    assert [given["chat"] / 1000 for given in counts] == pytest.approx(
        [0.0, 0.175, 0.35, 0.7, 0.7], abs=0.05
    )
    assert faded(BOTH, None).counts(1000)["chat"] == pytest.approx(700, abs=50)
    assert list(faded(CHAT, Fade(TEXT, 10)).counts(20)) == ["chat", "text"]


def test_a_fade_is_of_what_decides_the_order_and_leaves_validation_as_it_is() -> None:
    ones = [
        faded(BOTH, fade, starts=starts)
        for fade in (None, Fade(TEXT, 50), Fade(TEXT, 51), Fade(TEXT, 50, "cosine"), Fade(CHAT, 50))
        for starts in (None, {"text": Start(0, 5)})
    ]
    assert len({one.fingerprint() for one in ones}) == len(ones)
    assert (
        faded(BOTH, None, starts={"text": Start(1, 0)}).fingerprint()
        == faded(BOTH, None).fingerprint()
    )
    plain, other = (
        faded(CHAT, fade, eval_sources=SOURCES).validation(6) for fade in (None, Fade(TEXT, 50))
    )
    assert plain is not None and other is not None
    assert plain["input_ids"].tolist() == other["input_ids"].tolist()


def test_the_data_sets_of_both_mixtures_must_be_there() -> None:
    with pytest.raises(ConfigError, match="there is no data set 'gone'"):
        faded(BOTH, Fade(mix(("gone", 1.0)), 5))
    for wrong, said in (
        (lambda: Fade(TEXT, 0), "a fade cannot have 0 samples"),
        (lambda: Fade(TEXT, 5, "steep"), "no fade 'steep'"),
        (lambda: Fade((), 5), "no data sets"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()


# --- in a plan


def phase(mixture: Sequence[Sampling], steps: int = 50, **options: Any) -> dict[str, Any]:
    given_options = {"trains": "full", "tokens": steps * STEP, "learning_rate": 1e-3, **options}
    return {"mixture": [{"name": one.name, "rate": one.rate} for one in mixture], **given_options}


def plan(*phases: dict[str, Any], **options: Any) -> PhasePlan:
    return PhasePlan(
        phases=list(phases), batch_size=ROWS, max_length=BLOCK, **{"seed": 3, **options}
    )


def of(found: PhasePlan, index: int) -> Mixture:
    """The mixture of a phase, as a run makes it."""
    own = found.phases[index].mixture
    fade = found.fade(index)
    starts = found.starts()[index]
    return Mixture(own, SOURCES, found.seed, BLOCK, stage=index, fade=fade, starts=starts)


def drawn(found: PhasePlan) -> list[list[Draw]]:
    return [
        of(found, index).rows(0, ROWS * found.steps(index).steps)
        for index in range(len(found.phases))
    ]


def test_the_trace_of_rates_over_a_boundary() -> None:
    found = plan(phase(TEXT, 5), phase(BOTH, 8, fade={"steps": 4}))

    def rates(index: int, step: int) -> dict[str, float]:
        return faded_rates(found.phases[index].mixture, found.fade(index), step * ROWS)

    trace = [
        rates(index, step)["text"] for index, steps in enumerate((5, 8)) for step in range(steps)
    ]
    assert trace == pytest.approx([1.0] * 5 + [1.0, 0.825, 0.65, 0.475] + [0.3] * 4)
    tokens = plan(phase(TEXT, 5), phase(BOTH, 8, fade={"tokens": 4 * STEP, "shape": "LINEAR"}))
    assert tokens.fade(1) == found.fade(1) == Fade(TEXT, 16, "linear")
    assert tokens.fingerprint() == found.fingerprint()
    assert found.fade(0) is None and rates(0, 0) == {"text": 1.0}


def test_what_is_read_in_a_phase_is_counted_without_reading() -> None:
    found = plan(
        phase(BOTH, 300), phase(TEXT, 77, fade={"steps": 30, "shape": "cosine"}), phase(CHAT, 10)
    )
    for index, draws in enumerate(drawn(found)):
        counted = Counter(draw.source for draw in draws)
        assert found.counts(index) == {name: counted[name] for name in found.counts(index)}


def test_two_stages_over_one_data_set_do_not_read_a_row_twice() -> None:
    """`continue`: over all stages, every row comes once before any comes again, wherever a stage
    ends.
    """
    lengths = (40, 60, 33)  # 532 rows of 1000; 160 is no whole window
    going_on = plan(*(phase(TEXT, length) for length in lengths))
    rows = [draw.row for draws in drawn(going_on) for draw in draws]
    assert len(rows) == len(set(rows)) == ROWS * sum(lengths)
    assert [found["text"] for found in going_on.starts()] == [
        Start(0, 0),
        Start(0, 160),
        Start(0, 400),
    ]
    afresh = plan(*(phase(TEXT, length, data="restart") for length in lengths))
    rows = [draw.row for draws in drawn(afresh) for draw in draws]
    assert len(set(rows)) < len(rows)
    assert {found["text"].taken for found in afresh.starts()} == {0}
    (whole,) = drawn(plan(phase(TEXT, sum(lengths))))
    # no boundaries
    assert [draw.row for draws in drawn(going_on) for draw in draws] == [draw.row for draw in whole]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(mixtures(), st.integers(1, 120), st.booleans()), min_size=2, max_size=4),
    SHAPE_NAMES,
)
def test_data_sets_go_on_through_mixtures_and_fades(
    stages: list[tuple[Any, int, bool]], shape: str
) -> None:
    phases = []
    for place, (mixture, steps, fades) in enumerate(stages):
        other = place and rates_of(mixture) != rates_of(stages[place - 1][0])
        phases.append(
            phase(
                mixture,
                steps,
                **({"fade": {"steps": steps, "shape": shape}} if fades and other else {}),
            )
        )
    found = drawn(plan(*phases))
    for name, source in SOURCES.items():
        mine = [draw for draws in found for draw in draws if draw.source == name]
        assert len(set(mine)) == len(mine)  # no row twice in an epoch
        assert [draw.epoch for draw in mine] == [place // len(source) for place in range(len(mine))]


def test_restart_is_of_one_phase_and_continue_takes_up_what_was_left() -> None:
    found = plan(phase(TEXT, 10), phase(CHAT, 5), phase(TEXT, 10, data="restart"), phase(BOTH, 20))
    assert found.starts()[2] == {"text": Start(2, 0)}
    assert found.starts()[3] == {"text": Start(2, 40), "chat": Start(1, 20)}
    assert drawn(found)[2] != drawn(found)[0]


def test_where_data_begin_is_in_the_numbers() -> None:
    def numbers(*options: dict[str, Any]) -> str:
        return plan(
            *(phase((TEXT, BOTH)[place % 2], 10, **one) for place, one in enumerate(options))
        ).fingerprint()

    fade = {"steps": 4, "shape": "cosine"}
    # nothing was read before
    assert numbers({}, {}) == numbers({"data": "restart"}, {"data": "continue"})
    kinds = [
        ({}, {}),
        ({}, {"data": "restart"}),
        ({}, {"fade": fade}),
        ({}, {"fade": fade | {"shape": "linear"}}),
    ]
    kinds.append(({}, {"fade": fade | {"steps": 5}}))
    assert len({numbers(*one) for one in kinds}) == len(kinds)
    now = plan(phase(TEXT, 10), phase(TEXT, 10, data="restart"))
    then = plan(phase(TEXT, 10), phase(TEXT, 10))
    assert now.differences(then.numbers()) == [
        "phases[1].data.text.stage is 1, and was 0",
        "phases[1].data.text.taken is 0, and was 40",
    ]


@pytest.mark.parametrize(
    ("phases", "key", "said"),
    [
        (
            (phase(TEXT, fade={"steps": 2}),),
            "phases[0].fade",
            "the first phase has no earlier mixture",
        ),
        (
            (phase(TEXT), phase(TEXT, fade={"steps": 2})),
            "phases[1].fade",
            "nothing fades (leave fade out)",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"steps": 51})),
            "phases[1].fade.steps",
            "is 204 rows, and the phase has 200",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"tokens": 7})),
            "phases[1].fade.tokens",
            "less than one row of 8 tokens",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"tokens": 10**6})),
            "phases[1].fade.tokens",
            "make it shorter",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={})),
            "phases[1].fade.steps",
            "neither steps nor tokens is given (add one",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"steps": 2, "tokens": 64})),
            "phases[1].fade.steps",
            "both give the length",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"step": 2})),
            "phases[1].fade.step",
            "did you mean steps?",
        ),
        (
            (phase(TEXT), phase(CHAT, fade={"steps": 2, "shape": "cosin"})),
            "phases[1].fade.shape",
            "mean cosine?",
        ),
        ((phase(TEXT), phase(CHAT, fade=5)), "phases[1].fade", "this must have settings"),
        ((phase(TEXT), phase(CHAT, data="resume")), "phases[1].data", "'continue' or 'restart'"),
        (
            (
                phase(TEXT),
                phase(CHAT)
                | {
                    "mixture": [{"name": "text", "rate": 1.0, "style": "PMD"}],
                    "fade": {"steps": 1},
                },
            ),
            "phases[1].fade",
            "nothing fades",
        ),
    ],
)
def test_a_fade_that_cannot_be_is_refused(
    phases: tuple[dict[str, Any], ...], key: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(*phases)
    assert {problem.key for problem in caught.value.problems} >= {key}
    assert any(said in f"{one.what} ({one.how})" for one in caught.value.problems if one.key == key)


def test_a_data_set_has_one_style_in_a_fade() -> None:
    packed = {
        "mixture": [{"name": "text", "rate": 0.5, "style": "PMD"}, {"name": "chat", "rate": 0.5}]
    }
    with pytest.raises(
        SettingsError, match=r"text is PADDED in the phase before, and PMD in this one"
    ):
        plan(phase(TEXT), phase(CHAT, fade={"steps": 2}) | packed)


def test_a_fade_comes_back_from_settings() -> None:
    found = plan(phase(TEXT), phase(CHAT, fade={"tokens": 64, "shape": "sigmoid"}, data="restart"))
    again = PhasePlan(**json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert again.fingerprint() == found.fingerprint()


def test_windows_of_the_mixture_begin_where_the_fade_ends() -> None:
    """The rates of a window after the fade hold as they do without one."""
    one = faded(BOTH, Fade(TEXT, 700))
    for windows in range(1, 4):
        assert abs(one.counts(windows * WINDOW, 700)["chat"] - 0.7 * windows * WINDOW) < 1.5
