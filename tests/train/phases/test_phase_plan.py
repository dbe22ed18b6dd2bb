"""The phases of a run as data: where each begins, what is refused and in which words, and what
identifies a plan.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.config.adapter import AdapterSettings
from lema.config.problems import SettingsError
from lema.data import Sampling
from lema.data.mixing.sampling import Style
from lema.errors import ConfigError
from lema.train.phases.phase import Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.selection import layer_selection
from lema.train.phases.twophase import LoRAConfig, LoRATrainerConfig

STEP = 4 * 16  # tokens, of the plans below
MIXTURE = [{"name": "almanac", "rate": 1.0}]


def phase(trains: str | None = "full", steps: int = 10, **settings: Any) -> dict[str, Any]:
    base = {"tokens": steps * STEP, "mixture": MIXTURE, "learning_rate": 1e-3, **settings}
    return base if trains is None else {"trains": trains, **base}


def plan(*phases: Any, **settings: Any) -> PhasePlan:
    return PhasePlan(
        **{"phases": list(phases), "batch_size": 4, "max_length": 16, "seed": 7, **settings}
    )


def problems(make: Callable[[], Any]) -> dict[str, str]:
    """What is wrong by key, each with how to mend it."""
    with pytest.raises(SettingsError) as caught:
        make()
    return {problem.key: f"{problem.what} ({problem.how})" for problem in caught.value.problems}


THREE = (
    phase("full", 10, name="text", lr_scheduler_type="wsd", warmup_steps=2, decay_steps=3),
    phase("lora", 5, lora_rank=8, lora_alpha=16, lr_scheduler_type="cosine"),
    phase("lora", 6, merge=True, lr_scheduler_type="constant"),
)


def test_phases_begin_at_the_exact_step_and_token() -> None:
    found = plan(*THREE[:2], phase("lora", 6, merge=True, tokens=6 * STEP + STEP - 1))
    assert [
        (one.name, one.first_step, one.stop_step, one.first_token) for one in found.boundaries()
    ] == [
        ("text", 0, 10, 0),
        ("phase-2", 10, 15, 10 * STEP),
        ("phase-3", 15, 21, 15 * STEP),
    ]
    sizes = [found.steps(index) for index in range(3)]
    assert [(one.tokens, one.leftover) for one in sizes] == [
        (10 * STEP, 0),
        (5 * STEP, 0),
        (6 * STEP, STEP - 1),
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 64))
def test_every_step_is_in_one_phase_and_tokens_are_steps(
    lengths: list[int], rows: int, block: int
) -> None:
    phases = [phase("full", tokens=count * rows * block) for count in lengths]
    found = plan(*phases, batch_size=rows, max_length=block)
    assert found.num_steps == sum(lengths)
    assert [one.stop_step - one.first_step for one in found.boundaries()] == lengths
    assert all(one.stop_step == after.first_step for one, after in pairwise(found.boundaries()))
    assert found.boundaries()[-1].stop_step * rows * block == sum(
        one.tokens for one in found.phases
    )


def test_the_learning_rate_of_each_phase_counts_from_its_own_beginning() -> None:
    found = plan(*THREE)
    traces = [
        [found.learning_rate(index, step) for step in range(found.steps(index).steps)]
        for index in range(3)
    ]
    assert traces[0] == pytest.approx(
        [1e-5, 5.05e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 6.7e-4, 3.4e-4]
    )
    assert traces[1][0] == 1e-3
    assert traces[1][-1] == pytest.approx(9.549e-5, rel=1e-3)
    assert traces[2] == [1e-3] * 6


def test_one_schedule_can_go_on_over_a_boundary() -> None:
    settings = {"lr_scheduler_type": "cosine", "schedule_steps": 16, "warmup_ratio": 0.25}
    found = plan(
        phase(steps=10, **settings),
        phase(steps=6, schedule_start=10, optimizer="carry", **settings),
    )
    whole = plan(phase(steps=16, lr_scheduler_type="cosine", warmup_steps=4))
    trace = [
        found.learning_rate(index, step)
        for index, steps in enumerate((10, 6))
        for step in range(steps)
    ]
    assert trace == [whole.learning_rate(0, step) for step in range(16)]
    assert found.warnings() == ()


def test_a_plan_comes_back_from_its_settings() -> None:
    found = plan(
        *THREE, phase(None, trainable=["q_proj"], layers=["last:2", 0, "head"], merge=True)
    )
    again = PhasePlan(**json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert again.fingerprint() == found.fingerprint()
    assert found.phases[3].trains == "selection"


YAML = """
batch_size: 4
max_length: 16
phases:
  - name: text
    trains: full
    tokens: 1e4
    mixture:
      - {name: almanac, rate: 0.75, style: pmd, suffix: -v2}
      - {name: letters, rate: 0.25}
    learning_rate: 3e-4
    lr_scheduler_type: wsd
  - trains: lora
    tokens: 1_024
    mixture: [{name: letters, rate: 1}]
    learning_rate: 1e-3
    lora_rank: 8
    lora_target_modules: [q_proj, v_proj]
"""


def test_a_plan_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(YAML, encoding="utf-8")
    found = PhasePlan.from_yaml(file, seed=3)
    assert found.seed == 3
    assert found.phases[0].mixture[0] == Sampling("almanac", 0.75, Style.PMD, "-v2")
    assert found.phases[1].adapters == AdapterSettings(
        lora_rank=8, lora_target_modules=["q_proj", "v_proj"]
    )
    assert [one.steps for one in map(found.steps, range(2))] == [156, 16]


def test_every_problem_of_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    wrong = (
        YAML.replace("learning_rate: 3e-4", "lr: 3e-4")
        .replace("    tokens: 1e4\n", "")
        .replace("rank: 8", "rank: 0")
        .replace("0.25", "-1")
    )
    file.write_text(wrong.replace("name: text", "name: a/b") + "sede: 3\n", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        PhasePlan.from_yaml(file)
    lines = wrong.splitlines()
    placed = {one.key: (one.location, one.how) for one in caught.value.problems}

    def at(text: str) -> str:
        return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"

    assert placed["phases[0].lr"] == (at("lr: 3e-4"), "did you mean learning_rate?")
    assert placed["phases[0].tokens"][0] == at("name: text")  # not there: where its phase is
    assert placed["phases[0].name"][0] == at("name: text")
    assert placed["phases[0].mixture[1].rate"][0] == at("letters, rate: -1")
    assert placed["phases[1].lora_rank"][0] == at("rank: 0")
    assert placed["sede"] == (f"{file}:{len(lines) + 1}", "did you mean seed?")
    assert len(placed) == 6
    assert f"{at('rank: 0')}: phases[1].lora_rank must be at least 1, not 0" in str(caught.value)


def test_an_alias_in_a_file_has_one_place(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    text = (
        "phases:\n- &one\n  trains: full\n  tokens: 0\n  mixture: &m [{name: a, rate: 1}]\n  "
        "learning_rate: 1\n- *one\n"
    )
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        PhasePlan.from_yaml(file)
    assert [one.location for one in caught.value.problems] == [f"{file}:4", f"{file}:2"]


BAD = [
    (
        phase(mixture=[{"name": "a", "rate": 0.5}, {"name": "b", "rate": 0.4}]),
        "mixture",
        "sum to 0.9",
        "sum to 1",
    ),
    (phase(mixture=[]), "mixture", "no data sets", "give at least one, with rate: 1.0"),
    (
        phase(mixture=[{"nmae": "a", "name": "b", "rate": 1}]),
        "mixture[0].nmae",
        "unknown",
        "did you mean name?",
    ),
    (phase(mixture=[{"name": "a"}]), "mixture[0].rate", "not given", "add `rate: ...`"),
    (
        phase(mixture=[{"name": "a", "rate": 1.0, "style": "CONTRASTIVE"}]),
        "mixture[0].style",
        "not supported",
        "PMD",
    ),
    (phase(mixture=["a"]), "mixture[0]", "this must have settings", "write them as"),
    (phase(tokens=0), "tokens", "must be at least 1, not 0", "leave out"),
    (phase(tokens=STEP - 1), "tokens", "do not make one step", f"give at least {STEP} tokens"),
    (phase(tokens=1.5), "tokens", "must be a whole number", ""),
    (phase("selection"), "trains", "needs a selection", "`trainable`"),
    (phase("full", trainable=["q_proj"]), "trainable", "selects what trains", "trains: selection"),
    (phase("selection", trainable=[]), "trainable", "must not be empty", "name modules"),
    (phase("selection", layers=[]), "layers", "selects nothing", "last:4"),
    (phase("selection", layers=["last:0", 1]), "layers[0]", "selects no layer", "last:1"),
    (phase("lora", lora_target_modules=[]), "lora_target_modules", "is empty", "name modules"),
    (phase("lora", lora_rank=0), "lora_rank", "at least 1", ""),
    (phase("full", lora_rank=8), "lora_rank", "this phase trains none", "trains: lora"),
    (phase("lroa"), "trains", "must be one of", "did you mean lora?"),
    (phase(learning_rate=0.0), "learning_rate", "more than 0", ""),
    (phase(lr_scheduler_type="wds"), "lr_scheduler_type", "must be one of", "wsd"),
    (
        phase(lr_scheduler_type="wsd", warmup_steps=6, decay_steps=5),
        "warmup_steps",
        "decay (5) are more than the schedule's 10",
        "shorter",
    ),
    (phase(lr_scheduler_type="linear", decay_steps=5), "decay_steps", "linear has no decay", "wsd"),
    (phase(warmup_ratio=1.5), "warmup_ratio", "less than 1", ""),
    (phase(warmup_steps=1, warmup_ratio=0.1), "warmup_ratio", "both set this length", "keep one"),
    (
        phase(lr_scheduler_type="constant", warmup_steps=1),
        "warmup_steps",
        "constant has no warmup",
        "with_warmup",
    ),
    (phase(weight_decay=-1.0), "weight_decay", "at least 0", ""),
    (phase(activation_offloading=3), "activation_offloading", "must be true, false", ""),
    (phase(wieght_decay=0.1), "wieght_decay", "unknown setting", "did you mean weight_decay?"),
    (phase(schedule="wsd"), "schedule", "unknown setting", "did you mean lr_scheduler_type?"),
    (phase(warmup=1), "warmup", "unknown setting", "did you mean warmup_ratio?"),
    (phase("lora", lora={"rank": 2}), "lora", "unknown setting", "did you mean lora_rank?"),
    (phase(overrides={"seed": 3}), "overrides", "a phase cannot change", "leave it out"),
    (phase(schedule_steps=9), "schedule_steps", "has 9 steps, and the phase ends at 10", "longer"),
    (phase(optimizer="carry"), "optimizer", "no phase before", "optimizer: reset"),
    (phase(merge=True), "merge", "no adapters to merge", "leave merge out"),
    (phase(name="a/b"), "name", "name", ""),
    (phase(dataset="a"), "dataset", "unknown setting", "did you mean mixture?"),
    (phase(zzz=1), "zzz", "unknown setting", "lists every setting"),
    (phase(rounding="stochastic"), "rounding", "needs merge", "set merge: true"),
    (phase(rounding="up"), "rounding", "one of 'nearest' or 'stochastic'", ""),
    (phase("lora", save="model"), "save", "save is for phases of weights", "leave save out"),
    (phase(learning_rate=1e300), "learning_rate", "must be at most", ""),
    (phase(adam_epsilon=1e-300), "adam_epsilon", "must be 0 or at least", ""),
    (
        phase(mixture=[{"name": "almanac", "rate": 10**30}]),
        "mixture[0].rate",
        "must be at most",
        "",
    ),
    (phase(save="weights"), "save", "one of 'model' or 'delta'", ""),
]


@pytest.mark.parametrize(
    ("settings", "key", "what", "how"), BAD, ids=[f"{one[1]}-{i}" for i, one in enumerate(BAD)]
)
def test_bad_input_names_its_key_and_how_to_mend_it(
    settings: dict[str, Any], key: str, what: str, how: str
) -> None:
    found = problems(lambda: plan(settings))
    assert list(found) == [f"phases[0].{key}"]
    (said,) = found.values()
    assert what in said
    assert how in said
    assert said.startswith("phases[0]")


BETWEEN = [
    ((phase(name="a"), phase(name="a")), "phases[1].name", "choose another"),
    ((phase(), phase("lora", optimizer="carry")), "phases[1].optimizer", "trains full"),
    (
        (phase("lora"), phase("lora", merge=True, optimizer="carry")),
        "phases[1].optimizer",
        "are new",
    ),
    ((phase("lora"), phase("full")), "phases[1].merge", "set merge: true"),
    ((phase("lora"), phase("lora", lora_rank=4)), "phases[1].lora_rank", "merge: true"),
    ((phase(save="delta"), phase("lora")), "phases[0].save", "set it in the last phase"),
    (
        (phase(None, layers=[0, "head"]), phase(None, layers=[1], optimizer="carry")),
        "phases[1].optimizer",
        "carry, and the phase before trains 0, head, so no parameter of this phase has moments",
    ),
    (
        (phase(None, trainable=["q_proj"]), phase(None, trainable=["v_proj"], optimizer="carry")),
        "phases[1].optimizer",
        "the phase before trains q_proj of the layers",
    ),
]


@pytest.mark.parametrize(("phases", "key", "said"), BETWEEN, ids=[one[1] for one in BETWEEN])
def test_what_one_phase_leaves_the_next_must_fit(
    phases: tuple[dict[str, Any], ...], key: str, said: str
) -> None:
    found = problems(lambda: plan(*phases))
    assert list(found) == [key]
    assert said in found[key]


def test_phases_that_fit_are_taken() -> None:
    plan(
        phase("full"),
        phase(None, layers=["last:1"], optimizer="carry"),
        phase("full", optimizer="carry"),
    )
    plan(phase("lora"), phase("lora", optimizer="carry"), phase("full", merge=True), phase("lora"))
    plan(
        phase("full"), phase("lora"), phase("lora", merge=True, lora_rank=4, rounding="stochastic")
    )
    plan(phase("lora"), phase("full", merge=True, save="delta"))


SELECTIONS = [
    ((["last:1"], None), ([0], None), True),  # of a model with one layer
    ((["first:2"], None), ([1], None), True),
    ((["first:2"], None), ([2], None), False),
    ((["first:2"], None), ([2, "last:1"], None), True),
    ((["embeddings"], None), (["embeddings", 3], None), True),
    ((["embeddings"], None), (["head"], None), True),  # of a model that has one weight for both
    ((["embeddings"], None), (["last:2"], None), False),
    ((["head"], None), (["last:2"], None), False),
    ((["head"], None), (None, ["q_proj"]), False),
    (([1], ["q_proj"]), (None, ["self_attn.q_proj"]), True),
    (([1], ["q_proj"]), (None, ["mlp.q_proj", "k_proj"]), True),
    (([1], ["q_proj"]), ([1], ["kq_proj"]), False),
    (([1], ["a.q_proj"]), ([1], ["b.q_proj"]), False),
    (([1, "head"], ["q_proj"]), ([2, "head"], ["k_proj"]), True),
]


@pytest.mark.parametrize(("one", "other", "overlap"), SELECTIONS)
def test_moments_are_carried_where_two_selections_may_share_a_weight(
    one: Any, other: Any, overlap: bool
) -> None:
    def of(choice: Any, **options: Any) -> dict[str, Any]:
        return phase(
            None,
            **{
                key: value
                for key, value in zip(("layers", "trainable"), choice, strict=True)
                if value
            },
            **options,
        )

    for before, after in ((one, other), (other, one)):
        phases = (of(before), of(after, optimizer="carry"))
        if overlap:
            assert plan(*phases).phases[1].optimizer == "carry"
        else:
            assert list(problems(lambda given_phases=phases: plan(*given_phases))) == [
                "phases[1].optimizer"
            ]


def test_all_that_is_wrong_is_told_at_once() -> None:
    found = problems(
        lambda: plan(
            phase(tokens=0, rat=1, layers=["lats:4"]),
            phase("lora", lora_rank=0, lora_alfa=1),
            5,
            batch_size=0,
            sed=1,
        )
    )
    assert set(found) == {
        "phases[0].tokens",
        "phases[0].rat",
        "phases[0].layers[0]",
        "phases[1].lora_rank",
        "phases[1].lora_alfa",
        "phases[2]",
        "batch_size",
        "sed",
    }
    assert "did you mean lora_alpha?" in found["phases[1].lora_alfa"]
    assert list(problems(lambda: plan())) == ["phases"]
    assert list(problems(lambda: Phase(trains="full"))) == ["tokens"]


# What a change of one setting does to the fingerprint.
NUMBERS = [
    ({"batch_size": 2}, {}),
    ({"max_length": 8}, {}),
    ({"seed": 8}, {}),
    ({}, {"tokens": 11 * STEP}),
    ({}, {"learning_rate": 2e-3}),
    ({}, {"lr_scheduler_type": "cosine"}),
    ({}, {"warmup_steps": 1}),
    ({}, {"schedule_steps": 11}),
    ({}, {"mixture": [{"name": "letters", "rate": 1.0}]}),
    ({}, {"mixture": [{"name": "almanac", "rate": 1.0, "style": "PMD"}]}),
    ({}, {"trainable": ["q_proj"], "trains": "selection"}),
    ({}, {"trains": "lora"}),
    ({}, {"trains": "lora", "lora_dropout": 0.1}),
]
SAME = [
    ({}, {"save": "delta"}),
    ({}, {"data": "restart"}),
    ({"micro_batch_size": 2}, {}),
    ({}, {"name": "other"}),
    ({}, {"tokens": 11 * STEP - 1}),
    ({}, {"warmup_steps": 0}),
    ({}, {"warmup_ratio": 0.0}),
    ({}, {"schedule_steps": 10}),
]


@pytest.mark.parametrize(("outer", "inner"), NUMBERS)
def test_what_decides_numbers_changes_the_fingerprint(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    assert plan(phase(**inner), **outer).fingerprint() != plan(phase()).fingerprint()


@pytest.mark.parametrize(("outer", "inner"), SAME)
def test_what_decides_no_number_leaves_the_fingerprint(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    assert plan(phase(**inner), **outer).fingerprint() == plan(phase()).fingerprint()


def test_rounding_decides_numbers_where_something_is_merged() -> None:
    def merged(**options: Any) -> str:
        return plan(phase("lora"), phase("lora", merge=True, **options)).fingerprint()

    assert merged() == merged(rounding="nearest") != merged(rounding="stochastic")


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    found = plan(phase(), phase("lora", lora_target_modules=["v_proj", "q_proj"]))
    again = plan(phase(), phase("lora", lora_rank=16, lora_target_modules=["q_proj", "v_proj"]))
    code = (
        "from lema.train.phases.plan import PhasePlan; "
        f"print(PhasePlan(**{found.to_dict()!r}).fingerprint())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found.fingerprint() == again.fingerprint()
    assert len(found.fingerprint()) == 64


def test_phases_may_be_added_after_the_one_of_a_checkpoint() -> None:
    short = plan(phase())
    longer = plan(phase(), phase("lora"))
    assert longer.fingerprint(1) == short.fingerprint()
    longer.check_same(short.numbers(), "checkpoint-5", num_phases=1)
    with pytest.raises(ConfigError, match="another plan") as caught:
        longer.check_same(short.numbers(), "checkpoint-5")
    assert caught.value.where == "checkpoint-5"


def test_a_checkpoint_of_another_plan_is_told_by_key() -> None:
    then = json.loads(json.dumps(plan(phase(), phase("lora")).numbers()))
    now = plan(phase(), phase("lora", learning_rate=2e-3, lora_rank=4), seed=8)
    assert now.differences(then) == [
        "seed is 8, and was 7",
        "phases[1].learning_rate is 0.002, and was 0.001",
        "phases[1].lora_rank is 4, and was 16",
        "phases[1].lora_alpha is 8.0, and was 32.0",
    ]
    assert now.differences(then, 1)[0] == "seed is 8, and was 7"
    now.check_same(now.numbers(), "checkpoint-5")


def test_warnings_are_data() -> None:
    found = plan(
        phase(steps=9, lr_scheduler_type="wsd", schedule_steps=95, schedule_start=1),
        phase("lora", lr_scheduler_type="constant_with_warmup", warmup_steps=10),
        phase("lora", tokens=2 * STEP - 1),
        batch_size=4,
    )
    said = {one.key: str(one) for one in found.warnings()}
    assert list(said) == ["phases[0].schedule_steps", "phases[1].warmup_steps", "phases[2].tokens"]
    assert (
        "phase 1 (phase-1) ends at step 10 of a schedule of 95" in said["phases[0].schedule_steps"]
    )
    assert f"leaves out {STEP - 1} of {2 * STEP - 1} tokens" in said["phases[2].tokens"]
    assert f"give {STEP} or {2 * STEP}" in said["phases[2].tokens"]
    assert plan(*THREE).warnings() == ()


def test_layers_are_selected_by_number_and_from_both_ends() -> None:
    assert layer_selection(["last:4", "first:2", 3, "embeddings", "head"], 10) == {
        0,
        1,
        3,
        6,
        7,
        8,
        9,
    }
    assert layer_selection(["last:3", "first:3", 1], 4) == set(range(4))
    assert layer_selection(["head"], 4) == set()


@given(st.integers(1, 40), st.data())
def test_ends_of_any_length_are_that_many_layers(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_layers))
    first, last = (layer_selection([f"{side}:{count}"], num_layers) for side in ("first", "last"))
    assert sorted(first) == list(range(count))
    assert sorted(last) == list(range(num_layers - count, num_layers))
    with pytest.raises(SettingsError, match=f"the model has {num_layers} layers"):
        layer_selection([f"last:{num_layers + 1}"], num_layers)


@pytest.mark.parametrize(
    ("item", "what", "how"),
    [
        (4, "the model has layers 0 to 3", "name one of those"),
        (-1, "layers count from 0", '"last:1"'),
        ("last:5", "the model has 4 layers", "last:4 or less"),
        ("first:0", "selects no layer", "first:1"),
        ("embedings", "selects nothing known", "did you mean embeddings?"),
        ("3", "selects nothing known", "first:2"),
        (True, "selects nothing known", "first:2"),
        ("last: 2", "selects nothing known", "first:2"),
    ],
)
def test_what_selects_nothing_is_refused(item: Any, what: str, how: str) -> None:
    found = problems(lambda: layer_selection([0, item, 99], 4))
    assert set(found) == {"layers[1]", "layers[2]"}
    assert what in found["layers[1]"]
    assert how in found["layers[1]"]
    assert set(problems(lambda: layer_selection([], 4))) == {"layers"}


def test_plans_need_no_torch() -> None:
    code = "import sys; from lema.train.phases.plan import PhasePlan; import lema.train.phases.file"
    code += "; from lema.train.phases.twophase import LoRATrainerConfig"
    code += f"; PhasePlan(**{plan(*THREE).to_dict()!r}).warnings()"
    code += (
        "; LoRATrainerConfig().plan(); print(sorted({'torch', 'transformers', 'peft'} & "
        "sys.modules.keys()))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_trainers_are_the_same_settings() -> None:
    for lora in ({"rank": 8}, {"lora_rank": 8}, LoRAConfig(rank=8)):
        found = LoRATrainerConfig(lora=lora).plan().phases[1].adapters
        assert found == AdapterSettings(lora_rank=8, lora_alpha=16.0)


def test_what_does_not_stand_in_the_file_is_not_said_to(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(YAML, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        PhasePlan.from_yaml(file, seed=-1)
    assert [(one.key, one.location) for one in caught.value.problems] == [("seed", "")]
