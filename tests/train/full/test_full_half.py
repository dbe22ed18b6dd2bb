"""Weights in bfloat16 train as a whole model does whose gradients step masters in fp32."""

from collections.abc import Callable

import pytest
import torch
from fulltraining import Weights, attention_of_the_last_four, config_of, everything
from latedevice import LateDevice
from parity import accumulate
from tiny import Checkpoint, micro_batches
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.backend import Backend
from lema.engine.optim import make_optimizer
from lema.errors import ConfigError
from lema.train.full.training import FullTraining
from lema_cpu import CpuBackend

STEPS = 5


def whole(
    checkpoint: Checkpoint, config: LemaConfig, chosen: Callable[[str], bool], count: int
) -> tuple[list[Tensor], Weights, Weights]:
    """Train masters in fp32 of a model in bfloat16; return the losses, the masters and the
    weights.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published, dtype=torch.bfloat16)
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))
    weights = {
        name: parameter
        for name, parameter in model.train().named_parameters()
        if parameter.requires_grad
    }
    masters = {name: nn.Parameter(weight.detach().float()) for name, weight in weights.items()}
    optimizer = make_optimizer(masters.values(), config, model, masters)
    losses = []
    for _ in range(STEPS):
        losses.append(accumulate(model, micro_batches(count), autocast=torch.bfloat16).detach())
        for name, weight in weights.items():
            assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
            masters[name].grad = weight.grad.float()
            weight.grad = None
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(masters.values(), config.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(masters[name].bfloat16())
    return losses, masters, weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("count", "clipped", "selection", "backend"),
    [
        (1, None, everything, CpuBackend),
        (4, None, everything, lambda: CpuBackend(poison=True)),
        (4, 0.5, everything, CpuBackend),
        (2, 0.5, attention_of_the_last_four, lambda: LateDevice(3)),
        (2, None, everything, lambda: LateDevice(None)),
    ],
)
def test_steps_are_those_of_a_whole_model_with_masters_in_fp32(
    count: int,
    clipped: float | None,
    selection: Callable[[str], bool],
    backend: Callable[[], Backend],
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, "bfloat16")
    config = config_of(
        checkpoint, max_grad_norm=clipped, gradient_checkpointing=True, learning_rate=1e-3
    )
    losses, masters, weights = whole(checkpoint, config, selection, count)
    model = LemaModel(config, backend=backend())
    try:
        model.skeleton.train()
        training = FullTraining(model.adapter, config, selection)
        found = [training.accumulate(micro_batches(count)).loss for _ in range(STEPS)]
        assert found == [float(one) for one in losses]
        assert training.masters.keys() == masters.keys()
        for name, master in masters.items():
            assert training.masters[name].dtype == torch.float32
            assert torch.equal(training.masters[name], master), name
            assert torch.equal(training.master_store.weights[name], weights[name]), name
    finally:
        model.close()


def test_a_step_too_small_for_the_weights_is_kept_by_the_masters(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    checkpoint = checkpoint_of("llama", False, 0.0, "bfloat16")
    config = config_of(checkpoint, learning_rate=1e-5)
    model = LemaModel(config, backend=CpuBackend(poison=True))
    training = FullTraining(model.adapter, config)
    before = {name: master.detach().clone() for name, master in training.masters.items()}
    rounded = {name: training.master_store.weights[name].clone() for name in before}
    training.accumulate(micro_batches(2))
    assert all(not torch.equal(master, before[name]) for name, master in training.masters.items())
    lost = [
        name for name in before if torch.equal(training.master_store.weights[name], rounded[name])
    ]
    assert lost, "the step was large enough for bfloat16: nothing is shown here"
    model.close()


def test_float16_does_not_train(checkpoint_of: Callable[..., Checkpoint]) -> None:
    config = config_of(checkpoint_of("llama"), dtype="float16")
    model = LemaModel(config)
    with pytest.raises(ConfigError, match="float16, which does not train"):
        FullTraining(model.adapter, config)
    model.close()
