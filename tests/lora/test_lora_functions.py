"""What is adapted, attached, counted and merged, as functions of a model, over many types of
models.
"""

from copy import deepcopy
from functools import partial

import pytest
import torch
from peft import PeftModel
from tiny import ARCHITECTURES
from tinyconfig import VOCABULARY, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lema.errors import ConfigError, ModelError
from lema.lora import count_lora_params, inject_lora_params, merge_lora_params, param_filter
from lema.lora.attach import lora_config
from lema.lora.targets import default_targets, linear_modules, router_modules

# Kinds that differ in what their linears are: plain, transposed, fused, biased, tied, experts,
# states, parallel blocks.
TYPES = [
    "llama",
    "gpt2",
    "phi3",
    "opt",
    "gemma2",
    "mixtral",
    "qwen2_moe",
    "mamba",
    "gpt_neox",
    "falcon",
    "bloom",
    "jamba",
]
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))

adapter_of = partial(lora_config, rank=2, alpha=4, dropout=0.0, targets=None)


def made(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    # Some kernels are chosen by whether a gradient is wanted; their last bit differs.
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def inject(model: PreTrainedModel, **changes: object) -> PeftModel:
    return inject_lora_params(
        model, adapter_of(model, **changes), torch.device("cpu"), seed=3
    ).eval()


def bits(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the bytes of every tensor of a model without its adapter."""
    return {
        name.replace(".base_layer", ""): tensor.detach().clone().view(torch.uint8)
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.sampled(2)
# of types that are announced as old, or as slow without their kernels
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_the_four_functions_over_types_of_models(model_type: str) -> None:
    model = made(model_type)
    before = logits(model)
    base = bits(model)
    linears = {"exclude_modules": ["experts"]}
    chosen = param_filter(model, adapter_of(model, **linears))
    wanted = {
        f"{name}.weight"
        for name in set(linear_modules(model)) - router_modules(model)
        # some, PEFT does not adapt
        if any(f".{name}".endswith(f".{end}") for end in default_targets(model))
    }
    assert set(chosen) == wanted and len(set(chosen)) == len(chosen) > 0
    assert_same(bits(model), base)  # it was only asked
    shapes = [model.get_parameter(name).shape for name in chosen]

    adapted = inject(model, **linears)
    assert torch.equal(logits(adapted), before)  # B is 0
    assert count_lora_params(adapted) == sum(2 * sum(shape) for shape in shapes)
    training = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in training) and len(training) == 2 * len(chosen)
    at_zero = merge_lora_params(model)
    assert {name for name in at_zero if name in chosen} == set(chosen)
    for name, weight in at_zero.items():
        assert torch.equal(weight, base[name].view(weight.dtype).view(weight.shape)), name

    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(bits(model), base)  # frozen
    after = logits(adapted)
    assert not torch.equal(after, before)

    merged = merge_lora_params(model)
    assert_same(bits(model), base)
    # in some types a linear's weight is read and the linear never called, so its adapter stays as
    # it was
    moved = {
        name.replace("lora_B.default.", "")
        for name, parameter in model.named_parameters()
        if "lora_B" in name and bool(parameter.any())
    }
    assert {name for name in merged if not torch.equal(merged[name], at_zero[name])} == moved
    assert len(moved) > len(chosen) / 2
    whole = made(model_type)
    whole.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(whole), after, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_is_merged_already_is_not_merged_again() -> None:
    adapted = inject(made("llama"))
    adapted.merge_adapter()
    with pytest.raises(ConfigError, match="the adapter is already merged"):
        merge_lora_params(adapted)


def disturb(model: torch.nn.Module, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


def test_subtracting_would_leave_other_bits() -> None:
    adapted = inject(made("llama", torch.bfloat16))
    disturb(adapted)
    base = bits(adapted)
    adapted.merge_adapter()
    adapted.unmerge_adapter()
    assert any(not torch.equal(tensor, base[name]) for name, tensor in bits(adapted).items())


def test_what_cannot_be_targeted_is_said_with_what_can() -> None:
    model = made("llama")
    config = adapter_of(model, targets=["nothing_of_that_name"])
    for call in (
        lambda: param_filter(model, config),
        lambda: inject_lora_params(model, config, torch.device("cpu"), 1),
    ):
        with pytest.raises(ModelError, match="does not fit this model") as raised:
            call()
        assert all(name in raised.value.how for name in ARCHITECTURES["llama"].targets)
    assert torch.equal(logits(inject(model)), logits(made("llama")))  # it is as it was


def test_experts_and_other_parameters_are_named_and_merged() -> None:
    model = made("mixtral", torch.bfloat16)
    options = {"targets": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    chosen = param_filter(model, adapter_of(model, **options))
    assert len(chosen) == 2 * len(model.model.layers) and all(
        model.get_parameter(name).ndim == 3 for name in chosen
    )
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted = inject(model, **options)
    disturb(adapted, 0.02)
    merged = merge_lora_params(model)
    assert set(merged) == set(chosen)
    for name in chosen:
        wrapper = model.get_submodule(name.rpartition(".")[0])
        while wrapper.parameter_name != name.rpartition(".")[2]:
            wrapper = wrapper.base_layer
        wide = deepcopy(wrapper)
        holder = wide.get_base_layer()
        holder._parameters[wide.parameter_name] = torch.nn.Parameter(
            base[name].float(), requires_grad=False
        )
        exact = base[name].double() + wide.get_delta_weight("default").double()
        assert torch.equal(merged[name], exact.float().bfloat16())  # rounded once


def test_a_weight_that_is_not_in_memory_is_not_merged() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    inject_lora_params(model, adapter_of(model), torch.device("cpu"), seed=3)
    with pytest.raises(ConfigError, match="not in memory") as raised:
        merge_lora_params(model)
    assert "lema merge" in raised.value.how
