"""The names and numbers of a two-phase trainer, one by one, and what is said of plans that are
wrong in one place.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lema.config.problems import SettingsError
from lema.data.mixture import Mixture
from lema.engine.schedules import takes
from lema.train.phases.plan import PhasePlan
from lema.train.phases.twophase import LoRATrainerConfig

A, B, C = ([{"name": name, "rate": 1.0}] for name in "abc")
ROWS = 4
BLOCK = 16
PER_STEP = ROWS * BLOCK


def stages(**settings: Any) -> LoRATrainerConfig:
    base: dict[str, Any] = {
        "batch_size": ROWS,
        "block_size": BLOCK,
        "pre_lora_tokens": [8 * PER_STEP, 3 * PER_STEP],
        "pre_lora_datasets": [A, B],
        "post_lora_tokens": [5 * PER_STEP],
        "post_lora_datasets": [C],
    }
    return LoRATrainerConfig(**base | settings)


@pytest.mark.parametrize("key", ["pre_lora", "post_lora"])
@pytest.mark.parametrize("count", [1, 3])
def test_t1_lists_of_stages_that_are_not_equally_long_are_refused_by_key(
    key: str, count: int
) -> None:
    with pytest.raises(SettingsError) as caught:
        stages(**{f"{key}_tokens": [PER_STEP] * 2, f"{key}_datasets": [A] * count})
    (problem,) = caught.value.problems
    assert problem.key == f"{key}_tokens"
    assert f"{key}_tokens has 2 stages, and {key}_datasets has {count} stage" in problem.what
    assert problem.how == "give both lists one entry per stage"


def test_t4_the_stage_of_every_token() -> None:
    plan = stages().plan()

    def stage_of(token: int) -> str | None:
        return next(one.name for one in plan.boundaries() if token // PER_STEP < one.stop_step)

    ends = [8 * PER_STEP, 11 * PER_STEP, 16 * PER_STEP]
    names = ["pre-lora-1", "pre-lora-2", "post-lora-1"]
    trace = [stage_of(token) for token in range(ends[-1])]
    assert trace == [
        name
        for name, first, stop in zip(names, [0, *ends], ends, strict=False)
        for _ in range(first, stop)
    ]
    straight = stages(pre_lora_tokens=[], pre_lora_datasets=[]).plan()
    assert {one.trains for one in straight.phases} == {"lora"}


class Rows:
    """A hundred rows."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int, /) -> dict[str, list[int]]:
        return {"input_ids": [index], "labels": [index]}


@pytest.mark.parametrize("style", ["padded", "PADDED", "Padded"])
def test_t5_samplings_are_dictionaries_whose_rates_hold(style: str) -> None:
    given = [{"name": "a", "rate": 0.7, "style": style}, {"name": "b", "rate": 0.3, "suffix": "-x"}]
    plan = stages(pre_lora_datasets=[given, B], pre_lora_tokens=[1000 * PER_STEP, PER_STEP]).plan()
    mixture = Mixture(plan.phases[0].mixture, {"a": Rows(), "b-x": Rows()}, plan.seed, BLOCK)
    drawn = Counter(mixture.sample(index).source for index in range(4000))
    # drawn at random, one deviation would be 0.007
    assert drawn["a"] / 4000 == pytest.approx(0.7, abs=0.01)
    assert plan.counts(0) == drawn


@pytest.mark.parametrize("style", ["CONTRASTIVE", "contrastive"])
def test_t5_contrastive_is_refused_by_name_with_what_to_do(style: str) -> None:
    with pytest.raises(SettingsError) as caught:
        stages(post_lora_datasets=[[{"name": "a", "rate": 1.0, "style": style}]])
    (problem,) = caught.value.problems
    assert problem.key == "post_lora_datasets[0][0].style"
    assert "the style CONTRASTIVE is not supported, because LEMA has no loss for it" in problem.what
    assert problem.how == "use one of PADDED, PMD"


@pytest.mark.parametrize("rates", [(0.5, 0.4), (0.5, 0.500002), (1.0, 1.0)])
def test_t5_rates_sum_to_one(rates: tuple[float, float]) -> None:
    given = [{"name": name, "rate": rate} for name, rate in zip("ab", rates, strict=True)]
    with pytest.raises(
        SettingsError, match=f"sum to {sum(rates):.9g}, not to 1: a {rates[0]:g}, b {rates[1]:g}"
    ):
        stages(pre_lora_datasets=[A, given])


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_t6_there_are_as_many_steps_as_tokens_make_and_none_more(accumulation: int) -> None:
    plan = stages(
        per_device_batch_size=ROWS // accumulation, pre_lora_tokens=[8 * PER_STEP, 3 * PER_STEP]
    ).plan()
    assert [plan.steps(index).steps for index in range(3)] == [8, 3, 5]
    assert plan.num_steps == sum(phase.tokens for phase in plan.phases) // PER_STEP
    assert sum(plan.steps(index).tokens for index in range(3)) == sum(
        phase.tokens for phase in plan.phases
    )


# Of ten steps each, warm-up of two, decay of three, tail of four: every rate that a phase takes,
# peak 1.
TRACES = {
    "constant": [1.0] * 10,
    "constant_with_warmup": [0.0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    "cosine": [0.0, 0.5, 1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060],
    "wsd": [0.01, 0.505, 1, 1, 1, 1, 1, 1, 0.67, 0.34],
    "wsds": [0.01, 0.505, 1, 1, 0.7, 0.4, 0.1, 0.1, 0.1, 0.1],
    "cosine_rewarm": [
        0.01,
        0.505,
        1,
        0.962321,
        0.855018,
        0.694428,
        0.505,
        0.315572,
        0.154982,
        0.047679,
    ],
}


@pytest.mark.parametrize("schedule", sorted(TRACES))
def test_t7_the_learning_rate_of_every_step_counts_from_the_beginning_of_its_phase(
    schedule: str,
) -> None:
    parts = {
        f"{part}_steps": {"warmup": 2, "decay": 3, "tail": 4}[part] for part in takes(schedule)
    }
    one = {
        "trains": "full",
        "tokens": 10 * PER_STEP,
        "mixture": A,
        "learning_rate": 1.0,
        "lr_scheduler_type": schedule,
        **parts,
    }
    plan = PhasePlan(
        phases=[one, {**one, "trains": "lora", "learning_rate": 0.5}],
        batch_size=ROWS,
        max_length=BLOCK,
    )
    trace = [
        plan.learning_rate(index, step)
        for index in range(2)
        for step in range(plan.steps(index).steps)
    ]
    assert trace == pytest.approx(
        [*TRACES[schedule], *(rate / 2 for rate in TRACES[schedule])], abs=1e-6
    )


def test_t7_the_finding_a_second_phase_that_ends_inside_the_warm_up_of_the_run() -> None:
    """19,168 steps, of which 191 are warm-up: the 95 of the adapters see no more of the schedule
    than that.
    """
    shipped: dict[str, Any] = {
        "batch_size": 512,
        "block_size": 2048,
        "pre_lora_tokens": [2e10],
        "pre_lora_datasets": [A],
        "post_lora_tokens": [1e8],
        "post_lora_datasets": [B],
        "schedule": "wsd",
        "warmup_pct": 0.01,
        "decay_pct": 0.01,
    }
    plan = LoRATrainerConfig(**shipped, schedule_spans="run").plan()
    assert (plan.num_steps, plan.steps(1).steps, plan.phases[1].spans(95).warmup) == (
        19168,
        95,
        191,
    )
    rates = [plan.learning_rate(1, step) for step in range(95)]
    assert (rates[0], rates[-1], math.fsum(rates) / 95) == pytest.approx(
        (3e-6, 1.5e-4, 7.6e-5), rel=0.01
    )
    (warning,) = [one for one in plan.warnings() if one.key == "phases[1].warmup_ratio"]
    assert (
        "phase 2 (post-lora-1) ends inside its warm-up: 95 steps, and 191 of warm-up"
        in warning.what
    )
    assert "goes from 3e-06 to 0.00015, and never reaches 0.0003" in warning.what
    assert warning.how == "shorten the warm-up, or give the phase more tokens"
    own = LoRATrainerConfig(**shipped).plan()  # each phase has a schedule of its own
    assert own.warnings() == () and max(own.learning_rate(1, step) for step in range(95)) == 3e-4


# --- plans that are wrong in one place

MIX = [{"name": "a", "rate": 0.25, "style": "PMD", "suffix": "-x"}, {"name": "b", "rate": 0.75}]
PLAN: dict[str, Any] = {
    "batch_size": 4,
    "max_length": 16,
    "micro_batch_size": 2,
    "seed": 7,
    "phases": [
        {
            "name": "text",
            "trains": "full",
            "tokens": 10 * PER_STEP,
            "mixture": MIX,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "wsds",
            "warmup_steps": 2,
            "decay_ratio": 0.3,
            "tail_steps": 3,
            "schedule_steps": 12,
            "schedule_start": 1,
            "optimizer": "reset",
            "merge": False,
        },
        {
            "trains": "selection",
            "trainable": ["q_proj", "v_proj"],
            "layers": ["last:2", 0, "head"],
            "tokens": 640,
            "mixture": [{"name": "b", "rate": 1.0}],
            "learning_rate": 1e-4,
            "fade": {"steps": 5, "shape": "cosine"},
            "data": "restart",
            "optimizer": "carry",
        },
        {
            "trains": "lora",
            "tokens": 640,
            "mixture": [{"name": "c", "rate": 1.0}],
            "learning_rate": 1e-4,
            "lora_rank": 4,
            "lora_alpha": 8.0,
            "lora_target_modules": ["q_proj"],
            "lora_dropout": 0.1,
            "lora_rank_pattern": {"q_proj": 2},
            "lora_alpha_pattern": {"q_proj": 2.0},
            "lora_use_rslora": True,
            "lora_layers_to_transform": [0, 1],
            "lora_layers_pattern": "layers",
            "lora_init": "gaussian",
            "lora_bias": "none",
            "lora_modules_to_save": ["head"],
            "lora_use_dora": True,
            "lora_trainable_token_indices": [1, 2],
            "lora_ensure_weight_tying": False,
        },
        {
            "trains": "lora",
            "tokens": 640,
            "mixture": [{"name": "b", "rate": 1.0}],
            "learning_rate": 1e-4,
            "fade": {"tokens": 64},
            "merge": True,
            "rounding": "stochastic",
        },
        {
            "trains": "full",
            "tokens": 640,
            "mixture": [{"name": "b", "rate": 1.0}],
            "learning_rate": 1e-4,
            "merge": True,
            "save": "delta",
        },
    ],
}
STAGES: dict[str, Any] = {
    "batch_size": 4,
    "block_size": 16,
    "per_device_batch_size": 2,
    "total_tokens": 704,
    "lr": 1e-3,
    "pre_lora_tokens": [640, 64],
    "pre_lora_datasets": [MIX, [{"name": "b", "rate": 1.0}]],
    "post_lora_tokens": [640],
    "post_lora_datasets": [copy.deepcopy(MIX)],  # a change in one place must be one
    "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]},
    "schedule": "wsds",
    "warmup_pct": 0.1,
    "decay_pct": 0.1,
    "constant_pct": 0.1,
    "schedule_spans": "phase",
    "seed": 7,
    "validate": True,
    "evaluate": True,
    "evaluations": ["exam"],
    "report_interval": 1,
    "checkpoint_interval": 2,
    "validation_interval": 3,
    "validation_steps": 4,
    "wandb": False,
}
NAN = float("nan")
INF = float("inf")
# What is no value of a kind, in any setting.
WRONG: dict[type, list[Any]] = {
    bool: ["yes", 2, [], {"a": 1}, NAN],
    int: ["3", 1.5, -2, [], {"a": 1}, NAN, True, object()],
    float: ["0.5", -1.0, [], {"a": 1}, NAN, INF, True, object()],
    str: [99.5, [], {"a": 1}, "", True, object()],
    list: [99.5, {"a": 1}, "", [], object()],
    dict: [99.5, "a", [1], object()],
}
NAMES_OF_MODULES = ("lora_rank_pattern", "lora_alpha_pattern")
NEEDED = ("tokens", "mixture")
NEEDED_OF_DATA = ("name", "rate")
TAKEN = [  # for all that
    ("suffix", ""),
    ("lora_init", True),
    ("evaluations", []),
    *((of, {"a": 1}) for of in ("mixture", 0, 1)),  # a mixture may be names and rates
]


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value of a plan with its path."""
    if path:
        yield path, value
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in inside:
        yield from walk(inner, (*path, key))


def changed(plan: dict[str, Any], path: tuple[Any, ...], change: Any) -> dict[str, Any]:
    """Return a copy of a plan after `change(what holds it, key)`."""
    copied = copy.deepcopy(plan)
    holder = copied
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return copied


def put(value: Any) -> Any:
    def change(holder: Any, key: Any) -> None:
        holder[key] = value

    return change


def drop(holder: Any, key: Any) -> None:
    del holder[key]


def written(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(
        "."
    )


def mutations(plan: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every plan that is wrong in one place, and the path of that place."""
    yield {**plan, "zzz": 1}, "zzz"
    for path, value in walk(plan):
        for wrong in WRONG[type(value)]:
            if (path[-1], wrong) not in TAKEN:
                yield changed(plan, path, put(wrong)), written(path)
        if isinstance(value, dict) and path[-1] not in NAMES_OF_MODULES:
            for unknown in ("zzz", "tokns", 5):
                yield (
                    changed(plan, (*path, unknown), put(1)),
                    written((*path, unknown) if unknown != 5 else path),
                )
        if path[-1] == "rate":
            for off in (value / 2, value + 1e-5):
                yield changed(plan, path, put(off)), written(path[:-2])
        if path[-1] in (
            NEEDED
            if path[0] == "phases" and len(path) == 3
            else NEEDED_OF_DATA
            if len(path) > 3
            else ()
        ):
            yield changed(plan, path, drop), written(path)


def said_where(problem_key: str, path: str) -> bool:
    """Whether a problem is of what stands at a path, or of what stands in it, or of the setting
    that holds it.
    """
    longer, shorter = sorted((problem_key, path), key=len, reverse=True)
    return (
        bool(shorter)
        and shorter != "phases"
        and (longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}[")))
    )


@pytest.mark.parametrize(
    ("make", "plan"), [(PhasePlan, PLAN), (LoRATrainerConfig, STAGES)], ids=["phases", "stages"]
)
def test_whatever_is_wrong_in_one_place_is_said_of_that_place(
    make: Any, plan: dict[str, Any]
) -> None:
    make(**copy.deepcopy(plan))
    count = 0
    passed = []
    elsewhere = []
    for wrong, path in mutations(plan):
        count += 1
        try:
            make(**wrong)
        except SettingsError as error:
            said = [
                problem
                for problem in error.problems
                if path in problem.what or said_where(problem.key, path)
            ]
            if not any(problem.key in str(error) for problem in said):
                elsewhere.append((path, str(error)))
        else:
            passed.append((path, wrong))
    assert count > 200
    assert not passed
    assert not elsewhere
