"""Learning-rate schedules are those of `transformers`, whether a run begins with them or comes back to them."""

from typing import get_args

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from lema.config import LemaConfig, Scheduler
from lema.errors import ConfigError
from lema.optim import make_optimizer, make_schedule

STEPS = 12
WITHOUT_SETTINGS = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
SUPPORTED = [*WITHOUT_SETTINGS, "inverse_sqrt"]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 3}, {"warmup_ratio": 0.2}, {"warmup_steps": 0}])
def test_rates_are_transformers_own_from_any_step_on(name: str, warmup: dict[str, float]) -> None:
    config = LemaConfig("m", lr_scheduler_type=name, **warmup)
    # transformers writes a ratio of warm-up as warmup_steps below 1.
    arguments = TrainingArguments(warmup_steps=max(warmup.values()), use_cpu=True, report_to="none")
    expected = rates(get_scheduler(name, optimizer(), arguments.get_warmup_steps(STEPS), STEPS), STEPS)
    assert rates(make_schedule(optimizer(), config, STEPS), STEPS) == expected
    for done in (1, 3, 7):
        assert rates(make_schedule(optimizer(), config, STEPS, done), STEPS - done) == expected[done:]


@pytest.mark.parametrize("name", sorted(set(get_args(Scheduler)) - set(SUPPORTED)))
def test_a_schedule_that_needs_more_than_the_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(optimizer(), LemaConfig("m", lr_scheduler_type=name), STEPS)
    assert caught.value.where == f"lr_scheduler_type: {name}"
    assert "cosine" in caught.value.how


def test_the_optimizer_is_adamw_with_the_settings_given() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    given = {"learning_rate": 0.3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 0.01}
    ours = make_optimizer(parameters, LemaConfig("m", **given))
    theirs = torch.optim.AdamW(parameters, lr=0.3, weight_decay=0.1, betas=(0.8, 0.7), eps=0.01)
    assert type(ours) is torch.optim.AdamW
    assert ours.defaults == theirs.defaults
