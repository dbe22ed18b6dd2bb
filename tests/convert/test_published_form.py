"""What is merged and prepared is the published checkpoint again, of every type: names, shapes, classes and logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from everytype import STREAMED, opened
from parity import draw_b
from peft import PeftModel
from publishedclass import logits, publish, published_class

from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare
from lema.model.skeleton import auto_class
from lema.storage import GlobalBinaryIndex

VARIED = (
    *("llama", "qwen3", "qwen3_moe", "mixtral", "qwen3_5", "qwen3_5_moe", "llama4", "gemma3", "mistral3", "gpt2"),
    *("gpt_neox", "phi3", "deepseek_v3", "gpt_oss", "bloom"),
)
TYPES = [pytest.param(kind, marks=() if kind in VARIED else pytest.mark.exhaustive) for kind in STREAMED]


def classes(directory: Path) -> list[Any]:
    """The three ways in which a checkpoint is opened."""
    config = transformers.AutoConfig.from_pretrained(directory)
    named = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    return list(dict.fromkeys([auto_class(config), published_class(config), named]))


def read(kind: Any, directory: Path) -> tuple[Any, Any]:
    """A model, and the names that were missing from the files and not expected in them."""
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    return model.eval(), (sorted(report["missing_keys"]), sorted(report["unexpected_keys"]))


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: record.shape for name, record in GlobalBinaryIndex(directory).items()}


@pytest.mark.filterwarnings("ignore:.*tensors on disk are not used")  # towers that the class that trains has not
@pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules")
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")  # which the other class needs
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_merged_and_prepared_is_the_published_checkpoint_again(model_type: str, tmp_path: Path) -> None:
    source = publish(model_type, tmp_path / "source")
    prepared = prepare(source, tmp_path / "prepared").path
    with opened(source) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert shapes(prepared) == shapes(merged) == shapes(source)
    for directory in (prepared, merged):
        assert json.loads((directory / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for kind in classes(source):
        whole, report = read(kind, source)
        plain = logits(whole)
        again, reported = read(kind, prepared)
        assert reported == report
        assert torch.equal(logits(again), plain)
        adapted = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
        changed = logits(adapted.eval())
        assert not torch.equal(changed, plain), f"the adapter changes nothing on {type(whole).__name__}"
        again, reported = read(kind, merged)
        assert reported == report
        torch.testing.assert_close(logits(again), changed, atol=2e-3, rtol=2e-3)
