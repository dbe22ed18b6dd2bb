"""Full parameters, then adapters, by lists of stages: the plan they make, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lema.config.problems import SettingsError
from lema.errors import ConfigError
from lema.train.phases.twophase import LoRAConfig, LoRATrainerConfig

A = [{"name": "a", "rate": 1.0}]
B = [{"name": "b", "rate": 0.5}, {"name": "c", "rate": 0.5}]
STEP = 2 * 8


def config(**settings: Any) -> LoRATrainerConfig:
    base: dict[str, Any] = {
        "batch_size": 2,
        "block_size": 8,
        "pre_lora_tokens": [6 * STEP, 4 * STEP],
        "pre_lora_datasets": [A, B],
        "post_lora_tokens": [3 * STEP, 2 * STEP],
        "post_lora_datasets": [B, A],
    }
    return LoRATrainerConfig(**base | settings)


def test_names_and_defaults_are_those_of_the_trainer() -> None:
    found = LoRATrainerConfig()
    assert (found.batch_size, found.per_device_batch_size, found.block_size) == (512, -1, 512)
    assert (found.total_tokens, found.lr, found.warmup_pct, found.decay_pct) == (
        10**9,
        3e-4,
        0.01,
        0.1,
    )
    assert (found.validate, found.evaluate, found.evaluations, found.wandb) == (
        True,
        True,
        [],
        False,
    )
    assert (found.report_interval, found.checkpoint_interval) == (32, 1024)
    assert (found.validation_interval, found.validation_steps) == (512, 2048)
    assert [one.name for one in found.datasets] == ["fineweb"]
    assert found.schedule == "constant"
    assert (found.pre_lora_tokens, found.post_lora_tokens) == ([10**9], [10**8])
    assert [one.name for mixture in found.pre_lora_datasets for one in mixture] == ["fineweb"]
    assert (LoRAConfig().rank, LoRAConfig().alpha, LoRAConfig().target_modules) == (16, 16.0, None)
    plan = found.plan()
    assert plan.num_steps == 10**9 // 512**2 + 10**8 // 512**2
    assert LoRATrainerConfig(**found.to_dict()) == found


def test_one_phase_for_each_stage() -> None:
    plan = config(per_device_batch_size=1, lora={"rank": 4}).plan()
    assert [(one.name, one.trains, one.optimizer) for one in plan.phases] == [
        ("pre-lora-1", "full", "reset"),
        ("pre-lora-2", "full", "carry"),
        ("post-lora-1", "lora", "reset"),
        ("post-lora-2", "lora", "carry"),
    ]
    assert [one.stop_step for one in plan.boundaries()] == [6, 10, 13, 15]
    assert [[one.name for one in phase.mixture] for phase in plan.phases] == [
        ["a"],
        ["b", "c"],
        ["b", "c"],
        ["a"],
    ]
    assert [phase.adapters and phase.adapters.lora_rank for phase in plan.phases] == [
        None,
        None,
        4,
        4,
    ]
    assert (plan.micro_batch_size, config().plan().micro_batch_size) == (1, None)


def test_the_base_trainers_tokens_and_data_sets_are_one_stage_of_all_parameters() -> None:
    given = {
        "batch_size": 2,
        "block_size": 8,
        "post_lora_tokens": [STEP],
        "post_lora_datasets": [A],
    }
    found = LoRATrainerConfig(total_tokens=6 * STEP, datasets=B, **given)
    assert [(one.trains, one.tokens, len(one.mixture)) for one in found.plan().phases] == [
        ("full", 6 * STEP, 2),
        ("lora", STEP, 1),
    ]
    assert LoRATrainerConfig(**found.to_dict()) == found
    # those of the stages, or of all
    assert config(total_tokens=10 * STEP) and config(total_tokens=15 * STEP)
    for wrong, said in (
        ({"total_tokens": 9 * STEP}, "the stages of pre_lora"),
        ({"datasets": A}, "both set the first data"),
    ):
        with pytest.raises(SettingsError, match=said):
            config(**wrong)


def test_lengths_of_the_schedule_are_fractions_of_it() -> None:
    long = {"pre_lora_tokens": [100 * STEP], "pre_lora_datasets": [A], "lr": 1.0}
    found = config(**long, warmup_pct=0.2, decay_pct=0.3)
    assert found.schedule == "wsd"  # which has both
    first = found.plan()
    assert (first.phases[0].spans(100).warmup, first.phases[0].spans(100).decay) == (20, 30)
    rates = trace(found)[:100]
    assert [rates[step] for step in (0, 20, 69)] == [0.01, 1.0, 1.0] and rates[71] < 1.0
    # neither is given: the learning rate is constant, as in the trainer
    assert set(trace(config(**long))) == {1.0}
    own = config(**long, schedule="linear").plan().phases[0].spans(100)
    assert (own.warmup, own.decay) == (1, 0)


def trace(found: LoRATrainerConfig) -> list[float]:
    plan = found.plan()
    lengths = [plan.steps(index).steps for index in range(len(plan.phases))]
    return [
        plan.learning_rate(index, step)
        for index, steps in enumerate(lengths)
        for step in range(steps)
    ]


def test_stages_share_a_schedule_and_adapters_begin_their_own() -> None:
    rates = trace(config(schedule="linear", lr=1.0))
    assert rates == pytest.approx(
        [1 - step / 10 for step in range(10)] + [1 - step / 5 for step in range(5)]
    )
    assert config(schedule="linear").plan().warnings() == ()


def test_cosine_rewarm_begins_again_in_each_stage() -> None:
    rates = trace(config(schedule="cosine_rewarm", warmup_pct=0.5, lr=1.0))
    assert [rates[step] for step in (0, 6, 10, 13)] == pytest.approx([0.01, 0.01, 0.01, 0.01])
    assert [rates[step] for step in (3, 8, 11, 14)] == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_the_finding_a_schedule_of_the_whole_run_leaves_adapters_inside_their_warm_up() -> None:
    settings: dict[str, Any] = {
        "pre_lora_tokens": [19073 * STEP],
        "pre_lora_datasets": [A],
        "post_lora_tokens": [95 * STEP],
        "post_lora_datasets": [A],
        "schedule": "wsd",
        "decay_pct": 0.01,
    }
    first, second = config(**settings, schedule_spans="run").plan().warnings()
    assert (first.key, second.key) == ("phases[0].schedule_steps", "phases[1].warmup_ratio")
    assert "ends at step 19073 of a schedule of 19168" in first.what
    assert "from 3e-06 to 0.00015" in first.what
    assert (
        "phase 2 (post-lora-1) ends inside its warm-up: 95 steps, and 191 of warm-up" in second.what
    )
    assert "from 3e-06 to 0.00015, and never reaches 0.0003" in second.what
    assert config(**settings).plan().warnings() == ()


def test_no_stages_before_go_straight_to_adapters() -> None:
    for empty in (
        {"pre_lora_tokens": [], "pre_lora_datasets": []},
        {"pre_lora_dataset": [], "pre_lora_tokens": []},
    ):
        given = {"post_lora_tokens": [1e9], "post_lora_datasets": [A]}
        assert [one.trains for one in LoRATrainerConfig(**given, **empty).plan().phases] == ["lora"]
    assert [one.trains for one in LoRATrainerConfig(pre_lora_tokens=[]).plan().phases] == ["lora"]
    assert [one.trains for one in LoRATrainerConfig(post_lora_datasets=[]).plan().phases] == [
        "full"
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"pre_lora_tokens": [STEP]},
            {
                "pre_lora_tokens": (
                    "pre_lora_tokens has 1 stage, and pre_lora_datasets has 2 stages (give "
                    "both lists"
                )
            },
        ),
        (
            {"post_lora_tokens": [], "post_lora_datasets": [A]},
            {
                "post_lora_tokens": "post_lora_tokens has 0 stages, and post_lora_datasets has 1 stage"
            },
        ),
        (
            {"pre_lora_tokens": [0, STEP]},
            {"pre_lora_tokens": "must be at least 1, not 0; leave out"},
        ),
        (
            {"pre_lora_tokens": [STEP - 1, STEP]},
            {"pre_lora_tokens[0]": f"give at least {STEP} tokens"},
        ),
        (
            {"pre_lora_datasets": [A, [{"name": "b", "rate": 0.5}]]},
            {"pre_lora_datasets[1]": "sum to 0.5, not to 1: b 0.5 (change the rates"},
        ),
        (
            {
                "pre_lora_tokens": [],
                "pre_lora_datasets": [],
                "post_lora_tokens": [],
                "post_lora_datasets": [],
            },
            {"post_lora_tokens": "nothing would train (set the tokens"},
        ),
        ({"lora": {"rank": 0}}, {"lora.rank": "lora.rank must be at least 1"}),
        (
            {"schedule": "cosine", "decay_pct": 0.2},
            {"decay_pct": "(leave decay_pct out, or choose wsd or wsds)"},
        ),
        (
            {"schedule": "wsd", "constant_pct": 0.1},
            {"constant_pct": "(leave constant_pct out, or choose wsds)"},
        ),
        (
            {"schedule": "wsd", "warmup_pct": 0.9, "decay_pct": 0.5},
            {"warmup_pct": "warmup (4) and decay (2) are more than the schedule's 5 steps (make"},
        ),
        ({"per_device_batch_size": 0}, {"per_device_batch_size": "or -1 for all"}),
        ({"pre_lora_token": [1]}, {"pre_lora_token": "did you mean pre_lora_tokens"}),
        (
            {"pre_lora_dataset": [A, A]},
            {"pre_lora_dataset": "pre_lora_dataset and pre_lora_datasets are one setting"},
        ),
    ],
)
def test_bad_input_names_its_key_and_how_to_mend_it(
    settings: dict[str, Any], said: dict[str, str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        config(**settings)
    found = {one.key: f"{one.what} ({one.how})" for one in caught.value.problems}
    assert list(found) == list(said)
    assert all(said[key] in found[key] for key in said)


def test_both_lists_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="2 settings are wrong") as caught:
        config(pre_lora_tokens=[STEP], post_lora_tokens=[STEP])
    assert "pre_lora_tokens has 1 stage" in str(caught.value)
    assert "post_lora_tokens has 1 stage" in str(caught.value)


def test_yaml_may_name_the_data_sets_in_the_singular(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    text = """\
pre_lora_tokens: [1e6]
pre_lora_dataset:
  - - {name: a, rate: 0.25}
    - {name: b, rate: 0.75}
post_lora_tokens: []
post_lora_dataset: []
"""
    file.write_text(text, encoding="utf-8")
    assert [one.name for one in LoRATrainerConfig.from_yaml(file).plan().phases[0].mixture] == [
        "a",
        "b",
    ]
    file.write_text(text.replace("0.75", "2"), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        LoRATrainerConfig.from_yaml(file)
    assert [(one.key, one.location) for one in caught.value.problems] == [
        ("pre_lora_datasets[0][1].rate", f"{file}:4")
    ]
    file.write_text(text.replace("0.75", "0.5"), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        LoRATrainerConfig.from_yaml(file, seed=1)
    assert [(one.key, one.location) for one in caught.value.problems] == [
        ("pre_lora_datasets[0]", f"{file}:3")
    ]
