"""Learning rates: each formula at every place where it changes, what is refused, and torch
following.
"""

import math
import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW
from transformers import get_scheduler

from lema.engine.optim import follow
from lema.engine.schedules import SCHEDULES, Spans, factor_of, spans_of, takes
from lema.errors import ConfigError

names = st.sampled_from(sorted(SCHEDULES))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, Spans]:
    """A schedule, how long it is, and parts that fit into it."""
    name = draw(names)
    total = draw(st.integers(1, 400))
    left = total
    lengths = {}
    for part in takes(name):
        lengths[part] = draw(st.integers(0, left))
        left -= lengths[part]
    return name, total, spans_of(name, total, **lengths)


# 10 of warm-up, 20 of decay and 30 of tail, of 100 steps: the factor at the steps around every
# change.
TRACES = {
    "constant": {0: 1.0, 10: 1.0, 100: 1.0},
    "constant_with_warmup": {0: 0.0, 1: 0.1, 9: 0.9, 10: 1.0, 99: 1.0, 100: 1.0},
    "linear": {0: 0.0, 9: 0.9, 10: 1.0, 11: 89 / 90, 55: 0.5, 99: 1 / 90, 100: 0.0},
    "cosine": {0: 0.0, 9: 0.9, 10: 1.0, 55: 0.5, 100: 0.0, 40: 0.75},
    "wsd": {
        0: 0.01,
        1: 0.109,
        9: 0.901,
        10: 1.0,
        79: 1.0,
        80: 1.0,
        81: 0.9505,
        90: 0.505,
        99: 0.0595,
        100: 0.01,
    },
    "wsds": {
        0: 0.01,
        9: 0.901,
        10: 1.0,
        49: 1.0,
        50: 1.0,
        51: 0.955,
        60: 0.55,
        69: 0.145,
        70: 0.1,
        99: 0.1,
        100: 0.1,
    },
    "cosine_rewarm": {0: 0.01, 9: 0.901, 10: 1.0, 55: 0.505, 40: 0.01 + 0.99 * 0.75, 100: 0.01},
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_factor_at_every_boundary(name: str) -> None:
    lengths = {part: {"warmup": 10, "decay": 20, "tail": 30}[part] for part in takes(name)}
    factor = factor_of(name, 100, spans_of(name, 100, **lengths))
    assert {step: factor(step) for step in TRACES[name]} == pytest.approx(TRACES[name], abs=1e-12)


@given(cases())
def test_factors_stay_between_0_and_1_rise_in_the_warm_up_and_never_after(
    case: tuple[str, int, Spans],
) -> None:
    name, total, spans = case
    factor = factor_of(name, total, spans)
    trace = [factor(step) for step in range(total + 1)]
    assert all(0.0 <= one <= 1.0 + 1e-12 for one in trace)
    rise = trace[: spans.warmup]
    fall = trace[spans.warmup :]
    assert rise == sorted(rise)
    assert all(one >= other - 1e-12 for one, other in pairwise(fall))
    if spans.warmup + spans.decay + spans.tail < total:
        assert trace[spans.warmup] == pytest.approx(1.0)
        assert factor(total + 7) == pytest.approx(trace[total])  # it has ended


@given(
    st.sampled_from(["constant", "constant_with_warmup", "linear", "cosine"]),
    st.integers(1, 300),
    st.data(),
)
def test_the_ordinary_schedules_are_those_of_transformers(
    name: str, total: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, total)) if takes(name) else 0
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (theirs,) = get_scheduler(name, optimizer, warmup, total).lr_lambdas
    ours = factor_of(name, total, spans_of(name, total, warmup=warmup or None))
    assert [ours(step) for step in range(total + 1)] == [theirs(step) for step in range(total + 1)]


@given(st.integers(1, 10**6), st.integers(0, 99))
@example(100, 29)  # as floats 28.999999999999996
def test_a_fraction_is_of_the_steps_as_it_is_written_and_rounded_down(
    total: int, percent: int
) -> None:
    assert spans_of("linear", total, warmup=percent / 100).warmup == total * percent // 100


def test_lengths_that_are_not_given_are_the_schedules_own() -> None:
    assert spans_of("wsds", 1000) == Spans(10, 100, 500)
    assert spans_of("wsd", 1000) == Spans(10, 100)
    assert spans_of("cosine_rewarm", 1000, warmup=None) == Spans(10)
    assert (
        spans_of("linear", 1000)
        == spans_of("cosine", 1000)
        == spans_of("constant", 1000)
        == Spans()
    )


def test_the_finding_warm_up_of_a_whole_run_holds_all_of_a_short_phase() -> None:
    factor = factor_of("wsd", 19168, spans_of("wsd", 19168, warmup=0.01, decay=0.01))
    assert spans_of("wsd", 19168, warmup=0.01, decay=0.01) == Spans(191, 191)
    rates = [3e-4 * factor(step) for step in range(95)]
    assert (rates[0], rates[-1], math.fsum(rates) / 95) == pytest.approx(
        (3e-6, 1.49e-4, 7.6e-5), rel=0.01
    )
    assert 3e-4 * factor(19073) == pytest.approx(1.5e-4, rel=0.01)


@given(names.filter(takes), st.integers(1, 100), st.integers(1, 50))
def test_parts_that_do_not_fit_are_refused_by_name(name: str, total: int, more: int) -> None:
    lengths = dict.fromkeys(takes(name), 0) | {"warmup": total}
    spans_of(name, total, **lengths)
    last = takes(name)[-1]
    with pytest.raises(ConfigError, match=f"more than the schedule's {total} steps") as caught:
        spans_of(name, total, **lengths | {last: lengths[last] + more})
    assert all(part in caught.value.what for part in takes(name))
    assert all(part in caught.value.how for part in takes(name))


def test_a_part_that_a_schedule_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule cosine has no decay") as caught:
        spans_of("cosine", 100, decay=0.1)
    assert (caught.value.where, caught.value.how) == (
        "decay",
        "leave decay out, or use wsd or wsds",
    )
    with pytest.raises(ConfigError, match="there is no schedule 'cosin'") as caught:
        spans_of("cosin", 100)
    assert caught.value.how == "did you mean cosine?"


def stepped(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, count: int
) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


@given(cases(), st.data())
def test_torch_follows_from_any_step(case: tuple[str, int, Spans], data: st.DataObject) -> None:
    name, total, spans = case
    step = data.draw(st.integers(0, total - 1))
    factor = factor_of(name, total, spans)
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = follow(optimizer, factor, 3e-4, step)
    count = min(3, total - step)
    assert stepped(optimizer, schedule, count) == [
        3e-4 * factor(step + more) for more in range(count)
    ]


def test_a_carried_optimizer_forgets_the_learning_rate_of_the_phase_before() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    first = factor_of("linear", 4, Spans())
    assert stepped(optimizer, follow(optimizer, first), 4) == [
        1e-3 * first(step) for step in range(4)
    ]
    second = factor_of("wsd", 10, Spans(2, 3))
    schedule = follow(optimizer, second, 2e-5)
    assert stepped(optimizer, schedule, 10) == [2e-5 * second(step) for step in range(10)]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0, dtype=torch.float64))
    rate = optimizer.param_groups[0]["lr"]
    factor = factor_of("wsd", 10, Spans(2, 3))
    schedule = follow(optimizer, factor, 0.25, 1)
    assert stepped(optimizer, schedule, 3) == pytest.approx(
        [0.25 * factor(step) for step in (1, 2, 3)]
    )
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_schedule_goes_on_from_its_state() -> None:
    factor = factor_of("cosine_rewarm", 20, Spans(5))
    one, other = (SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    schedule = follow(one, factor)
    stepped(one, schedule, 7)
    again = follow(other, factor, step=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stepped(one, schedule, 5) == stepped(other, again, 5)
    assert schedule.state_dict()["last_epoch"] == again.state_dict()["last_epoch"] == 12


def test_formulas_need_no_torch() -> None:
    code = (
        "import sys, lema.engine.schedules as s; s.spans_of('wsd', 9); print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
