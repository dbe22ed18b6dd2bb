"""A model's own plan as layouts: what its modules compute on their shards adds up to what they
compute whole.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from tinyconfig import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from lema.backend.layout import Layout, column, embedding, kv, query, replicated, row, shard
from lema.errors import ConfigError, ModelError
from lema.model import meta_model
from lema.model.partition import layout_at, layouts_of

TOKENS = 7


def whole_model(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def blocks(model: nn.Module, layouts: dict[str, Layout]) -> list[str]:
    """Modules whose own projections are cut and whose output is a sum over ranks."""

    def has(owner: nn.Module, name: str, dim: int) -> bool:
        found = []
        for child, module in owner.named_children():
            if isinstance(module, nn.Linear):
                try:
                    layout = layout_at(f"{name}.{child}", layouts)
                except ModelError:
                    return False
                found.append(layout.kind != "replicated" and layout.dim == dim)
        return any(found)

    return [
        name
        for name, module in model.named_modules()
        if has(module, name, 0) and has(module, name, 1)
    ]


def of_rank(block: nn.Module, name: str, layouts: dict[str, Layout], rank: int) -> nn.Module:
    local = deepcopy(block)
    for child, module in local.named_children():
        if isinstance(module, nn.Linear):
            layout = layout_at(f"{name}.{child}", layouts)
            module.weight = nn.Parameter(shard(module.weight.data, layout, rank))
            if module.bias is not None:
                along = (
                    shard(module.bias.data, layout, rank)
                    if layout.dim == 0
                    else module.bias.data * (rank == 0)
                )
                module.bias = nn.Parameter(along)
    if hasattr(local, "num_key_value_groups"):
        after = next(x for x in layouts.values() if x.kind == "query")
        local.num_key_value_groups = after.heads // after.kv_heads // after.kv_multiplier
    return local


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# Grouped heads; norms of heads; biases; projections fused by heads; a gate within the queries;
# compressed keys.
TYPES = [
    "cohere",
    "deepseek_v2",
    "gemma2",
    "gpt_neox",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "phi",
    "qwen3",
    "qwen3_next",
    "starcoder2",
]


@pytest.mark.covered
@pytest.mark.sampled(10)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("tp", "kv_layout"), [(2, "tile"), (4, "tile"), (4, "interleave")])
def test_shards_compute_what_the_model_does(model_type: str, tp: int, kv_layout: str) -> None:
    model = whole_model(tiny_config(model_type))
    layouts = layouts_of(model, tp, kv_layout)  # type: ignore[arg-type]
    names = blocks(model, layouts)
    seen = {}

    def record(name: str) -> Any:
        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # some models go on to change it in place
            seen[name] = (args, kwargs, first(output).clone())

        return keep

    for name in names:
        model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=False)
        for name in names:
            model.get_submodule(name)._forward_hooks.clear()
            args, kwargs, whole = seen[name]
            parts = [
                of_rank(model.get_submodule(name), name, layouts, r)(*args, **kwargs)
                for r in range(tp)
            ]
            torch.testing.assert_close(
                sum(first(part) for part in parts), whole, rtol=1e-4, atol=1e-4
            )
    assert names


def small(**sizes: Any) -> PreTrainedConfig:
    given = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        **sizes,
    }
    return LlamaConfig(**given)


def test_what_the_layouts_are() -> None:
    layer = "model.layers.*"
    attention = {"heads": 8, "kv_heads": 2, "kv_layout": "interleave"}
    assert layouts_of(meta_model(small()), 4, "interleave") == {
        "model.embed_tokens": embedding(4, 50),
        f"{layer}.self_attn.q_proj": query(4, **attention),  # type: ignore[arg-type]
        f"{layer}.self_attn.k_proj": kv(4, **attention),  # type: ignore[arg-type]
        f"{layer}.self_attn.v_proj": kv(4, **attention),  # type: ignore[arg-type]
        f"{layer}.self_attn.o_proj": query(4, **attention, dim=1),  # type: ignore[arg-type]
        f"{layer}.mlp.gate_proj": column(4),
        f"{layer}.mlp.up_proj": column(4),
        f"{layer}.mlp.down_proj": row(4),
        "lm_head": column(4, 50),
    }
    assert (
        layouts_of(meta_model(small()), 4, kv_multiplier=4)[
            f"{layer}.self_attn.k_proj"
        ].kv_multiplier
        == 4
    )


def test_a_module_is_found_by_its_name_or_its_pattern_or_refused() -> None:
    cut = {"layers.*.q": column(2), "layers.1.q": row(2)}
    assert layout_at("layers.0.q", cut) == column(2)
    assert layout_at("layers.1.q", cut) == row(2)
    with pytest.raises(ModelError, match=r"layers\.0\.k"):
        layout_at("layers.0.k", cut)


def test_what_is_replicated_in_the_plan_is_whole() -> None:
    layouts = layouts_of(meta_model(tiny_config("deepseek_v2")), 2)
    assert layout_at("model.layers.0.self_attn.kv_a_proj_with_mqa", layouts) == replicated(2)


def test_layers_that_are_not_alike_keep_their_names() -> None:
    """A type whose layers have different numbers of heads, by turns."""
    layouts = layouts_of(meta_model(tiny_config("mimo_v2_flash")), 2)
    assert any(part.isdigit() for name in layouts for part in name.split("."))


@pytest.mark.parametrize(
    ("sizes", "tp", "said"),
    [
        (
            {},
            3,
            (
                "model.layers.0.self_attn.q_proj: 8 query heads and 2 of keys and values "
                "replicated 3 times"
            ),
        ),
        (
            {"intermediate_size": 63},
            2,
            "model.layers.0.mlp.gate_proj: an axis of 63 cannot be divided evenly",
        ),
    ],
)
def test_a_module_that_cannot_be_divided_is_named(
    sizes: dict[str, int], tp: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        layouts_of(meta_model(small(**sizes)), tp)
    assert said in caught.value.what
    assert "use a tp of 1, " in caught.value.how


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ModelError, match="no tensor-parallel plan"):
        layouts_of(meta_model(tiny_config("gpt2")), 2)
