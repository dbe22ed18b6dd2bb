"""Learning-rate schedules are those of `transformers`, whether a run begins with them or comes
back to them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, get_scheduler

from lema.config import LemaConfig
from lema.config.types import Optimizer, Scheduler
from lema.engine.optim import follow, make_optimizer, make_schedule, set_update
from lema.engine.schedules import factor_of, spans_of
from lema.errors import ConfigError
from lema.train.checkpoint.format import (
    check_savable,
    optimizer_state,
    restore_optimizer,
    write_checkpoint,
)

STEPS = 12
WITHOUT_SETTINGS = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
]
SUPPORTED = [*WITHOUT_SETTINGS, "inverse_sqrt"]
OWN = ["wsd", "wsds", "cosine_rewarm"]


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
@pytest.mark.parametrize(
    "warmup", [{"warmup_steps": 3}, {"warmup_ratio": 0.2}, {"warmup_steps": 0}]
)
def test_rates_are_transformers_own_from_any_step_on(name: str, warmup: dict[str, float]) -> None:
    config = LemaConfig("m", lr_scheduler_type=name, **warmup)
    # transformers writes a ratio of warm-up as warmup_steps below 1.
    arguments = TrainingArguments(warmup_steps=max(warmup.values()), use_cpu=True, report_to="none")
    expected = rates(
        get_scheduler(name, optimizer(), arguments.get_warmup_steps(STEPS), STEPS), STEPS
    )
    assert rates(make_schedule(optimizer(), config, STEPS), STEPS) == expected
    for done in (1, 3, 7):
        assert (
            rates(make_schedule(optimizer(), config, STEPS, done), STEPS - done) == expected[done:]
        )


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("given", [{"warmup_steps": 3}, {"warmup_ratio": 0.2}, {}])
def test_rates_of_our_own_schedules_are_their_formulas_from_any_step_on(
    name: str, given: dict[str, Any]
) -> None:
    config = LemaConfig("m", lr_scheduler_type=name, **given)
    factor = factor_of(name, STEPS, spans_of(name, STEPS, warmup=next(iter(given.values()), None)))
    expected = [0.5 * factor(step) for step in range(STEPS)]
    assert rates(make_schedule(optimizer(), config, STEPS), STEPS) == expected
    for done in (1, 3, 7):
        assert (
            rates(make_schedule(optimizer(), config, STEPS, done), STEPS - done) == expected[done:]
        )


def test_parts_of_our_own_schedule_that_are_longer_than_the_run_are_refused() -> None:
    config = LemaConfig("m", lr_scheduler_type="wsds", warmup_ratio=0.9)
    with pytest.raises(ConfigError, match="are more than the schedule's") as caught:
        make_schedule(optimizer(), config, STEPS)
    assert (caught.value.where, caught.value.how) == (
        "warmup_ratio",
        "lower warmup_ratio, or train for more steps",
    )


@pytest.mark.parametrize("name", sorted(set(get_args(Scheduler)) - {*SUPPORTED, *OWN}))
def test_a_schedule_that_needs_more_than_the_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(optimizer(), LemaConfig("m", lr_scheduler_type=name), STEPS)
    assert caught.value.where == f"lr_scheduler_type: {name}"
    assert "cosine" in caught.value.how


def test_the_optimizer_is_adamw_with_the_settings_given() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    given = {
        "learning_rate": 0.3,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_beta2": 0.7,
        "adam_epsilon": 0.01,
    }
    ours = make_optimizer(parameters, LemaConfig("m", **given))
    theirs = torch.optim.AdamW(parameters, lr=0.3, weight_decay=0.1, betas=(0.8, 0.7), eps=0.01)
    assert type(ours) is torch.optim.AdamW
    assert ours.defaults == theirs.defaults


def trained(count: int = 3, **how: object) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(5, 3, generator=draw)) for _ in range(count)]
    return parameters, torch.optim.AdamW(parameters, lr=0.1, **how)


def take_steps(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, seed: int
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(5, 3, generator=draw)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_in_host_memory_the_optimizer_is_the_plain_one_to_the_bit() -> None:
    parameters, plain = trained()
    ours = make_optimizer(trained()[0], LemaConfig("m", learning_rate=0.1, weight_decay=0.01))
    assert not ours.param_groups[0]["fused"]
    found = take_steps(ours.param_groups[0]["params"], ours, 2)
    assert all(
        torch.equal(one, other)
        for one, other in zip(found, take_steps(parameters, plain, 2), strict=True)
    )


def test_a_device_without_a_kernel_for_the_whole_update_gets_the_plain_one() -> None:
    ours = make_optimizer([torch.nn.Parameter(torch.zeros(2, device="meta"))], LemaConfig("m"))
    assert not ours.param_groups[0]["fused"]


def test_a_device_with_a_kernel_for_the_whole_update_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lema.engine.optim._has_fused_kernel", lambda device, dtype: dtype == torch.float32
    )
    both = [
        torch.nn.Parameter(torch.zeros(2, device="meta", dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert make_optimizer(both[:1], LemaConfig("m")).param_groups[0]["fused"] is True
    assert not make_optimizer(both, LemaConfig("m")).param_groups[0]["fused"]
    assert not make_optimizer([torch.nn.Parameter(torch.zeros(2))], LemaConfig("m")).param_groups[
        0
    ]["fused"]


@pytest.mark.cuda
def test_a_gpu_gets_one_kernel_and_keeps_its_numbers() -> None:
    theirs, plain = trained()
    ours = [torch.nn.Parameter(parameter.detach().cuda()) for parameter in theirs]
    fused = make_optimizer(ours, LemaConfig("m", learning_rate=0.1, weight_decay=0.01))
    assert fused.param_groups[0]["fused"] is True
    draw = torch.Generator().manual_seed(2)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(5, 3, generator=draw)
            one.grad = other.grad.cuda()
        fused.step()
        plain.step()
    assert all(
        torch.allclose(one.cpu(), other, rtol=1e-5) for one, other in zip(ours, theirs, strict=True)
    )


OPTIMIZERS = sorted(set(get_args(Optimizer)))


# torchao's update is compiled, which here takes longer than all else
@torch.compiler.set_stance("force_eager")
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes, on a machine without a GPU
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_transformers_own_and_goes_on_from_its_checkpoint_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    given = {"learning_rate": 0.01, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}
    config = LemaConfig("m", optim=name, **given)
    one, other, theirs = (large() for _ in range(3))
    ours = make_optimizer([one], config)
    second = make_optimizer([other], config)
    check_savable(ours)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(
        TrainingArguments(optim=name, use_cpu=True, report_to="none", **given)
    )
    whole = kind([theirs], **{"weight_decay": 0.1, **options})
    for step in range(4):
        drawn = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
        if step == 2:
            write_checkpoint(tmp_path / "saved", optimizer_state(ours), {"global_step": 2})
            state = json.loads((tmp_path / "saved" / "state.json").read_text())
            restore_optimizer(second, tmp_path / "saved", state["optimizer"])
            other.data.copy_(one.data)
        for parameter, stepped in (
            (one, ours),
            (theirs, whole),
            *([(other, second)] if step >= 2 else []),
        ):
            parameter.grad = drawn.clone()
            stepped.step()
    assert torch.equal(one, theirs)
    assert torch.equal(one, other)


def large() -> torch.nn.Parameter:
    """A parameter large enough for moments to be quantised."""
    return torch.nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(9)))


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_whose_state_cannot_be_saved_is_refused_before_its_first_step() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one in self.param_groups[0]["params"]:
                self.state[one]["moment"] = {1, 2}

    with pytest.raises(ConfigError, match="cannot be saved without pickling"):
        check_savable(Odd([large()]))


@torch.compiler.set_stance("force_eager")
@pytest.mark.filterwarnings("ignore")
def test_quantised_moments_are_refused_where_processes_have_parts_of_the_parameters() -> None:
    parameter = large()
    quantised = make_optimizer([parameter], LemaConfig("m", optim="adamw_torch_8bit"))
    check_savable(quantised)
    with pytest.raises(
        ConfigError,
        match="its quantised moments cannot be divided among processes like the parameters",
    ):
        check_savable(quantised, parts=2)


@pytest.mark.filterwarnings("ignore")
def test_arguments_of_an_optimizer_that_are_wrong_are_refused() -> None:
    given = {"optim": "ademamix", "optim_args": "alpha=2.0,beta3=0.99"}
    assert make_optimizer([large()], LemaConfig("m", **given)).param_groups[0]["alpha"] == 2.0
    with pytest.raises(ConfigError, match="this optimizer fails") as caught:
        make_optimizer([large()], LemaConfig("m", optim="ademamix", optim_args="alpha=two"))
    assert caught.value.where == "optim: ademamix"


def test_biases_and_norms_do_not_decay_as_in_trainer() -> None:
    """Of the weights of a phase that trains all, and of adapters with their biases."""
    whole = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(4, 4), "input_layernorm": torch.nn.LayerNorm(4)}
    )
    trainer = Trainer(whole, TrainingArguments(weight_decay=0.1, use_cpu=True, report_to="none"))
    expected = {
        id(parameter): group["weight_decay"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    ours = make_optimizer(whole.parameters(), LemaConfig("m", weight_decay=0.1), whole)
    found = {
        id(parameter): group["weight_decay"]
        for group in ours.param_groups
        for parameter in group["params"]
    }
    assert found == expected
    assert sorted(found.values()) == [0.0, 0.0, 0.0, 0.1]
    set_update(ours, LemaConfig("m", weight_decay=0.3, learning_rate=1.0))
    assert [(group["lr"], group["weight_decay"]) for group in ours.param_groups] == [
        (1.0, 0.3),
        (1.0, 0.0),
    ]


def test_lora_plus_has_the_rates_that_peft_gives() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "1"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = LemaConfig("m", learning_rate=0.01, loraplus_lr_ratio=16, weight_decay=0.1)
    ours = make_optimizer(trained, config, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(one)]: group["lr"] for group in ours.param_groups for one in group["params"]}
    assert len(found) == len(trained) == 4
    assert all(
        rate == pytest.approx(0.16 if "lora_B" in name else 0.01) for name, rate in found.items()
    )
    schedule = make_schedule(ours, config, 10)
    for _ in range(5):
        ours.step()
        schedule.step()
    assert {round(rate / 0.005) for rate in schedule.get_last_lr()} <= {0, 1, 16}
    follow(ours, lambda _: 1.0, 0.02)
    assert {round(group["lr"] / 0.02) for group in ours.param_groups if group["params"]} == {1, 16}


def test_a_schedule_takes_what_transformers_gives_it() -> None:
    config = LemaConfig(
        "m", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}
    )
    expected = rates(
        get_scheduler("cosine_with_min_lr", optimizer(), 0, STEPS, {"min_lr_rate": 0.1}), STEPS
    )
    assert rates(make_schedule(optimizer(), config, STEPS), STEPS) == expected


@pytest.mark.parametrize("saved_fused", [False, True])
def test_a_checkpoint_goes_on_with_the_optimizer_of_the_machine_it_comes_to(
    saved_fused: bool, tmp_path: Path
) -> None:
    """Saved by one that updates in one kernel, restored into one that does not, and the other
    way about.
    """
    parameters, first = trained(fused=saved_fused, weight_decay=0.2)
    take_steps(parameters, first, 2)
    write_checkpoint(tmp_path / "saved", optimizer_state(first), {"global_step": 3})
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    others, second = trained(fused=not saved_fused)
    restore_optimizer(second, tmp_path / "saved", state["optimizer"])
    assert second.param_groups[0]["fused"] is not saved_fused
    assert second.param_groups[0]["weight_decay"] == 0.2
    # one that was never saved
    expected, straight = trained(fused=not saved_fused, weight_decay=0.2)
    with torch.no_grad():
        for copies in (others, expected):
            for one, source in zip(copies, parameters, strict=True):
                one.copy_(source)
    straight.state = defaultdict(
        dict,
        {
            one: {key: value.clone() for key, value in first.state[source].items()}
            for one, source in zip(expected, parameters, strict=True)
        },
    )
    found = take_steps(others, second, 3)
    assert all(
        torch.equal(one, other)
        for one, other in zip(found, take_steps(expected, straight, 3), strict=True)
    )
