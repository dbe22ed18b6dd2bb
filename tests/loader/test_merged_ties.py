"""Adapters of tied embeddings and heads, merged: two weights where their values part, and the
config says which.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asloaded import farthest_from_whole, llama, opened, rows, tensors
from clirun import lema
from peft import PeftModel
from publishedclass import publish, published_class
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from lema.convert.merge import merge_adapter
from lema.errors import ModelError
from lema.model.skeleton import auto_class

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = "lora_target_modules"
WHOLE = "lora_modules_to_save"
ROWS = "lora_trainable_token_indices"
EMBEDDINGS = "embed_tokens"
HEAD = "lm_head"
TIED = {"lora_ensure_weight_tying": True}
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA on the head": {TARGETS: [HEAD]},
    "LoRA on the embeddings": {TARGETS: [EMBEDDINGS]},
    "LoRA on both": {TARGETS: [EMBEDDINGS, HEAD]},
    "embeddings whole": {WHOLE: [EMBEDDINGS]},
    "head whole": {WHOLE: [HEAD]},
    "both whole": {WHOLE: [EMBEDDINGS, HEAD]},
    "both whole and tied": {WHOLE: [EMBEDDINGS, HEAD]} | TIED,
    "embeddings whole and tied": {WHOLE: [EMBEDDINGS]} | TIED,
    "rows": {ROWS: [5, 6]},
    "rows of the embeddings": {ROWS: {EMBEDDINGS: [5, 6]}},
    "rows of the head": {ROWS: {HEAD: [7, 8]}},
    "the same rows of both": {ROWS: {EMBEDDINGS: [5, 6], HEAD: [5, 6]}},
    "other rows of each": {ROWS: {EMBEDDINGS: [5, 6], HEAD: [8]}},
    "LoRA on the head and rows": {TARGETS: [HEAD], ROWS: {EMBEDDINGS: [5, 6]}},
    "LoRA on the embeddings, head whole": {TARGETS: [EMBEDDINGS], WHOLE: [HEAD]},
}
STAY_ONE = {
    "both whole and tied",
    "embeddings whole and tied",
    "rows",
    "rows of the embeddings",
    "the same rows of both",
}
# What PEFT's own merge makes something else of, because it merges both into the one weight, or
# leaves one out.
WRONG_BY_PEFT = {
    *("LoRA on the head", "LoRA on the embeddings", "LoRA on both"),
    *("rows of the head", "other rows of each", "LoRA on the head and rows"),
}
MODELS = ("llama", "gemma3", "gpt2", "mistral3", "qwen3_5")


def tied_config(model_type: str) -> PreTrainedConfig:
    """A config whose embeddings and head are one, as the whole and the part for text say."""
    config = llama() if model_type == "llama" else tiny_config(model_type)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = True
    return config


def named(settings: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Settings of an adapter with the names that modules have in a type."""
    settings = {**settings, TARGETS: ["q_proj", *settings.get(TARGETS, ())]}
    if model_type != "gpt2":
        return settings
    renamed: dict[str, Any] = json.loads(
        json.dumps(settings).replace(EMBEDDINGS, "wte").replace("q_proj", "c_attn")
    )
    return renamed


def batch() -> dict[str, Tensor]:
    """Rows that have the tokens whose rows train."""
    (found,) = rows(12, count=3)
    found["input_ids"][0, :4] = torch.tensor([5, 6, 7, 8])
    return found | {"labels": found["input_ids"].clone()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=batch()["input_ids"], use_cache=False).logits
    return found


def train(source: Path, adapter: Path, settings: dict[str, Any]) -> Tensor:
    """Save an adapter whose every number training has changed; return the logits at its end."""
    with opened(source, **settings) as model:
        generator = torch.Generator().manual_seed(5)
        end = list[Tensor]()
        with torch.no_grad():
            for parameter in model.lora_manager.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            model.lora_manager.eval()
            model.adapter.loss([batch()], logits=end)
        model.save_pretrained(str(adapter))
    return end[0]


@pytest.mark.sampled(26)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("model_type", MODELS)
def test_what_is_merged_is_what_was_trained_and_its_config_says_what_is_one(
    model_type: str, adapter: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source", tied_config(model_type))
    saved = tmp_path / "adapter"
    notes = list[str]()
    expected = train(source, saved, named(ADAPTERS[adapter], model_type))
    config = AutoConfig.from_pretrained(source)
    text = auto_class(config)
    published = published_class(config)
    by_peft = PeftModel.from_pretrained(text.from_pretrained(source), str(saved))
    assert torch.equal(logits(by_peft), expected)
    assert torch.allclose(logits(by_peft.merge_and_unload()), expected, atol=1e-4) == (
        adapter not in WRONG_BY_PEFT
    )
    merged = merge_adapter(saved, tmp_path / "merged", note=notes.append)
    # PEFT ties the embeddings to a head only where they are called `embed_tokens`.
    one = adapter in STAY_ONE and (model_type, adapter) != ("gpt2", "embeddings whole and tied")
    for kind in {text, published}:
        model, report = kind.from_pretrained(merged, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert torch.allclose(logits(model), expected, atol=1e-4)
        weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (weights[0] is weights[1]) == torch.equal(*weights) == one
    written = json.loads((merged / "config.json").read_text())
    said = [
        part["tie_word_embeddings"]
        for part in (written, written.get("text_config", {}))
        if part and "tie_word_embeddings" in part
    ]
    assert said and set(said) == {one}
    assert bool(notes) == (not one)
    before = tensors(source)
    after = tensors(merged)
    added = after.keys() - before.keys()
    assert before.keys() <= after.keys() and [
        name.endswith("lm_head.weight") for name in added
    ] == [True] * (not one)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert all(
        any(end in name for end in ("q_proj", "c_attn", EMBEDDINGS, "wte", HEAD))
        for name in changed
    )


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        pytest.param(kind, name, marks=() if kind == "llama" else pytest.mark.exhaustive)
        for kind in MODELS
        for name in ADAPTERS
    ],
)
def test_it_trains_as_by_peft(model_type: str, adapter: str, tmp_path: Path) -> None:
    source = publish(model_type, tmp_path / "source", tied_config(model_type))
    assert (
        farthest_from_whole(source, [batch()], rows(9), **named(ADAPTERS[adapter], model_type)) == 0
    )


def test_rows_of_a_module_that_trains_whole_are_refused(tmp_path: Path) -> None:
    """PEFT's own layers do not run so."""
    source = publish("llama", tmp_path / "source", tied_config("llama"))
    settings = {TARGETS: ["q_proj"], WHOLE: [HEAD], ROWS: {EMBEDDINGS: [5]}}
    with (
        pytest.raises(ModelError, match="lm_head trains whole, and rows of it train"),
        opened(source, **settings),
    ):
        pass


def test_the_command_says_that_weights_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = publish("llama", tmp_path / "source", tied_config("llama"))
    for adapter in ("head whole", "rows"):
        train(source, tmp_path / adapter, named(ADAPTERS[adapter], "llama"))
        assert lema("merge", tmp_path / adapter, tmp_path / f"{adapter} merged") == 0
        said = (
            "lm_head.weight and model.embed_tokens.weight are no longer one"
            in capfd.readouterr().out
        )
        assert said == (adapter == "head whole")
