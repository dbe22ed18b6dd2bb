"""What a plan says of how phases are kept and what they read: a delta, the rounding of a merge,
fades and data.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phaseruns import FULL, HALF, LORA, SOURCES, STEP, assert_same, plan_of, weights

from lema import LemaConfig
from lema.convert import apply_delta, merge_adapter
from lema.convert.delta import DELTA_NAME
from lema.train.phases import stage as phases
from lema.train.phases.run import run_phases

PART = {
    "trainable": ["q_proj"],
    "layers": ["last:2"],
    "tokens": STEP,
    "mixture": HALF,
    "learning_rate": 1e-2,
}


def test_the_last_phase_may_leave_what_it_trained_alone(
    config_of: Callable[..., LemaConfig],
) -> None:
    run_phases(config_of("whole"), plan_of({**PART, "name": "part"}), SOURCES)
    run_phases(config_of("delta"), plan_of({**PART, "name": "part", "save": "delta"}), SOURCES)
    whole = Path(config_of("whole").output_dir) / "part"
    delta = Path(config_of("delta").output_dir) / "part"
    assert (whole / "model").is_dir() and not (delta / "model").exists()
    assert len(weights(delta / "delta")) == 2 and (delta / "delta" / DELTA_NAME).is_file()
    assert_same(apply_delta(delta / "delta", delta.parent / "applied"), whole / "model")


@pytest.mark.slow
def test_a_phase_added_after_a_delta_gets_its_model(config_of: Callable[..., LemaConfig]) -> None:
    part = {**PART, "name": "part"}
    adapters = {**LORA, "tokens": STEP}
    expected = run_phases(config_of("straight"), plan_of(part, adapters), SOURCES)
    run_phases(config_of("added"), plan_of({**part, "save": "delta"}), SOURCES)
    assert_same(
        run_phases(config_of("added"), plan_of(part, adapters), SOURCES, resume=True), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_adapters_are_merged_with_the_rounding_of_the_phase_after(
    rounding: str | None, config_of: Callable[..., LemaConfig], tmp_path: Path
) -> None:
    first = {**LORA, "tokens": STEP, "name": "first"}
    second: dict[str, Any] = {
        **LORA,
        "tokens": STEP,
        "name": "second",
        "merge": True,
        "rounding": rounding,
    }
    config = config_of(dtype="bfloat16")
    run_phases(config, plan_of(first, second, seed=5), SOURCES)
    merged = Path(config.output_dir) / "first" / "model"
    end = Path(config.output_dir) / "first" / "checkpoint-1"
    nearest = merge_adapter(end, tmp_path / "nearest")
    drawn = merge_adapter(end, tmp_path / "drawn", rounding="stochastic", seed=5)
    assert_same(merged, drawn if rounding == "stochastic" else nearest)
    assert any(not tensor.equal(weights(drawn)[name]) for name, tensor in weights(nearest).items())


@pytest.mark.slow
def test_a_fade_and_the_data_gone_on_with_are_those_of_the_plan(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that a run draws are those that the plan counts."""
    from lema.data.mixture import Mixture

    drawn: list[Any] = []
    original = Mixture.rows

    def rows(self: Mixture, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        drawn.extend(found)
        return found

    monkeypatch.setattr(Mixture, "rows", rows)
    one = {**FULL, "tokens": 2 * STEP, "mixture": [{"name": "one", "rate": 1.0}]}
    two = {
        **LORA,
        "tokens": 3 * STEP,
        "mixture": [{"name": "two", "rate": 1.0}],
        "fade": {"steps": 2},
    }
    plan = plan_of(one, two)
    run_phases(config_of(), plan, SOURCES)
    assert len(drawn) == 20 and len(set(drawn)) == 20
    counted = {name: sum(plan.counts(index).get(name, 0) for index in range(2)) for name in SOURCES}
    assert (
        {name: sum(draw.source == name for draw in drawn) for name in SOURCES}
        == counted
        == {"one": 12, "two": 8}
    )


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], bool]]:
    """Have every phase's optimizer told as it begins: the settings of its first group, and
    whether it has moments.
    """
    found: list[tuple[dict[str, Any], bool]] = []
    original = phases.follow

    def follow(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        state = optimizer.state_dict()["state"].values()
        # zeros are empty ones
        found.append((group, any(bool(one["exp_avg"].any()) for one in state)))
        return original(optimizer, *arguments, **options)

    monkeypatch.setattr(phases, "follow", follow)
    return found


@pytest.mark.slow
def test_t8_the_optimizer_is_that_of_the_settings_in_every_phase_and_carries_what_the_plan_says(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = spied(monkeypatch)
    whole = {**FULL, "tokens": STEP}
    adapters = {**LORA, "tokens": STEP}
    plan = plan_of(
        whole,
        {**whole, "name": "whole-2", "optimizer": "carry"},
        adapters,
        {**adapters, "name": "adapters-2", "optimizer": "carry"},
        {**adapters, "name": "adapters-3", "optimizer": "reset"},
    )
    settings = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    run_phases(config_of(save_steps=0, **settings), plan, SOURCES)
    for group, _ in told:
        assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == (
            (0.8, 0.95),
            1e-6,
            0.1,
        )
    assert [moments for _, moments in told] == [False, True, False, True, False]


@pytest.mark.slow
def test_t8_clipping_holds_in_both_kinds_of_phases(config_of: Callable[..., LemaConfig]) -> None:
    """Beside an epsilon of 1, a gradient that is scaled down to 1e-9 moves nothing."""
    plan = plan_of({**FULL, "tokens": STEP}, {**LORA, "tokens": STEP})
    moved = {}
    for name, norm in (("clipped", 1e-9), ("free", None)):
        config = config_of(name, save_steps=0, max_grad_norm=norm, adam_epsilon=1.0)
        end = run_phases(config, plan, SOURCES)
        given = weights(Path(config.model_name_or_path))
        trained = weights(Path(config.output_dir) / "whole" / "model")
        full = {key.partition("/")[2]: tensor for key, tensor in trained.items()}
        base = {key.partition("/")[2]: tensor for key, tensor in given.items()}
        factors = [tensor for key, tensor in weights(end).items() if "lora_B" in key]
        assert full.keys() & base.keys() and factors
        moved[name] = (
            max(float((full[key] - base[key]).abs().max()) for key in full.keys() & base.keys()),
            max(float(tensor.abs().max()) for tensor in factors),
        )
    assert max(moved["clipped"]) < 1e-7 < 1e-5 < min(moved["free"])


def test_what_a_phase_says_of_its_adapters_is_what_peft_is_given(
    config_of: Callable[..., LemaConfig],
) -> None:
    lora = {
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_rank_pattern": {"q_proj": 2},
        "lora_dropout": 0.1,
    }
    plan = plan_of(
        {
            **LORA,
            "tokens": STEP,
            **lora,
            "lora_use_rslora": True,
            "lora_layers_to_transform": [0, 1],
        }
    )
    end = run_phases(config_of(save_steps=0), plan, SOURCES)
    found = json.loads((end / "adapter_config.json").read_text(encoding="utf-8"))
    assert (found["r"], found["lora_alpha"], found["lora_dropout"], found["use_rslora"]) == (
        4,
        8,
        0.1,
        True,
    )
    shapes = {
        name.rsplit(".", 3)[-3]: tensor.shape[0]
        for name, tensor in weights(end).items()
        if "lora_A" in name
    }
    assert shapes == {"q_proj": 2, "v_proj": 4}
    assert sum("lora_A" in name for name in weights(end)) == 4
