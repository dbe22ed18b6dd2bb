"""Defaults that other trainers share, and those that depend on other settings."""

import pytest
import torch

from lema import LemaConfig
from lema.engine.optim import make_schedule, num_warmup_steps


def test_gradients_are_clipped_and_three_checkpoints_are_kept() -> None:
    config = LemaConfig("m")
    assert (config.max_grad_norm, config.save_total_limit) == (1.0, 3)
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert LemaConfig("m", lora_rank=32).lora_alpha == 64
    assert LemaConfig("m", lora_rank=32, lora_alpha=16).lora_alpha == 16
    assert LemaConfig("m", lora_rank=32).model_dump(exclude_unset=True) == {
        "model_name_or_path": "m",
        "lora_rank": 32,
    }


@pytest.mark.parametrize(("objective", "rate"), [("sft", 1e-4), ("dpo", 5e-6), ("kto", 5e-6)])
def test_the_learning_rate_is_that_of_the_objective(objective: str, rate: float) -> None:
    assert LemaConfig("m", objective=objective).learning_rate == rate
    assert LemaConfig("m", objective=objective, learning_rate=3e-3).learning_rate == 3e-3


@pytest.mark.parametrize(
    ("settings", "steps", "warmup"),
    [
        ({}, 20, 0),
        ({}, 33, 0),
        ({}, 34, 2),
        ({}, 66, 2),
        ({}, 67, 2),
        ({}, 100, 3),
        ({}, 1000, 30),
        ({}, 100_000, 100),
        ({"warmup_steps": "auto"}, 1000, 30),
        ({"warmup_steps": 0}, 1000, 0),
        ({"warmup_ratio": 0.0}, 1000, 0),
        ({"warmup_steps": 0.0}, 1000, 0),
        ({"warmup_steps": 7}, 1000, 7),
        ({"warmup_ratio": 0.0305}, 1000, 31),
        ({"warmup_steps": 0.0305}, 1000, 31),
    ],
)
def test_the_warm_up(settings: dict[str, object], steps: int, warmup: int) -> None:
    config = LemaConfig("m", **settings)
    assert num_warmup_steps(config, steps) == warmup
    again = LemaConfig(**config.to_dict())
    assert num_warmup_steps(again, steps) == warmup


def test_the_rate_rises_over_the_default_warm_up_as_transformers_lets_it() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, LemaConfig("m", learning_rate=1.0), 100)
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.0, 1 / 3, 2 / 3, 1.0]
    assert rates[4] == 96 / 97
