"""One training step of a streamed model, on the CPU and on the second device, from the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lema import LemaConfig, LemaModel
from lema.backend import Backend
from lema_cpu import CpuBackend

DISTANCE = "distance"  # the property of a test that says how far the steps of a type are apart
# relative, in fp32: products are those of the CPU, but attention and sums may be cut into other
# pieces
WITHIN = 1e-6


@dataclass(frozen=True)
class Step:
    """What a step leaves: the loss, and every gradient by name, in host memory."""

    loss: Tensor
    gradients: dict[str, Tensor]

    def distance(self, other: Step) -> float:
        """Return the largest relative difference, of the loss or of all gradients together."""
        assert self.gradients.keys() == other.gradients.keys() and self.gradients
        gradients = [
            torch.cat([step.gradients[name].flatten() for name in self.gradients])
            for step in (self, other)
        ]
        return max(
            float((self.loss - other.loss).abs() / other.loss.abs()),
            float(
                torch.linalg.vector_norm(gradients[0] - gradients[1])
                / torch.linalg.vector_norm(gradients[1])
            ),
        )


@contextmanager
def opened(
    model: Path, device: str, backend: Backend | None = None, **settings: Any
) -> Iterator[LemaModel]:
    """Open a model with an adapter on every linear of its layers, drawn in host memory, in
    training mode.
    """
    defaults: dict[str, Any] = {
        "lora_rank": 2,
        "lora_alpha": 4,
        "seed": 7,
        "gradient_checkpointing": True,
        "device_memory": None,
        "save_steps": 0,
    }
    config = LemaConfig(str(model), device=device, **(defaults | settings))
    if backend is None and device == "cpu":
        backend = CpuBackend(poison=True)
    opened_model = LemaModel(config, backend=backend)
    try:
        opened_model.initialize_lora()
        opened_model.lora_manager.train()
        draw(opened_model.lora_manager)
        yield opened_model
    finally:
        opened_model.close()


def draw(model: nn.Module) -> None:
    """Give all that trains values that do not depend on the device."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / 10 + (".magnitude" in name)
                )


def take(model: LemaModel, batches: Sequence[Mapping[str, Tensor]]) -> Step:
    """Take one step, and the gradients off the model."""
    torch.manual_seed(11)
    loss = model.adapter.loss(batches)
    loss.backward()
    trained = {
        name: one for name, one in model.lora_manager.named_parameters() if one.requires_grad
    }
    gradients = {name: one.grad.cpu() for name, one in trained.items() if one.grad is not None}
    model.lora_manager.zero_grad(set_to_none=True)
    return Step(loss.detach().cpu(), gradients)


def on_both(
    model: Path,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    steps: int = 1,
    prepare: Callable[[LemaModel], None] = lambda _: None,
    **settings: Any,
) -> tuple[Step, Step]:
    """Take the last of some steps on the second device and on the CPU; `prepare` is called with
    each open model.
    """
    taken = []
    # The CPU's own attention rounds in another way than the one of all devices, which is used on
    # both then.
    with sdpa_kernel(SDPBackend.MATH):
        for device in ("second", "cpu"):
            with opened(model, device, **settings) as streamed:
                prepare(streamed)
                for _ in range(steps):
                    step = take(streamed, batches)
                taken.append(step)
    return taken[0], taken[1]


def by_turns(names: Iterable[str]) -> list[Any]:
    """Return cases of `(name, seed)`: every other name on streams that are as late as can be, the
    others on streams that run whenever chance will have it; the other way round where every case is
    tried."""
    turns = [
        (name, seed, number % 2 == (seed is None))
        for number, name in enumerate(names)
        for seed in (None, 5)
    ]
    return [
        pytest.param(name, seed, marks=[pytest.mark.exhaustive] if later else [])
        for name, seed, later in turns
    ]
