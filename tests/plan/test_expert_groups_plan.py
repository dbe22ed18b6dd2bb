"""Experts that are leased in groups take of device memory what the plan says, however many
micro-batches wait.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from meteredstep import second_step
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from lema import LemaConfig, LemaModel
from lema.plan import Allocation
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.groups import with_waiting
from lema.plan.machine import PROFILES
from lema.plan.memory import device_parts
from lema.plan.planner import planner_of
from lema.plan.work.step import StepShape, demand_of, step_shape
from lema.plan.work.workload import Workload, measure
from lema_tools.models.checkpoints import named
from lema_tools.models.published import write_hollow

pytestmark = pytest.mark.filterwarnings(
    "ignore:PEFT does not adapt these linear modules",
    "ignore:.*_pattern keys",
    "ignore:.*is_gradient_checkpointing.*",
)
LENGTH = 48
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=8, moe_intermediate_size=32),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **LATENT,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
}


def config_of(directory: Path, **changes: Any) -> LemaConfig:
    """Return the settings of a step of four micro-batches of two rows."""
    shape = {
        "batch_size": 8,
        "micro_batch_size": 2,
        "max_length": LENGTH,
        "loss_chunk_tokens": 64,
        "lora_rank": 2,
    }
    settings = shape | {
        "gradient_checkpointing": True,
        "save_steps": 0,
        "device": "cpu",
        "device_memory": None,
    }
    return LemaConfig(str(directory), **settings | changes)


def all_alike(directory: Path) -> Path:
    """Have a model's routers give all tokens the same experts, for which a plan has to have room
    in one group.
    """
    weights = load_file(directory / "model.safetensors")
    for name, one in weights.items():
        if name.endswith(".gate.weight"):
            one.zero_()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def taken(config: LemaConfig, *, again: bool) -> int:
    """Take a real step; return the bytes of tensors that were alive at once beside weights and
    adapters.
    """
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        model.skeleton.train()
        model.spend(replace(model.allocation, runs_again=again))
        ids = torch.randint(1, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": ids}
        tally = second_step(model, [batch] * 4)
        assert [*model.memory.groups] and model.adapter.engine.runs_again == again
    return tally.peak


def told(drawn: Blueprint, shape: StepShape, work: Workload, *, again: bool) -> int:
    """Return what the plan counts of such a step, beside slots and what an optimizer has."""
    demand = demand_of(
        drawn.layers,
        with_waiting(replace(drawn, runs_again=again), shape.micro_batch, work),
        None,
        shape,
        outside_bytes=0,
        adapter_bytes=drawn.adapter_bytes
        // 4,  # there is no optimizer: gradients alone are made in the step
        lowest=drawn.lowest_adapted,
        shared=True,
        groups=drawn.group_bytes,
    )
    parts = device_parts(demand, Allocation(2, experts=4, runs_again=again))
    return sum(size for part, size in parts.items() if part not in ("slots", "residents"))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_real_step_takes_what_was_told(kind: str, adapted: bool, tmp_path: Path) -> None:
    """Not more, and within 5%; within 17% if what comes before the experts is run twice, which takes
    less. With adapted experts 11% more than that, because their gradients count, and are not there
    yet at the top layer, where most waits."""
    directory = all_alike(write_model(CONFIGS[kind], tmp_path))
    experts = {} if adapted else {"lora_target_parameters": []}
    config = config_of(directory, experts_per_slot=4, **experts)
    drawn = draw_up(config)
    shape = step_shape(config, 128)
    assert drawn.cut_experts is not None
    drawn = replace(drawn, parts=drawn.cut_experts(4))
    work = measure(drawn.model, drawn.layers, shape.micro_batch, 64)
    most = (1.12, 1.28) if adapted else (1.05, 1.17)
    real = [taken(config, again=again) for again in (False, True)]
    said = [told(drawn, shape, work, again=again) for again in (False, True)]
    for taken_bytes, told_bytes, factor in zip(real, said, most, strict=True):
        assert taken_bytes <= told_bytes <= factor * taken_bytes, (real, said)
    assert real[1] < 0.8 * real[0]


@pytest.mark.slow
def test_deepseek_v3_in_bf16_trains_16k_tokens_a_step_in_16_gb(tmp_path: Path) -> None:
    """Of which one layer alone is 22.5 GB, and keeps 1.1 GB of each 1,024 tokens without its
    experts.
    """
    checkpoint = named("DeepSeek-V3")
    size = 16 * 10**9
    assert checkpoint is not None
    directory = write_hollow(replace(checkpoint, form="bf16"), tmp_path)
    limits = {"device_memory": "16GB", "host_memory": "200GB", "lora_target_parameters": []}
    config = config_of(
        directory, batch_size=16, micro_batch_size=1, max_length=1024, **limits | {"lora_rank": 16}
    )
    machine = replace(PROFILES["4090"], device_memory=size, host_memory=2 * 10**12)
    needs = planner_of(config, machine).needs()
    assert sum(needs.device.values()) <= size
    assert needs.allocation.runs_again and needs.allocation.experts >= 32
    assert needs.device["working"] < size / 4
