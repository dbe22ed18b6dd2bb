"""Rows of a reference that go through the layers of a streamed model under the leases of those that
train: another adapter, or none.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from peft import LoraConfig, get_peft_model
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import lema
from lema.errors import ConfigError, ModelError
from lema.model.layers.adapters import computing_with

DRAWN = torch.Generator().manual_seed(5)
IDS = torch.randint(3, 60, (4, 9), generator=DRAWN)
MASK = (torch.arange(9) < torch.tensor([[9], [5], [7], [4]])).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
REFERENCE = "ref"
NUM_LAYERS = 8


def config_of(model_type: str) -> Any:
    config = tiny_config(model_type)
    config.num_hidden_layers = NUM_LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * NUM_LAYERS)[:NUM_LAYERS]
    return config


def lora(**options: Any) -> LoraConfig:
    usual = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=4, **{**usual, **options})


def with_reference(model: Any) -> Any:
    """Add the adapter of the reference, whose numbers are not those of the other."""
    model.add_adapter(REFERENCE, model.peft_config["default"])
    model.set_adapter("default")
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        if f".{REFERENCE}." in f"{name}.":
            drawn = torch.empty(parameter.shape).normal_(std=0.1, generator=generator)
            parameter.data.copy_(drawn)
    return model.train()


def whole(directory: Path, **options: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(1)
    return with_reference(get_peft_model(base, lora(**options)))


def streamed(directory: Path, settings: dict[str, Any], **options: Any) -> Any:
    settings = {"device": "cpu", "dtype": "float32", "seed": 1, "strategy": "streaming", **settings}
    return with_reference(lema.streamed(directory, lora(**options), **settings))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


def one_after_the_other(model: Any, adapter: str | None) -> tuple[Tensor, Tensor, Any]:
    """The reference's logits in a call of their own, and then the step."""
    if adapter is not None:
        model.set_adapter(adapter)
    with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
        of_reference = model(**BATCH).logits
    model.set_adapter("default")
    out = model(**BATCH)
    out.loss.backward()
    return out.loss.detach(), of_reference, gradients(model)


def at_once(
    model: Any, adapter: str | None, *, graph: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    compare = model.stack.compared(partial(computing_with, adapter))
    with torch.set_grad_enabled(graph), compare as continued:
        out = model(**BATCH, use_cache=False)
    with continued:
        of_reference = model(**BATCH, use_cache=False).logits
    assert not of_reference.requires_grad
    if graph:
        out.loss.backward()
    return out.loss.detach(), of_reference, gradients(model)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert torch.equal(found[2][name], gradient), name
    assert sum(bool(one.any()) for one in expected[2].values()) >= NUM_LAYERS


@pytest.mark.parametrize("adapter", [REFERENCE, None])
@pytest.mark.parametrize(
    ("model_type", "settings", "options"),
    [
        ("llama", {}, {}),
        ("llama", {"gradient_checkpointing": False}, {}),
        ("llama", {}, {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [3, 5]}),
        ("llama", {}, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm"]}),
        ("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("qwen3_moe", {}, {"target_modules": ["q_proj", "v_proj"]}),
        ("gemma3_text", {}, {}),
    ],
    ids=["plain", "graphs_kept", "some_layers", "outside", "gpt2", "experts", "gemma3"],
)
def test_they_are_those_of_a_call_of_their_own_and_lease_no_layer(
    model_type: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    adapter: str | None,
    tmp_path: Path,
) -> None:
    directory = write_model(config_of(model_type), tmp_path / "published")
    expected = one_after_the_other(whole(directory, **options), adapter)
    model = streamed(directory, settings, **options)
    model(**BATCH).loss.backward()  # which learns what layers return, with one lease more
    model.zero_grad(set_to_none=True)
    before = model.opened.memory.counters.leases
    model(**BATCH).loss.backward()
    model.zero_grad(set_to_none=True)
    alone = model.opened.memory.counters.leases
    found = at_once(model, adapter)
    after = model.opened.memory.counters.leases
    assert_same(found, expected)
    assert after - alone == alone - before > 0
    # without a graph, as in an evaluation
    found = at_once(model, adapter, graph=False)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], model(**BATCH).logits)
    model.close()


def test_rows_are_cut_as_those_that_train_are(tmp_path: Path) -> None:
    directory = write_model(config_of("llama"), tmp_path / "published")
    model = streamed(directory, {"micro_batch_size": 2})
    expected = one_after_the_other(model, REFERENCE)
    assert_same(at_once(model, REFERENCE), expected)
    model.close()


def test_where_they_cannot_go_along(tmp_path: Path) -> None:
    directory = write_model(config_of("qwen3_moe"), tmp_path / "published")
    attention = {"target_modules": ["q_proj", "v_proj"]}
    model = streamed(directory, {"experts_per_slot": 2}, **attention)
    assert not model.stack.takes_reference
    model.close()
    model = streamed(directory, {}, **attention)
    assert model.stack.takes_reference
    handle = model.opened.split.layers[2].register_forward_hook(lambda *_: None)
    assert not model.stack.takes_reference
    with pytest.raises(ConfigError, match="the rows of a reference go through the layer, too"):
        at_once(model, REFERENCE)
    handle.remove()
    assert model.stack.takes_reference
    at_once(model, REFERENCE)
    model.close()


def test_layers_that_keep_a_state_take_none_as_soon_as_that_is_known(tmp_path: Path) -> None:
    directory = write_model(tiny_config("recurrent_gemma"), tmp_path / "published")
    model = streamed(directory, {}, target_modules=["q_proj", "linear_x"])
    with pytest.raises(ModelError, match="the rows of a reference would change it"):
        at_once(model, REFERENCE)
    assert not model.stack.takes_reference
    model(**BATCH).loss.backward()
    model.close()
