"""Limits of memory hold in real steps, whatever they are spent on, and change no number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Outcome, assert_same, draw_b
from smallrun import settings, write_model
from torch import Tensor

from lema import LemaModel
from lema.engine.optim import training_bytes
from lema.errors import MemoryLimitError
from lema.plan import Allocation
from lema.plan.cost import Speeds
from lema.plan.work.meter import Tally
from lema.plan.work.step import LayerSeconds

LENGTH = 64
ROWS = 2
COUNT = 3
LAYER = 765_952  # bytes


def batches() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 290, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return [{"input_ids": ids, "labels": ids, "attention_mask": mask}] * COUNT


def step_within(directory: Path, tmp_path: Path, **changes: Any) -> tuple[Allocation, int, Outcome]:
    """Take steps within limits: return what memory went to, what the device held at most, and
    the outcome.
    """
    config = settings(
        directory,
        tmp_path,
        batch_size=ROWS * COUNT,
        micro_batch_size=ROWS,
        max_length=LENGTH,
        loss_chunk_tokens=64,
        gradient_checkpointing=True,
        **changes,
    )
    model = LemaModel(config)
    model.initialize_lora()
    model.skeleton.train()
    draw_b(model.skeleton)
    stream = model.memory
    for _ in range(2):  # the first makes what later steps use again
        model.skeleton.zero_grad(set_to_none=True)
        with Tally() as tally:
            tally.leave_out(
                [*model.skeleton.parameters(), *model.skeleton.buffers(), *batches()[0].values()]
            )
            tally.leave_out([buffer.memory for buffer in stream._ring.buffers])
            loss = model.adapter.loss(batches())
            loss.backward()
    gradients = sum(one.nbytes for one in model.get_trainable_parameters())
    inside = sum(stream.layers[index].nbytes for index in stream.residents)
    slots = min(stream.num_slots, len(stream.layers) - len(stream.residents)) * stream.slot_bytes
    # There is no optimizer; the gradients are among what the step made.
    trained = training_bytes(model.skeleton, model.split.layers_name) - gradients
    held = model.outer.nbytes + trained + inside + slots + tally.peak
    outcome = Outcome.of(model.skeleton, loss)
    allocation = model.allocation
    model.close()
    return allocation, held, outcome


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return write_model(place / "model", num_hidden_layers=8, hidden_size=128, intermediate_size=352)


@pytest.fixture(scope="module")
def floor(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The least device memory that is not refused, by the error's own word."""
    with pytest.raises(MemoryLimitError, match="one micro-batch in one layer") as caught:
        step_within(directory, tmp_path_factory.mktemp("floor"), device_memory="1MB")
    return int(caught.value.how.split("at least ")[1].split(" bytes")[0].replace(",", ""))


@pytest.fixture(scope="module")
def unlimited(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return step_within(directory, tmp_path_factory.mktemp("unlimited"))[2]


@pytest.mark.slow
@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize(
    "layers", [0, 1, 3.5, 8, 40], ids=lambda layers: f"room for {layers} layers"
)
def test_a_step_holds_no_more_than_device_memory_allows(
    directory: Path, tmp_path: Path, floor: int, unlimited: Outcome, layers: float
) -> None:
    limit = int(floor + layers * LAYER)
    allocation, held, outcome = step_within(directory, tmp_path, device_memory=limit)
    assert held <= 1.03 * limit
    assert_same(outcome, unlimited)
    assert layers < 40 or allocation.residents or allocation.saved


@pytest.mark.slow
def test_less_than_the_floor_is_refused(directory: Path, tmp_path: Path, floor: int) -> None:
    with pytest.raises(MemoryLimitError):
        step_within(directory, tmp_path, device_memory=floor - 1)


@pytest.fixture
def known_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every layer take the same time, whatever else this machine does meanwhile."""
    seconds = LayerSeconds(1e-3, 1e-3, 2e-3, 0.0)
    monkeypatch.setattr("lema.plan.measure.layer_seconds", lambda *_: seconds)


@pytest.mark.slow
@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize(
    ("disk", "layers", "kept"),
    [(1.0, 4, "residents"), (1e15, 12, "saved")],
    ids=["the disk is slow", "the disk is fast"],
)
def test_memory_goes_to_what_takes_the_time(
    directory: Path,
    tmp_path: Path,
    floor: int,
    unlimited: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    disk: float,
    layers: int,
    kept: str,
) -> None:
    """Where weights come slowly layers stay on the device; where they come at once, layers are
    not recomputed.
    """
    monkeypatch.setattr("lema.plan.measure._speeds", lambda *_: (Speeds(disk), {}))
    allocation, _, outcome = step_within(directory, tmp_path, device_memory=floor + layers * LAYER)
    other = "saved" if kept == "residents" else "residents"
    assert getattr(allocation, kept)
    assert not getattr(allocation, other)
    assert_same(outcome, unlimited)


@pytest.mark.slow
def test_measuring_leaves_the_generator_and_the_adapter_as_they_were(
    directory: Path, tmp_path: Path
) -> None:
    config = settings(
        directory,
        tmp_path,
        max_length=LENGTH,
        device_memory="1GB",
        gradient_checkpointing=True,
        lora_dropout=0.1,
    )
    model = LemaModel(config)
    model.initialize_lora()
    before = [one.clone() for one in model.get_trainable_parameters()]
    state = torch.get_rng_state()
    assert model.allocation
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.get_trainable_parameters()))
    assert all(one.grad is None for one in model.get_trainable_parameters())
    model.close()


@pytest.mark.slow
def test_host_memory_keeps_layers_that_are_not_read_again(
    directory: Path, tmp_path: Path, unlimited: Outcome
) -> None:
    allocation, _, outcome = step_within(directory, tmp_path, host_memory="9MB")
    assert allocation.host_cached
    assert_same(outcome, unlimited)
