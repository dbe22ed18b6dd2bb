"""Weights that train: which of them, on the whole model and streamed, and what a run of each
leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from aligned import aligned
from parity import accumulate
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.backend import Backend
from lema.engine.optim import make_optimizer
from lema.train.full.training import FullTraining
from lema_cpu import CpuBackend

STEPS = 10


Weights = dict[str, Tensor]


def everything(name: str) -> bool:
    return True


def attention_of_the_last_four(name: str) -> bool:
    return any(f".{NUM_LAYERS - 1 - n}." in name for n in range(4)) and "attn" in name


def one_in_the_middle(name: str) -> bool:
    return ".5." in name


def config_of(checkpoint: Checkpoint, **settings: object) -> LemaConfig:
    fixed = {
        "device": "cpu",
        "save_steps": 0,
        "strategy": "resident",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": None,
    }
    return LemaConfig(
        str(checkpoint.streamed), **{**fixed, "gradient_checkpointing": False, **settings}
    )


def whole(
    checkpoint: Checkpoint,
    config: LemaConfig,
    chosen: Callable[[str], bool],
    count: int,
    steps: int = STEPS,
) -> tuple[list[Tensor], Weights]:
    """Train in memory, by torch and transformers alone; return the losses and what was trained."""
    model = aligned(AutoModelForCausalLM.from_pretrained(checkpoint.published))
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, config, model)
    losses = []
    for _ in range(steps):
        losses.append(accumulate(model, micro_batches(count)).detach())
        if config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def streamed(
    config: LemaConfig,
    chosen: Callable[[str], bool],
    count: int,
    backend: Backend | None = None,
    steps: int = STEPS,
) -> tuple[list[Tensor], Weights]:
    """Do the same streamed."""
    model = LemaModel(config, backend=backend or CpuBackend(poison=True))
    try:
        model.skeleton.train()
        training = FullTraining(model.adapter, config, chosen)
        losses = [
            torch.tensor(training.accumulate(micro_batches(count)).loss) for _ in range(steps)
        ]
        return losses, {name: master.detach().clone() for name, master in training.masters.items()}
    finally:
        model.close()


def assert_same(
    one: tuple[Sequence[Tensor], Weights], other: tuple[Sequence[Tensor], Weights]
) -> None:
    assert one[1].keys() == other[1].keys() and other[1]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))
    assert not [name for name, weight in other[1].items() if not torch.equal(one[1][name], weight)]


@contextmanager
def opened(
    checkpoint: Checkpoint,
    chosen: Callable[[str], bool] = everything,
    backend: Backend | None = None,
    **settings: object,
) -> Iterator[tuple[LemaModel, FullTraining]]:
    config = config_of(checkpoint, gradient_checkpointing=True, **settings)
    model = LemaModel(config, backend=backend or CpuBackend(poison=True))
    try:
        model.skeleton.train()
        training = FullTraining(model.adapter, config, chosen)
        yield model, training
        training.close()
    finally:
        model.close()
