"""Adapters of types whose published class sees images: their names fit that class, and either form is read."""

import json
from pathlib import Path

import pytest
import torch
from everytype import opened
from parity import draw_b
from peft import LoraConfig, PeftModel, get_peft_model
from publishedclass import logits, publish, published_class
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from transformers import AutoConfig

import lema
from lema import LemaModel
from lema.convert.merge import merge_adapter
from lema.errors import AdapterError
from lema.lora.class_names import class_names, compare_classes
from lema.model import meta_model
from lema_cpu import CpuBackend

TWO_CLASSES = ("dots3_note", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensors on disk are not used"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules"),
    pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules"),
    pytest.mark.filterwarnings("ignore:.*does not name the adapter's base model"),
]


@pytest.mark.parametrize("model_type", TWO_CLASSES)
def test_every_name_of_the_class_that_trains_is_one_of_the_published_class(model_type: str) -> None:
    config = tiny_config(model_type)
    config.architectures = [published_class(config).__name__]
    model = meta_model(config)
    names = compare_classes(model, config)
    assert class_names(model) is names and type(names.published) is published_class(config)
    own, there = model.state_dict(), names.published.state_dict()
    for name, tensor in own.items():
        assert there[names.in_published(name)].shape == tensor.shape
        assert names.in_own(names.in_published(name)) == names.in_own(name) == name


def test_a_published_class_with_the_same_names_needs_none() -> None:
    for model_type in ("llama", "gemma3"):
        config = tiny_config(model_type)
        config.architectures = [published_class(config).__name__]
        assert compare_classes(meta_model(config), config).published is None


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
def test_an_adapter_that_peft_made_on_the_published_class_is_read_everywhere(model_type: str, tmp_path: Path) -> None:
    source = publish(model_type, tmp_path / "source")
    whole = published_class(AutoConfig.from_pretrained(source)).from_pretrained(source, dtype=torch.float32)
    target = r".*language_model.*\.(q_proj|o_proj)"
    peft_model = get_peft_model(whole, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=target))
    draw_b(peft_model)
    peft_model.save_pretrained(tmp_path / "adapter")
    expected = logits(peft_model)
    streamed = lema.streamed(source, tmp_path / "adapter", device="cpu", device_memory=None)
    torch.testing.assert_close(logits(streamed), expected)
    streamed.save_pretrained(str(tmp_path / "again"))
    streamed.load_adapter(tmp_path / "adapter", "default")
    torch.testing.assert_close(logits(streamed), expected)
    streamed.close()
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits(type(whole).from_pretrained(merged)), expected, atol=1e-3, rtol=1e-3)
    again = PeftModel.from_pretrained(type(whole).from_pretrained(source, dtype=torch.float32), tmp_path / "again")
    torch.testing.assert_close(logits(again), expected)


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
def test_a_saved_adapter_opens_again_and_its_two_forms_must_agree(model_type: str, tmp_path: Path) -> None:
    source, saved = publish(model_type, tmp_path / "source"), tmp_path / "adapter"
    with opened(source, lora_target_modules=["q_proj", "o_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(saved)
        trainer = model.get_trainer()
        trainer.save_checkpoint(tmp_path / "checkpoint")
        trainer.load_checkpoint(tmp_path / "checkpoint")
        kept = {name: one.detach().clone() for name, one in model.lora_manager.named_parameters() if one.requires_grad}
    model = LemaModel.from_pretrained(saved, backend=CpuBackend())
    found = {name: one for name, one in model.lora_manager.named_parameters() if one.requires_grad}
    assert found.keys() == kept.keys() and all(torch.equal(one, kept[name]) for name, one in found.items())
    model.close()
    assert "language_model" in "".join(load_file(saved / "adapter_model.safetensors"))
    tensors = load_file(saved / "adapter_model.safetensors")
    tensors[next(name for name in tensors if "language_model" in name)].add_(1)
    save_file(tensors, saved / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=r"two tensors for .*, and they differ"):
        LemaModel.from_pretrained(saved, backend=CpuBackend())
    assert set(json.loads((saved / "adapter_config.json").read_text())["target_modules"]) == {"o_proj", "q_proj"}


@pytest.mark.parametrize("model_type", ["laguna", "deepseek_ocr2"])
def test_an_adapter_is_read_of_types_whose_names_peft_takes_for_those_of_files(model_type: str, tmp_path: Path) -> None:
    source, saved = publish(model_type, tmp_path / "source"), tmp_path / "adapter"
    with opened(source) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(saved)
        kept = {name: one.detach().clone() for name, one in model.lora_manager.named_parameters() if one.requires_grad}
    model = LemaModel.from_pretrained(saved, backend=CpuBackend())
    streamed = lema.streamed(source, saved, device="cpu", device_memory=None)
    streamed.load_adapter(saved, "second")
    for reader, adapter in ((model.lora_manager, "default"), (streamed, "default"), (streamed, "second")):
        found = dict(reader.named_parameters())
        assert all(torch.equal(found[name.replace(".default", f".{adapter}")], one) for name, one in kept.items())
    model.close()
    streamed.close()
