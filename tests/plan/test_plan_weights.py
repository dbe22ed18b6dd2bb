"""What training a model's own weights needs is told before it starts: it is what a real step
takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import LateDevice
from smallrun import settings, write_model
from torch import Tensor
from transformers import PreTrainedModel

from lema import LemaConfig, LemaModel
from lema.backend import Backend, Download
from lema.errors import ConfigError, MemoryLimitError
from lema.plan import Machine
from lema.plan.blueprint import draw_up
from lema.plan.cost import Speeds
from lema.plan.machine import profile
from lema.plan.planner import MachineState, StepNeeds, machine_state_of, planner_of
from lema.plan.work.meter import Tally
from lema.plan.work.workload import MicroBatch, measure
from lema.train.full.training import FullTraining

LENGTH = 64
ROWS = 4
MICRO = 2
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176}


def everything(_: PreTrainedModel) -> Callable[[str], bool]:
    return lambda _: True


def config_of(directory: Path, tmp_path: Path, **changes: Any) -> LemaConfig:
    fixed = {
        "strategy": "resident",
        "batch_size": ROWS,
        "micro_batch_size": MICRO,
        "max_length": LENGTH,
    }
    return settings(directory, tmp_path, **{**fixed, "loss_chunk_tokens": 64, **changes})


def micro_batches() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 290, (MICRO, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return [{"input_ids": ids, "labels": ids, "attention_mask": mask}] * (ROWS // MICRO)


def told(
    config: LemaConfig, chosen: Any = everything, site: MachineState | None = None, **changes: Any
) -> StepNeeds:
    return planner_of(
        config,
        machine_state=site or machine_state_of(config),
        chosen=chosen,
        strict=False,
        **changes,
    ).needs()


SINGLE = torch.float32
HALF = torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "clipped"), [(SINGLE, None), (SINGLE, 1.0), (HALF, 1.0)], ids=str
)
def test_a_real_step_takes_what_was_told(
    tmp_path: Path, dtype: torch.dtype, clipped: float | None
) -> None:
    """Host memory by part, to the byte. What a step makes on the device, within 10%, beside the
    gradients of one layer that may have left it already, and not 3% more."""
    config = config_of(
        write_model(tmp_path / "model", dtype=dtype, **WIDE), tmp_path, max_grad_norm=clipped
    )
    needs = told(config)
    trained = needs.planner.blueprint.trained
    assert trained is not None
    with trains(config) as (model, training):
        training.accumulate(micro_batches())  # the first makes what later ones use again
        own = {name: master for name, master in training.masters.items() if ".layers." in name}
        streamed = {name: stored_in(model, name) for name in own}
        apart = [
            one
            for name, one in training.masters.items()
            if not in_model(model, streamed, name, one)
        ]
        kept = [
            state[key]
            for state in training.optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        assert needs.host["cached"] == sum(buffer.nbytes for buffer in model.memory._host.values())
        assert needs.host["masters"] == sum(master.nbytes for master in apart)
        assert needs.host["moments"] == sum(tensor.nbytes for tensor in kept)
        waiting = sum(weight.nbytes for weight in streamed.values()) if clipped else 0
        assert needs.host["waiting"] == waiting
        parts = sum(needs.host[part] for part in ("masters", "moments", "waiting"))
        assert training.master_store.memory.host_bytes == parts + sum(
            weight.nbytes for weight in streamed.values()
        )
        count = sum(master.numel() for master in training.masters.values())
        assert trained.parameters == count == needs.planner.blueprint.parameters
        if dtype == torch.bfloat16:
            assert needs.host["masters"] + needs.host["moments"] == 12 * count
        real = peak_of_a_step(model, training)
    made = sum(
        size for part, size in needs.device.items() if part not in ("slots", "residents", "outside")
    )
    assert 0.97 * real <= made <= 1.1 * real + needs.device["gradients"] // 2


def peak_of_a_step(model: LemaModel, training: FullTraining) -> int:
    with Tally() as tally:
        tally.leave_out(
            [*model.skeleton.parameters(), *model.skeleton.buffers(), *training.masters.values()]
        )
        tally.leave_out(
            [tensor for state in training.optimizer.state.values() for tensor in state.values()]
        )
        tally.leave_out(list(model.memory._host.values()))
        tally.leave_out(training.master_store._waiting.values())
        tally.leave_out([tensor for batch in micro_batches() for tensor in batch.values()])
        training.accumulate(micro_batches())
    return tally.peak


@pytest.mark.slow
def test_the_device_peak_does_not_grow_with_depth(tmp_path: Path) -> None:
    """But for the inputs of layers, which wait elsewhere where the settings say so."""
    found = []
    for depth in (8, 16):
        directory = write_model(tmp_path / str(depth), num_hidden_layers=depth, **WIDE)
        config = config_of(directory, tmp_path)
        with trains(config) as (model, training):
            training.accumulate(micro_batches())
            real = peak_of_a_step(model, training)
        needs = told(config)
        assert needs.device["gradients"] == 2 * 4 * needs.planner.blueprint.trained.layers[0].count  # type: ignore[union-attr]
        away = told(config_of(directory, tmp_path, boundary_activations="host"), site=apart())
        assert away.device["slots"] == 3 * needs.planner.blueprint.layers[0].nbytes
        found.append((real, needs.device["boundaries"], sum(away.device.values())))
    (few, waiting, told_of_8), (many, waiting_more, told_of_16) = found
    assert told_of_8 == told_of_16
    assert many - few == pytest.approx(waiting_more - waiting, rel=0.05)


def apart() -> MachineState:
    """A device with memory of its own."""
    return MachineState(Machine("there", 10**10, 10**10, Speeds(1.0, 10.0), 0.0, 0.0), 10**10)


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [None, 1.0])
def test_bytes_that_move_are_those_of_a_run(tmp_path: Path, clipped: float | None) -> None:
    short = {"batch_size": 2, "max_length": 16}
    config = config_of(write_model(tmp_path / "model"), tmp_path, max_grad_norm=clipped, **short)
    needs = told(config, site=apart())
    device = Downloads()
    with trains(config, backend=device) as (model, training):
        for _ in range(3):
            training.accumulate(
                [{key: tensor[:, :16] for key, tensor in micro_batches()[0].items()}]
            )
        counters = model.memory.counters
    moved = needs.traffic(3)
    blueprint = needs.planner.blueprint
    assert moved.uploaded == counters.bytes_uploaded + blueprint.outside_bytes
    assert moved.downloaded == device.downloaded > 0
    assert (
        moved.read == sum(layer.read_bytes for layer in blueprint.layers) + blueprint.outside_bytes
    )


class Downloads(LateDevice):
    """Counts what is downloaded."""

    downloaded = 0

    def download(self, source: Tensor, target: Tensor) -> Download:
        self.downloaded += source.nbytes
        return super().download(source, target)


@pytest.mark.slow
def test_what_host_memory_does_not_hold_is_told_to_be_in_files(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        config = config_of(
            directory, tmp_path, max_grad_norm=1.0, dtype=dtype, host_memory="1100KB"
        )
        needs = told(config)
        with trains(config) as (model, training):
            own = [stored_in(model, name).nbytes for name in training.masters if ".layers." in name]
            assert 0 < needs.mapped == training.master_store.memory.mapped_bytes
            parts = sum(needs.host[part] for part in ("masters", "moments", "waiting"))
            assert parts + sum(own) == training.master_store.memory.host_bytes < 1.1e6


def test_a_part_that_trains_is_counted_alone(tmp_path: Path) -> None:
    def last_two(_: PreTrainedModel) -> Callable[[str], bool]:
        return lambda name: ".q_proj." in name and any(f".{layer}." in name for layer in (6, 7))

    config = config_of(write_model(tmp_path / "model"), tmp_path)
    needs = told(config, last_two)
    whole = told(config)
    trained = needs.planner.blueprint.trained
    assert trained is not None and trained.parameters == 2 * 32 * 32 and trained.lowest == 6
    assert needs.host["moments"] == 8 * trained.parameters and needs.device["adapters"] == 0
    # one layer is visited twice
    assert needs.device["boundaries"] == whole.device["boundaries"] // 7
    assert needs.host["cached"] == whole.host["cached"]


def test_operations_on_the_way_down_count_those_of_the_weights(tmp_path: Path) -> None:
    config = config_of(write_model(tmp_path / "model", **WIDE), tmp_path)
    blueprint = draw_up(config, chosen=everything)
    assert blueprint.trained is not None
    batch = MicroBatch(2, 64)
    trains, frozen = (
        measure(blueprint.model, blueprint.layers, batch, 64, names).of(0)
        for names in (blueprint.trained.names, ())
    )
    matrices = sum(one.shape.numel() for one in blueprint.layers[0].tensors if len(one.shape) > 1)
    assert trains.forward == frozen.forward
    assert trains.backward - frozen.backward == 2 * batch.tokens * matrices


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    for limit, words in (("300KB", "train adapters"), ("500KB", "train fewer weights")):
        with pytest.raises(MemoryLimitError, match="00,000 are allowed") as raised:
            told(config_of(directory, tmp_path, host_memory=limit))
        assert raised.value.where == "host_memory" and words in raised.value.how
    with pytest.raises(
        MemoryLimitError, match="bytes of device memory, and there are 100,000"
    ) as raised:
        told(config_of(directory, tmp_path, gradient_checkpointing=False), device_memory=100_000)
    for word in (
        "gradient_checkpointing: true",
        "micro_batch_size: 1",
        "without embeddings and head",
        "gradients",
    ):
        assert word in raised.value.how
    with pytest.raises(ConfigError, match="float16, which does not train"):
        told(config_of(directory, tmp_path, dtype="float16"))


@pytest.mark.slow
def test_speeds_give_seconds_and_without_them_there_are_none(tmp_path: Path) -> None:
    config = config_of(write_model(tmp_path / "model"), tmp_path)
    assert told(config).seconds is None
    told_of = told(config, site=machine_state_of(config, profile("4090")))
    assert told_of.seconds is not None and 0 < told_of.seconds < 1
    measured = told(config, site=machine_state_of(config, measured=True))
    assert measured.seconds is not None and measured.seconds > 0


@contextmanager
def trains(
    config: LemaConfig, backend: Backend | None = None
) -> Iterator[tuple[LemaModel, FullTraining]]:
    model = LemaModel(config, backend=backend)
    model.skeleton.train()
    training = FullTraining(model.adapter, config)
    try:
        yield model, training
    finally:
        training.close()
        model.close()


def stored_in(model: LemaModel, name: str) -> Tensor:
    return model.memory.stored(int(name.split(".")[2]))[name.split(".", 3)[3]]


def in_model(model: LemaModel, streamed: dict[str, Tensor], name: str, master: Tensor) -> bool:
    """Whether a master is the very memory that the model computes with."""
    weight = streamed[name] if name in streamed else model.skeleton.get_parameter(name)
    return master.data_ptr() == weight.data_ptr()
