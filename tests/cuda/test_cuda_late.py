"""A training step through the CUDA backend's slots and downloads, with copies that come late, is
the whole model's.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from latedevice import LateDevice
from parity import ALPHA, RANK, SEED, Outcome, assert_same, draw_b, streamed_step
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lema import LemaConfig, LemaModel
from lema.activations.boundaries import NUM_BUFFERS, TierName
from lema.activations.stepstore import BoundaryArena
from lema.backend import Backend, Download, Downloaded
from lema.plan.work.meter import Tally

CheckpointOf = Callable[..., Checkpoint]
OutcomeOf = Callable[..., Outcome]
COUNT = 4  # micro-batches


@contextmanager
def model_on(
    backend: Backend, checkpoint: Checkpoint, directory: Path, **settings: Any
) -> Iterator[LemaModel]:
    settings = {
        "device": "cpu",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "seed": SEED,
        "save_steps": 0,
        **settings,
    }
    settings.update(gradient_checkpointing=True, offload_dir=directory)
    model = LemaModel(LemaConfig(str(checkpoint.streamed), **settings), backend=backend)
    try:
        model.initialize_lora()
        model.lora_manager.train()
        draw_b(model.lora_manager)
        yield model
    finally:
        model.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 2])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_step_is_the_whole_models_however_late_copies_come(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, tier: str, seed: int | None
) -> None:
    checkpoint = checkpoint_of("llama")
    expected = outcome_of("llama", False, 0.0, COUNT, True)
    assert NUM_LAYERS >= 8
    depth = 1 if seed is None else seed
    with model_on(
        LateDevice(seed), checkpoint, tmp_path, boundary_activations=tier, prefetch_depth=depth
    ) as model:
        for _ in range(2):  # the second in the memory of the first
            assert_same(streamed_step(model, micro_batches(COUNT, padding=True)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_in_a_step_no_thread_waits_for_the_device_but_those_that_read_and_write(
    checkpoint_of: CheckpointOf, tmp_path: Path, tier: str
) -> None:
    backend = LateDevice()
    with model_on(backend, checkpoint_of("llama"), tmp_path, boundary_activations=tier) as model:
        streamed_step(model, micro_batches(COUNT))
        before = backend.synchronized
        backend.queues.waiting_threads.clear()
        for _ in range(3):
            backend.queues.run_all()  # buffers of the inputs are those of the step before last
            streamed_step(model, micro_batches(COUNT))
        assert backend.synchronized == before
        assert backend.queues.waiting_threads or tier != "disk", "this test sees nobody wait at all"
        assert threading.current_thread() not in backend.queues.waiting_threads


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_step_that_is_given_up_spoils_nothing_of_the_next(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, tier: str
) -> None:
    expected = outcome_of("llama", False, 0.0, COUNT, True)
    batches = micro_batches(COUNT, padding=True)
    with model_on(
        LateDevice(), checkpoint_of("llama"), tmp_path, boundary_activations=tier
    ) as model:
        loss = model.adapter.loss(batches)  # by now the first boundaries are on their way back
        del loss
        model.memory.cancel()
        assert_same(streamed_step(model, batches), expected)


class LeavesAtOnce(LateDevice):
    """What is downloaded has left when `download` returns."""

    def download(self, source: Tensor, target: Tensor) -> Download:
        target.copy_(source)
        return Downloaded()


def peak_of_a_step(backend: LateDevice, checkpoint: Checkpoint, directory: Path) -> int:
    """Return the most bytes of tensors alive at once in a step that are made in it."""
    with model_on(backend, checkpoint, directory, boundary_activations="host") as model:
        streamed_step(model, micro_batches(COUNT))
        with Tally() as tally:
            tally.leave_out(
                [*model.skeleton.parameters(), *model.skeleton.buffers(), *backend.slots]
            )
            streamed_step(model, micro_batches(COUNT))
        return tally.peak


@pytest.mark.slow
def test_boundaries_that_leave_do_not_make_a_step_larger(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """They are held a while longer than the layer needs them, on the way up, where a step is not
    largest.
    """
    checkpoint = checkpoint_of("llama")
    at_once, late = (
        peak_of_a_step(backend, checkpoint, tmp_path) for backend in (LeavesAtOnce(), LateDevice())
    )
    assert late <= at_once


@pytest.mark.slow
def test_replicas_gather_while_copies_come_late(tmp_path: Path) -> None:
    done = run_program(
        [str(Path(__file__).parents[1] / "support" / "gathers_late.py")], 2, tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gathered") == 2


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_few_boundaries_are_held_while_they_leave_and_none_at_the_turn(
    tmp_path: Path, tier: TierName
) -> None:
    hidden = [torch.zeros(2, 8, 16)]
    layers = range(20)
    backend = LateDevice()
    arena = BoundaryArena(backend, tier, tmp_path)
    step = arena.step(hidden, layers)
    sources = list[StorageWeakRef]()
    held = list[int]()
    for layer in layers:
        state = torch.full((2, 8, 16), float(layer))
        sources.append(StorageWeakRef(state.untyped_storage()))
        step.keep(layer, 0, state)
        del state
        held.append(sum(not source.expired() for source in sources))
    assert max(held) == NUM_BUFFERS, (
        "compute waits for every one of them" if max(held) < 2 else "too many are held"
    )
    assert held[-1] == 0
    for layer in reversed(layers):
        with step.fetch(layer, 0) as kept:
            assert bool((kept == layer).all())
    arena.close()
