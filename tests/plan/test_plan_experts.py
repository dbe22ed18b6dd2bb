"""What a step of a mixture of experts needs is told from shapes alone: it is what a real step
takes.

PYTHONPATH=tests/support python tests/plan/test_plan_experts.py     # prints what is told and what is taken
"""

import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from everytype import write_model
from meteredstep import second_step
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from lema import LemaConfig, LemaModel
from lema.model.experts import layer_experts
from lema.plan import make_plan
from lema.plan.machine import profile
from lema.plan.memory import device_parts
from lema.plan.planner import planner_of

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 2
LENGTH = 128
TIMES = 3
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}
FEW = {"num_experts_per_tok": 3, "intermediate_size": 256}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **FEW, head_dim=32, num_experts=12, moe_intermediate_size=96
    ),
    "mixtral": MixtralConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=2, intermediate_size=192
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **FEW,
        **LATENT,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        **FEW,
        head_dim=32,
        n_routed_experts=12,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=96,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=96,
        rope_scaling=None,
    ),
}


CASES = [(None, True), (3, True), (3, False)]  # experts of a group, whether all tokens choose alike


@pytest.mark.parametrize(
    ("kind", "experts", "alike"),
    [
        pytest.param(
            kind,
            experts,
            alike,
            marks=[] if experts and kind in ("mixtral", "glm4_moe") else pytest.mark.slow,
        )
        for kind in CONFIGS
        for experts, alike in CASES
    ],
)
def test_a_real_step_takes_what_was_told(
    kind: str, experts: int | None, alike: bool, tmp_path: Path
) -> None:
    """Bytes of tensors alive at once in a real step on the CPU, adapters on experts: those told or
    up to 5% fewer, whether routers give all tokens the same experts of a group or choose as random
    weights do. Of whole layers all tokens choose the same, because that takes most."""
    told, real = measured(CONFIGS[kind], tmp_path, experts, worst=alike)
    assert (1 if experts else 0.97) * real <= told <= 1.05 * real


def to_the_first(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give every token to the first experts; a group of them is given one for each of its rows."""
    hidden, chosen, *others = given
    count = chosen.shape[-1]
    return (
        hidden,
        torch.arange(count).expand_as(chosen).contiguous() if count > 1 else chosen,
        *others,
    )


def measured(
    config: PreTrainedConfig, directory: Path, experts: int | None, *, worst: bool = True
) -> tuple[int, int]:
    """Return the bytes that are told of a step of three micro-batches beside slots, and those
    that it takes.
    """
    settings: dict[str, Any] = {
        "batch_size": ROWS * TIMES,
        "micro_batch_size": ROWS,
        "max_length": LENGTH,
    }
    changes = {
        "gradient_checkpointing": True,
        "loss_chunk_tokens": 64,
        "experts_per_slot": experts,
        "lora_rank": 4,
    }
    given = LemaConfig(
        str(write_model(config, directory)), device="cpu", device_memory=None, **settings, **changes
    )
    planner = planner_of(given, profile("cpu"))
    needs = planner.needs()
    assert needs.allocation.experts == (experts or 0)
    parts = device_parts(needs.demand, needs.allocation)
    away = sum(parts[part] for part in ("slots", "residents", "outside"))
    # There is no optimizer: of what trains its gradients alone are made in the step.
    told = sum(parts.values()) - away - parts["adapters"] * 3 // 4
    ids = torch.randint(3, 300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    with closing(LemaModel(given)) as model:
        model.initialize_lora()
        model.skeleton.train()
        for layer in model.split.layers:
            if worst and (found := layer_experts(layer)) is not None:
                found.module.register_forward_pre_hook(to_the_first)
        return told, second_step(model, [batch] * TIMES).peak


def test_layers_in_groups_have_seconds_where_this_machine_is_planned_for(tmp_path: Path) -> None:
    """Estimated, and said to be: more for more tokens, and no layer is run for them."""
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    settings: dict[str, Any] = {
        "gradient_checkpointing": True,
        "experts_per_slot": 3,
        "micro_batch_size": 1,
    }
    found = list[float]()
    for length in (16, 4096):
        config = LemaConfig(
            str(directory),
            device="cpu",
            device_memory=None,
            batch_size=1,
            max_length=length,
            **settings,
        )
        plan, planner = make_plan(config)
        assert plan.measured and planner.timings is not None
        assert any("seconds are estimated from products" in note for note in plan.notes)
        (layer,) = planner.timings.layers
        assert 0 < layer.forward < layer.forward + layer.recompute < planner.needs().seconds
        found.append(layer.forward + layer.backward)
    assert found[1] > 4 * found[0]


if __name__ == "__main__":
    for name, given in CONFIGS.items():
        for size, most in CASES:
            with TemporaryDirectory() as scratch:
                planned, taken = measured(given, Path(scratch), size, worst=most)
            how = f"groups of {size}" if size else "whole layers"
            chosen = "the same experts for all" if most else "as routers choose"
            row = f"| {planned / 1e6:.2f} | {taken / 1e6:.2f} | {planned / taken - 1:+.1%} |"
            sys.stdout.write(f"| {name} | {how} | {chosen} {row}\n")
