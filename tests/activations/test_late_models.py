"""A step through the contexts, with copies that come as late as they may, is the step without
them, bit for bit.
"""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import LateDevice
from offloadmodels import assert_same, checkpointed, step, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lema.activations import OffloadActivations
from lema.activations import context as manager

SEEDS = (None, 1, 2)  # None: everything as late as can be


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice(request.param)
    monkeypatch.setattr(manager, "carrier_for", lambda *_, **__: device)
    return device


late_devices = pytest.mark.parametrize("late", SEEDS, indirect=True)


@pytest.mark.covered
@pytest.mark.sampled(1)
@late_devices
@pytest.mark.parametrize("kind", [None, True, False])
@pytest.mark.parametrize("mode", [True, "hidden_states", "disk"])
def test_a_step_is_the_same_however_late_copies_come(
    mode: Any, kind: bool | None, late: LateDevice, tmp_path: Path
) -> None:
    model = checkpointed(tiny_model(dropout=0.1), kind)
    expected = step(model)
    options: dict[str, Any] = {"offload_dir": tmp_path} if mode == "disk" else {}
    with closing(
        OffloadActivations(model=model, mode=mode, min_offload_size=64, **options)
    ) as context:
        for _ in range(3):  # from the second on in host memory that was used before
            assert_same(step(model, context), expected)
        assert context.counters.copies_back > 0 and context.live_bytes == 0
    if mode != "disk":
        assert threading.current_thread() not in late.queues.waiting_threads, (
            "the host was made to wait"
        )


class Grown(nn.Module):
    """Multiplies by its own memory of the input: its gradient is a view of what it saved, and
    nothing else.
    """

    def forward(self, state: Tensor) -> Tensor:
        found: Tensor = _Grown.apply(state)
        return found


class _Grown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        ctx.save_for_backward(state)
        return state.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (state,) = ctx.saved_tensors
        return state.view(-1).view(state.shape)  # type: ignore[no-any-return]


class ChunksOfWhatItComputes(nn.Module):
    """Saves views of one tensor that nobody else has: of a chunk, transposed, and broadcast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width)

    def forward(self, state: Tensor) -> Tensor:
        left, right = self.wide(state).chunk(2, dim=-1)
        summed: Tensor = left * right.sigmoid() + (left.mT @ right)[:, :1].expand_as(left[:, :1])
        return summed.tanh()  # else it grows without end


def stack(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*layers)


def gradients(
    model: nn.Module, context: OffloadActivations | None, reentrant: bool | None
) -> list[Tensor]:
    model.zero_grad()
    state = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
    out = state
    with context or torch.enable_grad():
        for layer in model.children():
            out = (
                layer(out) if reentrant is None else checkpoint(layer, out, use_reentrant=reentrant)
            )
        out.sum().backward()
    found = [state.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(
        gradient is not None and gradient.isfinite().all() and gradient.any() for gradient in found
    )
    return [gradient.clone() for gradient in found if gradient is not None]


@late_devices
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_what_a_backward_returns_may_be_a_view_of_what_came_back(
    late: LateDevice, reentrant: bool | None
) -> None:
    """Nothing else holds the memory it lies in; the next node computes with it while other
    pieces come and go.
    """
    model = stack(
        *(layer for _ in range(6) for layer in (nn.Linear(16, 16), Grown(), nn.Linear(16, 16)))
    )
    expected = gradients(model, None, reentrant)
    with closing(
        OffloadActivations(model=model, min_offload_size=64, warn_if_no_head=False)
    ) as context:
        for _ in range(2):
            found = gradients(model, context, reentrant)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert context.counters.copies_back > 0


@late_devices
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_views_that_a_recomputation_saves_are_right(
    late: LateDevice, reentrant: bool | None
) -> None:
    """Where layers are computed again, what they save then are views of what came back, and of
    what they compute.
    """
    model = stack(*(ChunksOfWhatItComputes(16) for _ in range(8)))
    expected = gradients(model, None, reentrant)
    with closing(
        OffloadActivations(model=model, min_offload_size=64, warn_if_no_head=False)
    ) as context:
        for _ in range(2):
            found = gradients(model, context, reentrant)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert context.counters.copies_back > 0
