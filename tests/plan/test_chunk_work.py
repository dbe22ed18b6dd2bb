"""What a plan tells of a step whose sequences go through layers in chunks, and what it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model as write_type
from hollowmodel import write_hollow
from meteredstep import device_bytes, second_step
from smallrun import opened, settings, write_model
from transformers import LlamaConfig, MixtralConfig

from lema import LemaConfig, LemaModel
from lema.activations.boundaries import NUM_BUFFERS
from lema.activations.chunks.copies import NUM_LEAVING, NUM_SLOTS
from lema.config.units import human_bytes
from lema.plan import Allocation, make_plan
from lema.plan.blueprint import draw_up
from lema.plan.cost import Demand, Tier
from lema.plan.machine import profile
from lema.plan.memory import device_parts, host_parts
from lema.plan.work.chunk_work import in_chunks
from lema.plan.work.step import demand_of, step_shape
from lema.plan.work.workload import measure

LENGTH = 512
CHUNK = 64


def config_of(tmp_path: Path, chunk: int | None) -> LemaConfig:
    model = tmp_path / "model"
    if not model.exists():
        write_model(
            model,
            "llama",
            dtype=torch.float32,
            hidden_size=128,
            intermediate_size=352,
            max_position_embeddings=LENGTH,
        )
    options: dict[str, Any] = {"sequence_chunk": chunk, "loss_chunk_tokens": 64}
    options |= {"batch_size": 2, "micro_batch_size": 1, "max_length": LENGTH}
    return settings(model, tmp_path, gradient_checkpointing=True, **options)


def demand_told(config: LemaConfig, *, shared: bool = True) -> Demand:
    """Return what a step needs, as it is told, with no optimizer."""
    blueprint = draw_up(config)
    shape = step_shape(config, LENGTH)
    batch = shape.micro_batch
    split = blueprint.split
    work = measure(blueprint.model, blueprint.layers, batch, 64, split=split)
    return demand_of(
        blueprint.layers,
        in_chunks(work, split, blueprint.layers, batch),
        None,
        shape,
        outside_bytes=0,
        adapter_bytes=blueprint.adapter_bytes // 4,  # gradients alone: there is no optimizer
        lowest=blueprint.lowest_adapted,
        shared=shared,
    )


def told_of(config: LemaConfig, tier: Tier = "device") -> int:
    """Return the bytes of a step beside slots, as they are told where inputs of layers wait at a
    place.
    """
    allocation = Allocation(3, saved=frozenset(), boundaries=tier)
    parts = device_parts(demand_told(config), allocation)
    return sum(size for part, size in parts.items() if part not in ("slots", "residents"))


def taken_by(config: LemaConfig) -> int:
    """Return the most bytes that are alive at once in a real step on the CPU."""
    model = LemaModel(config)
    model.initialize_lora()
    model.skeleton.train()
    ids = torch.randint(1, 290, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    tally = second_step(model, [{"input_ids": ids, "labels": ids}] * 2)
    model.close()
    return tally.peak


def test_a_step_in_chunks_takes_what_was_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, CHUNK)
    told = told_of(config)
    taken = taken_by(config)
    assert 0.95 * taken <= told <= 1.1 * taken
    assert told < 0.6 * told_of(config_of(tmp_path, None))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_with_hidden_states_in_host_memory_a_step_takes_what_was_told(
    tmp_path: Path, tier: Tier
) -> None:
    config = config_of(tmp_path, CHUNK).model_copy(update={"boundary_activations": tier})
    told = told_of(config, tier)
    model = LemaModel(config)
    model.initialize_lora()
    model.skeleton.train()
    ids = torch.randint(1, 290, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    model.adapter.loss(batches).backward()
    taken = device_bytes(model, batches)
    # in host memory are the inputs of all layers, and of one its output, of both rows
    pool = model.adapter.activations.pool
    held = sum(len(memory) for memory in pool._free)
    model.close()
    assert 0.95 * taken <= told <= 1.1 * taken
    in_host = demand_told(config).in_host
    assert in_host is not None
    assert held == in_host.host_bytes == 3 * LENGTH * 128 * 4
    assert told < told_of(config) - 3 * LENGTH * 128 * 4


def test_a_device_with_memory_of_its_own_has_a_few_chunks_there(tmp_path: Path) -> None:
    config = config_of(tmp_path, CHUNK)
    chunk = CHUNK * 128 * 4
    here, there = (demand_told(config, shared=shared) for shared in (True, False))
    for tier in ("host", "disk"):
        allocation = Allocation(3, saved=frozenset(), boundaries=tier)
        # of hidden states, gradients and results, and of inputs that come back
        copied = (2 * NUM_SLOTS + NUM_LEAVING) * chunk
        parts = device_parts(there, allocation)
        # there the generator has no states of kilobytes beside boundaries
        generator = 2 * len(there.keeping) * torch.get_rng_state().nbytes
        assert parts["flight"] == device_parts(here, allocation)["flight"] - generator + copied
        assert parts["boundaries"] == NUM_BUFFERS * chunk
        assert device_parts(here, allocation)["boundaries"] == 0
        rows = 3 * LENGTH * 128 * 4
        waiting = 2 * LENGTH * 128 * 4 * len(there.keeping)
        on_the_way = waiting if tier == "host" else NUM_BUFFERS * chunk
        assert host_parts(there, allocation)["boundaries"] == rows + on_the_way


def test_what_is_no_longer_than_a_chunk_costs_what_it_cost(tmp_path: Path) -> None:
    assert told_of(config_of(tmp_path, LENGTH)) == told_of(config_of(tmp_path, None))


@pytest.mark.parametrize("limit", ["auto", "2GB"])
def test_a_limit_of_memory_finds_room_for_rows_in_chunks(tmp_path: Path, limit: str) -> None:
    config = config_of(tmp_path, CHUNK).model_copy(update={"device_memory": limit})
    model = LemaModel(config)
    model.initialize_lora()
    assert model.allocation.recompute
    model.close()


def test_where_only_groups_of_experts_fit_rows_go_in_chunks_through_groups(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"intermediate_size": 512, "num_local_experts": 16, "num_key_value_heads": 4}
    shape = MixtralConfig(vocab_size=96, max_position_embeddings=LENGTH, **sizes | experts)
    model = write_type(shape, tmp_path / "model")
    options: dict[str, Any] = {"loss_chunk_tokens": 64}
    options |= {"batch_size": 1, "max_length": 128, "lora_target_parameters": []}
    ids = torch.arange(1, 91).repeat(2)[None, :128]
    losses = []
    for limit in ("12MB", None):
        changes = options | {"device_memory": limit, "sequence_chunk": CHUNK}
        with opened(settings(model, tmp_path, **changes)) as run:
            assert bool(run.memory.groups) == (limit is not None)
            losses.append(run.adapter.loss([{"input_ids": ids, "labels": ids}]).item())
    in_groups, whole_layers = losses
    assert in_groups == pytest.approx(whole_layers, rel=1e-6)


def notes_of(directory: Path, **changes: Any) -> str:
    settings = {"max_length": 4096, "micro_batch_size": 2, "batch_size": 2} | changes
    plan, _ = make_plan(LemaConfig(str(directory), device="cpu", **settings), profile("4090"))
    return "\n".join(plan.notes)


def test_a_plan_says_that_rows_go_in_chunks_and_what_a_layer_keeps_of_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    shape = LlamaConfig(vocab_size=96, max_position_embeddings=4096, **sizes | heads)
    shape.dtype = torch.bfloat16
    model = write_hollow(tmp_path / "model", shape)
    kept = human_bytes(2 * 2 * 32 * 2 * 4096)
    said = "sequence_chunk: a row of 4,096 tokens goes through each layer in 5 chunks of 1,000; "
    assert f"{said}one layer keeps at most {kept} of keys and values of it" in notes_of(
        model, sequence_chunk=1000
    )
    none_is_cut = "sequence_chunk: no row has more than 4,096 tokens, so none is cut"
    assert none_is_cut in notes_of(model, sequence_chunk=4096)
    assert "sequence_chunk" not in notes_of(model)
