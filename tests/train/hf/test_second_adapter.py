"""An adapter that is added after a forward covers what the first one covers, whatever kind of
experts a model has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from everytype import write_model
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from tiny import Checkpoint
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import lema

CheckpointOf = Callable[..., Checkpoint]

IDS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(5))

# Types with stacked weights that `transformers` does not compute by its `ExpertsInterface`, and one
# that it does.
PARAMETERS = {
    "inkling_text": "down_proj",
    "jetmoe": "input_linear.weight",
    "llama4_text": "experts.down_proj",
    "longcat_flash": "experts.down_proj",
    "qwen3_moe": "experts.down_proj",
}


def lora(model_type: str) -> LoraConfig:
    modules = ["k_proj", "kv_proj", "o_proj", "kv_a_proj_with_mqa", "wk"]
    parameters = [PARAMETERS[model_type]]
    return LoraConfig(
        r=2, target_modules=modules, target_parameters=parameters, task_type="CAUSAL_LM"
    )


def covered(model: Any, adapter: str) -> set[str]:
    names = (name for name, _ in model.named_parameters() if f".{adapter}." in name)
    return {name.replace(f".{adapter}.", ".") for name in names}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.filterwarnings("ignore:lora_target_modules")  # one list has the names of all types
@pytest.mark.parametrize("model_type", PARAMETERS)
def test_it_covers_the_experts(model_type: str, tmp_path: Path) -> None:
    """TRL adds its adapter `ref` like this, to one that was trained before."""
    directory = write_model(tiny_config(model_type), tmp_path / "published")
    model = lema.streamed(
        directory, lora(model_type), device="cpu", dtype="float32", seed=1
    ).train()
    names = [name for name, _ in model.named_parameters()]
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert [name for name, _ in model.named_parameters()] == names
    model.add_adapter("ref", model.peft_config["default"])
    assert covered(model, "ref") == covered(model, "default")
    adapted = [
        part for part in model.modules() if isinstance(part, ParamWrapper) and "ref" in part.lora_A
    ]
    assert len(adapted) >= 2
    generator = torch.Generator().manual_seed(3)
    values = {}
    for name, one in model.named_parameters():
        if ".ref." in name:
            one.data.normal_(std=0.1, generator=generator)
            values[name] = one.data
    model.set_adapter("ref")
    base = aligned(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    whole = get_peft_model(base, lora(model_type), adapter_name="ref").eval()
    own = dict(whole.named_parameters())
    assert {name for name in own if ".ref." in name} == values.keys()
    for name, value in values.items():
        own[name].data.copy_(value)
    torch.testing.assert_close(logits(model.eval()), logits(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["linear", "cat", "svd", "ties", "dare_ties", "magnitude_prune"])
def test_adapters_are_combined_as_peft_combines_them(checkpoint_of: CheckpointOf, way: str) -> None:
    checkpoint = checkpoint_of("llama")
    found = []
    config = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    for streams in (False, True):
        if streams:
            model: Any = lema.streamed(checkpoint.streamed, config, device="cpu", seed=1)
        else:
            base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
            torch.manual_seed(1)
            model = get_peft_model(base, config)
        torch.manual_seed(2)
        model.add_adapter("other", config)
        options = {"density": 0.5} if way in ("ties", "dare_ties", "magnitude_prune") else {}
        torch.manual_seed(3)
        model.add_weighted_adapter(
            ["default", "other"], [0.5, 0.7], "sum", combination_type=way, **options
        )
        model.set_adapter("sum")
        found.append((logits(model.eval()), torch.rand(1)))
        model.set_adapter("default")
        found[-1] += (logits(model),)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
