"""What is adapted by default: every linear of the layers, no router, nothing outside, by names
PEFT reads as we do.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import STREAMED, micro_batches, write_model
from libraryversions import installed, is_constrained
from parity import SEED, assert_same, draw_b, streamed_step, whole_step
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from smallrun import adapter_of, opened
from smallrun import settings as run_settings
from smallrun import write_model as write_llama
from tinyconfig import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, DogeConfig, LlamaConfig, PreTrainedModel

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.lora import inject_lora_params
from lema.lora.attach import configured_lora
from lema.lora.targets import (
    default_targets,
    linear_modules,
    peft_targets,
    router_modules,
    warn_of_left_out,
)
from lema.model import meta_model
from lema.model.skeleton import find_layers
from lema_cpu import CpuBackend

LLAMA = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]

# Model type -> the linears of its routers, by the last part of their names.
ROUTERS = {
    "afmoe": {"gate"},
    "dbrx": {"layer"},
    "hunyuan_v1_moe": {"wg"},
    "jetmoe": {"layer"},
    "llama4_text": {"router"},
    "longcat_flash": {"classifier"},
    "phimoe": {"router"},
    "zaya": {"down_proj", "fc1", "fc2", "out_proj"},
}

# Linears that PEFT refuses, or takes for the weights of experts.
LEFT_OUT = {
    "mamba": {"out_proj"},
    "deepseek_v3": {"down_proj", "gate_proj", "up_proj"},
}

HINDERED = {
    "lora_dropout": 0.1,
    "lora_use_dora": True,
    "lora_lora_bias": True,
    "lora_init": "orthogonal",
    "torch_compile": True,
    "lora_target_parameters": [],
    "lora_exclude_modules": ["experts"],
    "lora_target_modules": ["q_proj"],
}


@contextmanager
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def skeleton(model_type: str) -> PreTrainedModel:
    with unwarned():
        return meta_model(tiny_config(model_type), torch.float32)


def default_adapter(model: PreTrainedModel, **settings: Any) -> LoraConfig:
    return configured_lora(model, LemaConfig("-", lora_rank=2, **settings))


def adapted(model: PreTrainedModel) -> set[str]:
    """Attach PEFT's modules as the defaults say, and name those that were adapted, but for
    weights of experts.
    """
    with unwarned():
        inject_lora_params(model, default_adapter(model), torch.device("cpu"), seed=None)
    found = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name for name in found if not isinstance(model.get_submodule(name), ParamWrapper)}


def test_names_stay_as_short_as_they_can_be() -> None:
    assert default_targets(skeleton("llama")) == LLAMA
    assert default_targets(skeleton("gpt2")) == ["c_attn", "c_fc", "c_proj"]
    # not "0" and "2"
    assert default_targets(skeleton("ctrl")) == [
        "Wk",
        "Wq",
        "Wv",
        "dense",
        "ffn.0",
        "ffn.2",
    ]


def test_a_name_that_the_head_has_too_is_told_from_it() -> None:
    model = skeleton("bert")
    assert default_targets(model) == ["intermediate.dense", "key", "output.dense", "query", "value"]
    assert "cls.predictions.transform.dense" in {name for name, _ in model.named_modules()}
    layers_name, _ = find_layers(model)
    assert all(name.startswith(f"{layers_name}.") for name in adapted(model))


@pytest.mark.parametrize("model_type", ROUTERS)
def test_routers_are_left_out(model_type: str) -> None:
    model = skeleton(model_type)
    if model_type == "hunyuan_v1_moe" and not is_constrained("transformers"):
        recorded = [
            part.can_record_outputs for part in model.modules() if isinstance(part, PreTrainedModel)
        ]
        if not any("router_logits" in outputs for outputs in recorded):
            pytest.skip(
                f"transformers {installed('transformers')} does not record the router of this type"
            )
    routers = router_modules(model)
    found = [
        name
        for name, module in model.named_modules()
        if name in routers and isinstance(module, nn.Linear)
    ]
    assert {name.rpartition(".")[2] for name in found} == ROUTERS[model_type]
    assert not adapted(model) & routers


def test_a_block_that_hands_on_its_routers_logits_is_no_router() -> None:
    config = DogeConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        is_moe=True,
    )
    model = meta_model(config, torch.float32)
    routers = {name for name in linear_modules(model) if name in router_modules(model)}
    assert {name.rpartition(".")[2] for name in routers} == {"router_gate"}
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"} <= adapted(model)


class Mixture(nn.Module):
    """A mixture of experts as published code writes it: nothing in it is called a router."""

    def __init__(self, size: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, num_experts)
        self.shared_expert_gate = nn.Linear(size, 1)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(num_experts))
        self.squeeze = nn.Linear(size, num_experts - 1)


def test_a_router_of_anyone_elses_stands_beside_its_experts() -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    config.num_local_experts = 4
    model = meta_model(config, torch.float32)
    for layer in model.model.layers:
        layer.mlp = Mixture(8, 4).to("meta")
    routers = router_modules(model)
    assert routers == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert not set(adapted(model)) & routers
    config.num_local_experts = 5  # a list of four is not of experts then
    assert router_modules(model) == set()


def test_a_router_may_be_named(tmp_path: Path) -> None:
    with unwarned():
        directory = write_model(tiny_config("jetmoe"), tmp_path / "model")
        model = LemaModel(
            LemaConfig(
                str(directory),
                device="cpu",
                seed=SEED,
                lora_rank=2,
                lora_alpha=4,
                lora_target_modules=["router.layer"],
            ),
            backend=CpuBackend(poison=True),
        )
        model.initialize_lora()
        base = AutoModelForCausalLM.from_pretrained(directory)
        base.config.use_cache = False
        torch.manual_seed(SEED)
        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=["router.layer"], task_type="CAUSAL_LM"
        )
        whole = get_peft_model(base, config).train()
    model.lora_manager.train()
    draw_b(whole)
    draw_b(model.lora_manager)
    batches = micro_batches()
    assert_same(streamed_step(model, batches), whole_step(whole, batches))
    model.close()


def test_what_only_looks_like_a_linear_is_not_adapted() -> None:
    model = skeleton("deepseek_v4")
    grouped = [name for name, module in model.named_modules() if name.endswith(".o_a_proj")]
    assert grouped
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in grouped)
    assert not adapted(model) & set(grouped)
    # a subclass that is one all the same
    assert "query_key_value" in default_targets(skeleton("falcon"))


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_linears_that_peft_does_not_adapt_are_told_of(model_type: str) -> None:
    model = skeleton(model_type)
    with pytest.warns(UserWarning, match="PEFT does not adapt these linear modules") as caught:
        warn_of_left_out(model, default_adapter(model))
    names = {
        name.rpartition(".")[2] for name in str(caught[0].message).partition(": ")[2].split(", ")
    }
    assert names == LEFT_OUT[model_type]
    assert names == {name.rpartition(".")[2] for name in linear_modules(model)} - {
        name.rpartition(".")[2] for name in adapted(model)
    }


def test_where_peft_adapts_everything_nothing_is_told() -> None:
    for model_type in ("llama", "mixtral", "granitemoe"):
        warn_of_left_out(model := skeleton(model_type), default_adapter(model))


def test_experts_are_adapted_by_default_unless_something_hinders_it() -> None:
    model = skeleton("mixtral")
    both = ["experts.down_proj", "experts.gate_up_proj"]
    assert default_adapter(model).target_parameters == both
    assert default_adapter(model, lora_layers_to_transform=[1]).target_parameters == [
        f"layers.1.mlp.{end}" for end in both
    ]
    assert default_adapter(model, lora_target_parameters=both[:1]).target_parameters == both[:1]
    for name, value in HINDERED.items():
        assert default_adapter(model, **{name: value}).target_parameters is None, name
    # among two processes, along the model's plan
    for settings in (
        {},
        {"lora_layers_to_transform": [1]},
    ):
        wanted = default_adapter(model, **settings).target_parameters
        assert configured_lora(model, LemaConfig("-", **settings), 2).target_parameters == wanted
    # whose plan does not cut them
    divided = configured_lora(model := skeleton("gpt_oss"), LemaConfig("-"), 2)
    assert default_adapter(model).target_parameters and divided.target_parameters is None
    with pytest.warns(
        UserWarning,
        match="not adapted by default, or not with these settings.*: experts.down_proj, ",
    ):
        warn_of_left_out(model, divided)
    warn_of_left_out(model, divided, experts=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", STREAMED)
def test_exactly_the_linears_that_are_no_routers_are_adapted(model_type: str) -> None:
    model = skeleton(model_type)
    wanted = set(linear_modules(model)) - router_modules(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_left_out(model, default_adapter(model))
    told = {end for one in caught for end in str(one.message).partition(": ")[2].split(", ")}
    left_out = {name for name in wanted if any(f".{name}".endswith(f".{end}") for end in told)}
    assert adapted(model) == wanted - left_out


def test_peft_s_own_targets_are_those_of_the_type_of_model(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "model", num_hidden_layers=2)
    with opened(run_settings(base, tmp_path / "out", lora_target_modules="peft")) as model:
        ours = adapter_of(model.skeleton)
    torch.manual_seed(42)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM")
    theirs = adapter_of(get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    assert ours.keys() == theirs.keys() and len(ours) == 8
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if "lora_A" in name)


def test_a_type_for_which_peft_has_no_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match="type olmo2"):
        peft_targets(meta_model(tiny_config("olmo2")))
