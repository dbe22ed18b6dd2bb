"""What a step needs is told from shapes alone: it is what a real step takes, and no byte of a
weight is read for it.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cases, covering
from hollowmodel import large_config, write_hollow
from meteredstep import second_step
from smallrun import settings, write_model
from transformers import LlamaConfig, MixtralConfig

from lema import LemaConfig, LemaModel
from lema.backend import load
from lema.convert.prepare import prepare
from lema.engine.head import cut
from lema.engine.head.pieces import piece_passes
from lema.errors import ConfigError, MemoryLimitError, ModelError
from lema.model import Split
from lema.model.capture import tensors_in
from lema.plan import Allocation
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Demand
from lema.plan.memory import device_parts
from lema.plan.planner import fitted_planner, machine_state_of, planner_of
from lema.plan.work.meter import Tally, without_values
from lema.plan.work.step import StepShape, demand_of, step_shape
from lema.plan.work.workload import (
    MicroBatch,
    Workload,
    _Chunks,
    _Leases,
    fake_weights,
    learn,
    measure,
)
from lema.stream.reader import LayerReader

LENGTH = 96
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 352},
    "mistral": {"hidden_size": 128, "intermediate_size": 352},
    "gpt2": {"n_embd": 128},
}


def work_of(blueprint: Blueprint, rows: int = 1, length: int = 64) -> Workload:
    return measure(blueprint.model, blueprint.layers, MicroBatch(rows, length), 64)


def hollow(
    tmp_path: Path, config: Any, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Blueprint:
    directory = write_hollow(tmp_path / "model", config, dtype)
    return draw_up(LemaConfig(str(directory), device="cpu", **changes))


STEPS: dict[str, tuple[Any, ...]] = {
    # packed or not
    "model": (
        *((name, False) for name in WIDE),
        ("llama", True),
        ("mistral", True),
    ),
    "dtype": (torch.float32, torch.bfloat16),
    "recompute": (True, False),
}
PAIRS = covering(STEPS, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packing", "dtype", "recompute"),
    [
        pytest.param(*case["model"], case["dtype"], case["recompute"], marks=marks)
        for case in cases(STEPS)
        for marks in [[] if case in PAIRS else pytest.mark.exhaustive]
    ],
)
def test_a_real_step_takes_what_was_told(
    tmp_path: Path, name: str, packing: bool, dtype: torch.dtype, recompute: bool
) -> None:
    """Bytes of tensors alive at once in a real step on the CPU: within 10% of those told, and not
    3% more. Operations: those told, of which what is recomputed is a part.
    """
    config = settings(
        write_model(tmp_path / "model", name, dtype=dtype, **WIDE[name]),
        tmp_path,
        batch_size=6,
        micro_batch_size=2,
        max_length=LENGTH,
        packing=packing,
        gradient_checkpointing=recompute,
        loss_chunk_tokens=64,
    )
    real, flops = peak_and_flops_of_a_step(config)
    told, blueprint, workload, demand = told_of(config, recompute=recompute)
    assert 0.97 * real <= told <= 1.1 * real
    work = workload.of(0)
    again = len(demand.visited_twice) * recompute
    layers = len(blueprint.layers) * (work.forward + work.backward) + again * work.recompute
    expected = 3 * (layers + workload.head.flops)
    assert 0.98 * expected <= flops <= expected  # nothing below the lowest layer wants a gradient
    # the last matrix product reaches nothing that is wanted
    assert work.recompute < 0.9 * work.forward


def told_of(config: LemaConfig, *, recompute: bool) -> tuple[int, Blueprint, Workload, Demand]:
    """Return the bytes of a step beside slots, as they are told, and what they follow from."""
    blueprint = draw_up(config)
    shape = step_shape(config, 128)
    workload = measure(
        blueprint.model,
        blueprint.layers,
        shape.micro_batch,
        config.loss_chunk_tokens,
        split=blueprint.split,
    )
    demand = demand_of(
        blueprint.layers,
        workload,
        None,
        shape,
        outside_bytes=0,
        adapter_bytes=blueprint.adapter_bytes
        // 4,  # there is no optimizer: gradients alone are made in the step
        lowest=blueprint.lowest_adapted,
        shared=True,
    )
    saved = frozenset[int]() if recompute else frozenset(demand.visited_twice)
    parts = device_parts(demand, Allocation(3, saved=saved))
    told = sum(size for part, size in parts.items() if part not in ("slots", "residents"))
    return told, blueprint, workload, demand


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_a_step_under_autocast_takes_what_was_told(tmp_path: Path, recompute: bool) -> None:
    config = settings(
        write_model(tmp_path / "model", dtype=torch.float32, **WIDE["llama"]),
        tmp_path,
        batch_size=6,
        micro_batch_size=2,
        max_length=LENGTH,
        gradient_checkpointing=recompute,
        loss_chunk_tokens=64,
        autocast="bfloat16",
    )
    real, _ = peak_and_flops_of_a_step(config)
    assert 0.97 * real <= told_of(config, recompute=recompute)[0] <= 1.1 * real


def peak_and_flops_of_a_step(config: LemaConfig) -> tuple[int, int]:
    model = LemaModel(config)
    model.initialize_lora()
    model.skeleton.train()
    ids = torch.randint(1, 290, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    seen = (
        {"position_ids": torch.arange(LENGTH).remainder(20).expand(2, -1)} if config.packing else {}
    )
    batch = {"input_ids": ids, "labels": ids, **(seen or {"attention_mask": mask})}
    tally = second_step(model, [batch] * 3)
    model.close()
    return tally.peak, tally.flops


@pytest.mark.slow
def test_operations_are_those_of_the_matrices_and_of_attention(tmp_path: Path) -> None:
    config = large_config("8B")
    blueprint = hollow(
        tmp_path, config, lora_target_modules=["q_proj"], lora_rank=1, gradient_checkpointing=True
    )
    work = work_of(blueprint, rows=2, length=256).of(0)
    tokens = 512
    matrices = sum(
        tensor.shape.numel() for tensor in blueprint.layers[0].tensors if len(tensor.shape) > 1
    )
    # scores, and values weighted by them; no mask makes it less
    attention = 4 * 256 * config.hidden_size
    assert work.forward == pytest.approx(2 * tokens * matrices + tokens * attention, rel=0.001)
    assert work.backward == pytest.approx(
        2 * tokens * matrices + 2.5 * tokens * attention, rel=0.001
    )
    assert (
        work_of(blueprint, rows=2, length=256).head.flops
        == 4 * tokens * config.hidden_size * config.vocab_size
    )


@pytest.mark.slow
def test_of_experts_only_those_that_are_active_count(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MixtralConfig(
        **sizes, num_key_value_heads=4, vocab_size=96, num_local_experts=8, num_experts_per_tok=2
    )
    for dtype in (torch.bfloat16, torch.float32):
        directory = write_hollow(tmp_path / str(dtype), config, dtype)
        blueprint = draw_up(
            LemaConfig(str(directory), device="cpu", lora_target_modules=["q_proj"], lora_rank=1)
        )
        work = work_of(blueprint, length=32).of(0)
        tokens = 32
        expert = 3 * 64 * 128
        attention = 4 * 64 * 64
        expected = 2 * tokens * (2 * expert + attention + 8 * 64) + tokens * 4 * 32 * 64
        assert work.forward == pytest.approx(expected, rel=0.02)
        stacked = 8 * expert * dtype.itemsize  # a view of the weights is no memory
        assert work.saved_bytes < stacked


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8B", "70B", "405B"])
def test_large_models_are_told_from_headers(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LayerReader, "submit", read)
    blueprint = hollow(tmp_path, large_config(size))
    before = bytes_read_by_this_process()
    work = work_of(draw_up(LemaConfig(str(tmp_path / "model"), device="cpu")), length=1024)
    assert bytes_read_by_this_process() - before < 10e6 < blueprint.stored_bytes / 1000
    assert blueprint.stored_bytes == pytest.approx(
        {"8B": 16.1e9, "70B": 141e9, "405B": 812e9}[size], rel=0.01
    )
    hidden = large_config(size).hidden_size
    assert work.kinds == (0,) * large_config(size).num_hidden_layers
    assert work.hidden_bytes == 1024 * hidden * 2
    assert 0 < work.works[0].saved_bytes < work.works[0].working_bytes


def bytes_read_by_this_process() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.slow
def test_layers_of_other_kinds_are_told_apart(tmp_path: Path) -> None:
    plain = work_of(hollow(tmp_path / "all", large_config("8B")))
    some = work_of(hollow(tmp_path / "some", large_config("8B"), lora_layers_to_transform=[30, 31]))
    assert set(plain.kinds) == {0}
    assert some.kinds == (0,) * 30 + (1, 1)
    assert some.works[0].saved_bytes < some.works[1].saved_bytes


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    blueprint = draw_up(settings(write_model(tmp_path / "model"), tmp_path))
    before = {name: id(parameter) for name, parameter in blueprint.model.named_parameters()}
    training = blueprint.model.training
    work_of(blueprint)
    assert {name: id(parameter) for name, parameter in blueprint.model.named_parameters()} == before
    assert blueprint.model.training == training


def test_a_step_is_cut_as_the_settings_say(tmp_path: Path) -> None:
    config = LemaConfig(
        "m", batch_size=6, micro_batch_size=2, gradient_accumulation_steps=4, max_length=100
    )
    shape = step_shape(config, 128)
    assert shape == StepShape(MicroBatch(2, 100), 24)
    assert (shape.tokens, shape.num_micro_batches) == (2400, 12)
    assert step_shape(LemaConfig("m"), None).micro_batch == MicroBatch(8, 1024)
    assert step_shape(LemaConfig("m"), 64).micro_batch.length == 64
    with pytest.raises(ConfigError, match="64 positions"):
        step_shape(LemaConfig("m", max_length=65), 64)


def test_what_depends_on_values_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blueprint = draw_up(settings(write_model(tmp_path / "model"), tmp_path))
    layer = blueprint.model.get_decoder().layers[0]
    forward = type(layer.mlp).forward

    def looks(self: Any, states: torch.Tensor) -> torch.Tensor:
        return forward(self, states) if float(states.sum()) > 0 else states

    monkeypatch.setattr(type(layer.mlp), "forward", looks)
    with pytest.raises(ModelError, match="depends on values"):
        work_of(blueprint)


# Allocation


def allocation_of(model: LemaModel, shape: StepShape | None = None) -> Allocation:
    planner = model.opened if shape is None else replace(model.opened, shape=shape)
    return fitted_planner(planner, trains=shape is not None).needs().allocation


def test_without_limits_an_allocation_is_what_streaming_needs(tmp_path: Path) -> None:
    model = LemaModel(settings(write_model(tmp_path / "model"), tmp_path))
    model.initialize_lora()
    assert allocation_of(model) == Allocation(3)
    model.close()


def test_what_the_control_group_leaves_is_the_limit_of_plan_and_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(write_model(tmp_path / "model"), tmp_path, strategy="resident")
    monkeypatch.setattr("lema.backend.hostmemory.memory_left", lambda: 4096)
    assert machine_state_of(config).host_available == 4096
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        with pytest.raises(
            MemoryLimitError, match=r"bytes of host memory are needed .* 0 are allowed"
        ) as training:
            allocation_of(model)
    with pytest.raises(
        MemoryLimitError, match=r"bytes of host memory are needed .* 0 are allowed"
    ) as plan:
        planner_of(config).needs()
    for caught in (training, plan):
        assert str(caught.value.where).startswith("memory available on this machine, 4.1 kB, less ")


@pytest.mark.slow
def test_activations_count_towards_the_limit_where_the_step_is_given(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    config = settings(directory, tmp_path, device_memory="1300KB", max_length=64)
    model = LemaModel(config)
    model.initialize_lora()
    weights = allocation_of(model)
    whole = allocation_of(model, StepShape(MicroBatch(1, 64), 4))
    assert len(whole.residents) < len(weights.residents)
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "resident"},
        {"gradient_checkpointing": False},
        {"host_memory": "200KB"},
        {"gradient_checkpointing": False, "device_memory": "2500KB"},
    ],
    ids=str,
)
def test_a_run_spends_memory_as_its_plan_said(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Where bytes decide; where speeds do, both measure, and what is measured varies."""
    config = settings(
        write_model(tmp_path / "model"), tmp_path, batch_size=1, max_length=16, **changes
    )
    planner = planner_of(config)
    planned = planner.allocation(planner.demand())
    model = LemaModel(config)
    model.initialize_lora()
    assert model.allocation == planned
    if "host_memory" in changes:
        assert 0 < len(planned.host_cached) < len(planner.blueprint.layers)
    if "device_memory" in changes:
        assert planned.residents
    model.close()


@pytest.mark.slow
def test_what_is_stored_quantised_is_counted_small_where_it_waits_and_large_once(
    tmp_path: Path,
) -> None:
    plain = write_model(
        tmp_path / "model", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256
    )
    prepare(plain, tmp_path / "int8", quantize="int8")
    whole, small = (
        planner_of(settings(path, tmp_path, max_length=16)) for path in (plain, tmp_path / "int8")
    )
    before = whole.demand()
    after = small.demand()
    assert before.expanded_bytes == 0 and all(layer.expand == 0 for layer in before.layers)
    assert (
        after.expanded_bytes
        == small.blueprint.layers[0].expanded_bytes
        > after.layers[0].slot_bytes
    )
    assert after.layers[0].read_bytes < 0.7 * before.layers[0].read_bytes
    assert all(layer.expand > 0 for layer in after.layers)
    assert after.working_bytes == pytest.approx(before.working_bytes, rel=0.05)
    step = small.simulated(after, Allocation(3))
    assert step.device_peak == sum(device_parts(after, Allocation(3)).values())


def test_three_pieces_of_the_head_tell_what_all_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "LEAST_BYTES", 0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 3000,
    }
    drawn = hollow(
        tmp_path,
        LlamaConfig(num_hidden_layers=8, **sizes),
        torch.float32,
        head="stream",
        lora_rank=4,
    )
    told = measure(drawn.model, drawn.layers, MicroBatch(2, 12), 8, head=drawn.head).pieces
    split = Split(drawn.model, load("cpu"))
    with without_values(drawn.model):
        learn(split, drawn.layers)
        pieced = drawn.head.pieced(split, load("cpu"), drawn.layers)
        hidden = torch.empty(2, 12, 32)
        assert pieced is not None and len(pieced.spans) > 4
        weights = dict(enumerate(map(fake_weights, drawn.head.pieces(drawn.layers)), 8))
        chunks: Any = _Chunks((2, 12), 8)
        with Tally() as tally:
            tally.leave_out(
                [hidden, *drawn.model.parameters(), *drawn.model.buffers(), *tensors_in(weights)]
            )
            piece_passes(pieced, _Leases(weights).lease, chunks, [hidden], differentiate=True)
    assert told is not None and tally.peak == told.working_bytes
