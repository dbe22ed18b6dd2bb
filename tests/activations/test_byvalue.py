"""On a lazy device inputs of layers wait in host memory, and nothing looks at a tensor but
between two layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lazydevice import DEVICE, LazyDevice
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from lema.activations import get_lora_act_offloading_ctx_manager
from lema.activations.lazy import ByValue
from lema.activations.protocols import StayReason
from lema.errors import ConfigError

BLOCKS = 8
ROWS = 6
WIDTH = 16
NBYTES = ROWS * WIDTH * 4


class Marked:
    """A choice: the inputs of blocks that are being run, as long as no backward runs."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> StayReason | None:
        if torch._C._current_graph_task_id() != -1:
            return StayReason.BACKWARD
        return None if any(tensor is one for one in self.inputs) else StayReason.UNCHOSEN


class Stack:
    """Blocks of two linear layers each, every one of them a checkpoint.

    Args:
        device: where its weights are.
        reentrant: which kind of checkpoint; None: none.
        num_blocks: how many.
    """

    def __init__(
        self, device: torch.device, reentrant: bool | None, num_blocks: int = BLOCKS
    ) -> None:
        self.reentrant = reentrant
        self.marked = Marked()
        self.num_blocks = num_blocks
        generator = torch.Generator().manual_seed(5)
        weights = [
            torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(2 * num_blocks)
        ]
        self.weights = [weight.to(device).requires_grad_() for weight in weights]
        self.state = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()

    def forward(self) -> Tensor:
        state = self.state
        for index in range(self.num_blocks):
            up, down = self.weights[2 * index : 2 * index + 2]
            self.marked.inputs.append(state)
            if self.reentrant is None:
                state = _block(state, up, down)
            else:
                state = checkpoint(
                    _block, state, up, down, use_reentrant=self.reentrant, preserve_rng_state=False
                )
            self.marked.inputs.clear()
        return state.sum()

    def gradients(self) -> list[Tensor]:
        return [
            leaf.grad.to("cpu") for leaf in (self.state, *self.weights) if leaf.grad is not None
        ]


def _block(state: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return state + torch.tanh(state @ up) @ down


@pytest.fixture
def lazy() -> Iterator[LazyDevice]:
    with LazyDevice() as device:
        yield device


def expected(reentrant: bool | None) -> list[Tensor]:
    whole = Stack(torch.device("cpu"), reentrant)
    whole.forward().backward()
    found = whole.gradients()
    assert len(found) == 1 + 2 * BLOCKS
    return found


def offloaded(stack: Stack, sync: Callable[[], None]) -> ByValue:
    return ByValue(stack.marked, sync=sync)


def hooks(offload: ByValue) -> Any:
    offload.order()
    return saved_tensors_hooks(offload.pack, lambda packed: packed.unpack())


@pytest.mark.parametrize("reentrant", [True, False])
def test_b6_gradients_are_the_same_and_graphs_are_cut_between_blocks_alone(
    lazy: LazyDevice, reentrant: bool
) -> None:
    stack = Stack(DEVICE, reentrant)
    syncs: list[int] = []

    def sync() -> None:
        syncs.append(len(lazy.graphs))
        lazy.run()

    offload = offloaded(stack, sync)
    with hooks(offload):
        loss = stack.forward()
        assert len(syncs) == BLOCKS, "the forward is cut once for each block"
        assert offload.live_bytes == BLOCKS * NBYTES
        loss.backward()
    assert len(syncs) == 2 * BLOCKS, "the backward is cut once for each block"
    assert lazy.forced == 0, "a graph was cut where nobody said so"
    for found, right in zip(stack.gradients(), expected(reentrant), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("reentrant", [True, False])
def test_no_graph_grows_with_the_depth_of_the_model(reentrant: bool) -> None:
    """What a lazy device holds while it runs a graph is what that computes: one block, however
    many there are.
    """
    largest = []
    for num_blocks in (4, 12):
        with LazyDevice() as lazy:
            stack = Stack(DEVICE, reentrant, num_blocks)
            lazy.run()
            lazy.graphs.clear()
            with hooks(offloaded(stack, lazy.run)):
                stack.forward().backward()
            lazy.run()
            largest.append(max(lazy.graphs))
    assert largest[0] == largest[1] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_only_inputs_of_layers_are_moved_each_once_each_way(
    lazy: LazyDevice, reentrant: bool
) -> None:
    stack = Stack(DEVICE, reentrant)
    offload = offloaded(stack, lazy.run)
    uploads = lazy.uploads
    with hooks(offload):
        stack.forward().backward()
    counters = offload.counters
    assert (counters.moved, counters.copies_out, counters.copies_back) == (BLOCKS, BLOCKS, BLOCKS)
    assert (counters.bytes_out, counters.bytes_back) == (BLOCKS * NBYTES, BLOCKS * NBYTES)
    assert counters.kept[StayReason.UNCHOSEN] >= 2 * BLOCKS, "weights stay"
    assert lazy.uploads - uploads == BLOCKS
    assert offload.live_bytes == 0


def test_an_input_that_is_saved_several_times_is_moved_once(lazy: LazyDevice) -> None:
    stack = Stack(DEVICE, None)
    with hooks(offload := offloaded(stack, lazy.run)):
        state, (one, two, three) = stack.state, stack.weights[:3]
        stack.marked.inputs.append(state)
        total = ((state @ one) + (state @ two) + (state @ three)).sum()
        stack.marked.inputs.clear()
    graphs = len(lazy.graphs)
    total.backward()
    counters = offload.counters
    assert (counters.moved, counters.restored) == (3, 3)
    assert (counters.copies_out, counters.copies_back) == (1, 1)
    assert len(lazy.graphs) == graphs + 1, "what comes back for several is waited for once"


def test_a_tensor_that_was_written_into_is_another_value(lazy: LazyDevice) -> None:
    stack = Stack(DEVICE, None)
    state = torch.ones(ROWS, WIDTH).to(DEVICE)
    offload = offloaded(stack, lazy.run)
    stack.marked.inputs.append(state)
    before = offload.pack(state)
    state.add_(1)
    after = offload.pack(state)
    assert torch.equal(before.unpack().to("cpu"), torch.ones(ROWS, WIDTH))
    assert torch.equal(after.unpack().to("cpu"), torch.full((ROWS, WIDTH), 2.0))
    assert offload.counters.copies_out == 2


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [None, False])
def test_a_graph_may_be_differentiated_twice_or_never(
    lazy: LazyDevice, reentrant: bool | None
) -> None:
    stack = Stack(DEVICE, reentrant)
    with hooks(offload := offloaded(stack, lazy.run)):
        loss = stack.forward()
        stack.forward()  # nobody wants this one
    lazy.run()  # it holds what it has to run
    gc.collect()
    assert offload.live_bytes == BLOCKS * NBYTES
    loss.backward(retain_graph=True)
    first = stack.gradients()
    loss.backward()
    for found, once in zip(stack.gradients(), first, strict=True):
        assert torch.equal(found, 2 * once)
    del loss
    lazy.run()
    gc.collect()
    assert offload.live_bytes == 0


def test_the_next_value_is_on_its_way_while_one_is_used(lazy: LazyDevice) -> None:
    """What was packed last is wanted first; one is fetched ahead, and none of it stays when it
    is given up.
    """
    stack = Stack(DEVICE, None)
    offload = offloaded(stack, lazy.run)
    states = [torch.full((ROWS, WIDTH), float(number)).to(DEVICE) for number in range(4)]
    stack.marked.inputs += states
    order = offload.order()
    packed = [offload.pack(state, order) for state in states]
    offload.expect(order)
    assert offload.counters.copies_back == 1
    for number in (3, 2, 1):
        assert torch.equal(
            packed[number].unpack().to("cpu"), torch.full((ROWS, WIDTH), float(number))
        )
        assert offload.counters.copies_back == 5 - number, "the one before it"
    offload.let_go()
    packed[0].unpack()
    assert offload.counters.copies_back == 5, "what was fetched ahead was kept"
    offload.close()


class Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        values = [(torch.randn(WIDTH, WIDTH, generator=generator) / 4).to(device) for _ in range(2)]
        self.up, self.down = (nn.Parameter(value) for value in values)

    def forward(self, state: Tensor) -> Tensor:
        return _block(state, self.up, self.down)


@pytest.mark.parametrize("reentrant", [True, False])
def test_b6_the_contexts_that_users_open_move_values_there(
    lazy: LazyDevice, reentrant: bool
) -> None:
    def stack(device: torch.device) -> nn.Module:
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        blocks = [
            checkpoint_wrapper(Block(device), kind, preserve_rng_state=False) for _ in range(BLOCKS)
        ]
        return nn.Sequential(*blocks)

    def gradients(model: nn.Module, device: torch.device) -> list[Tensor]:
        state = torch.linspace(0, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(device).requires_grad_()
        model(state).sum().backward()
        return [
            leaf.grad.to("cpu") for leaf in (state, *model.parameters()) if leaf.grad is not None
        ]

    whole = gradients(stack(torch.device("cpu")), torch.device("cpu"))
    model = stack(DEVICE)
    with pytest.raises(ConfigError, match="storages"):
        get_lora_act_offloading_ctx_manager(model, warn_if_no_head=False)
    context = get_lora_act_offloading_ctx_manager(
        model, warn_if_no_head=False, mode="hidden_states", sync=lazy.run
    )
    with context:
        found = gradients(model, DEVICE)
    assert len(found) == 2 * BLOCKS + 1
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    assert context.counters.copies_out == BLOCKS and context.counters.bytes_out == BLOCKS * NBYTES  # type: ignore[union-attr]
    assert context.live_bytes == 0  # type: ignore[union-attr]
