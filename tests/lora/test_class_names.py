"""Adapters of types whose published class sees images: their names fit that class, and either
form is read.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import STREAMED, opened
from parity import draw_b
from peft import LoraConfig, PeftModel, get_peft_model
from publishedclass import TWO_CLASSES, logits, publish, published_class
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import lema
from lema import LemaModel
from lema.convert.merge import merge_adapter
from lema.errors import AdapterError
from lema.lora import inject_lora_params
from lema.lora.attach import lora_config
from lema.lora.class_names import class_names, compare_classes
from lema.lora.files import saved_tensors
from lema.lora.published import config_in_files, config_in_own, tensors_in_files, tensors_in_own
from lema.model import meta_model
from lema.model.skeleton import EmptyOnMeta, auto_class
from lema_cpu import CpuBackend

ADAPTERS: dict[str, dict[str, Any]] = {
    "by default": {},
    "all-linear": {"targets": "all-linear"},
    "an expression": {"targets": r".*layers\.[01]\..*(o_proj|out_proj|down_proj)"},
    "an expression of whole names": {
        "targets": r"model\.layers\.[01]\..*(o_proj|out_proj|down_proj)"
    },
    "a layer": {"targets": ["o_proj", "out_proj"], "layers_to_transform": [1]},
    "ranks of some": {
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {r"layers\.1\..*down_proj": 7},
    },
    "embeddings and head": {"targets": ["o_proj", "embed_tokens", "lm_head"]},
    "trained whole": {"targets": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "rows": {"targets": ["o_proj"], "trainable_token_indices": {"embed_tokens": [5, 6]}},
    "experts": {"targets": ["o_proj"], "target_parameters": ["experts.down_proj"]},
    "ranks of experts": {
        "targets": ["o_proj"],
        "target_parameters": ["experts.down_proj"],
        "rank_pattern": {r"model\.layers\.1\..*experts\.down_proj": 3},
    },
    "experts by the last part of their names": {
        "targets": ["o_proj"],
        "target_parameters": ["gate_up_proj"],
    },
}
OF_EXPERTS = [name for name, settings in ADAPTERS.items() if "target_parameters" in settings]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensors on disk are not used"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules"),
    pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules"),
    pytest.mark.filterwarnings("ignore:.*does not name the adapter's base model"),
    # where they are read but not drawn
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore:lora_target_modules. no module is named"),
    # PEFT looks for these among modules alone
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys"),
]


@pytest.mark.parametrize("model_type", TWO_CLASSES)
def test_every_name_of_the_class_that_trains_is_one_of_the_published_class(model_type: str) -> None:
    config = published_config(model_type)
    model = meta_model(config)
    names = compare_classes(model, config)
    assert class_names(model) is names and type(names.published) is published_class(config)
    own = model.state_dict()
    there = names.published.state_dict()
    for name, tensor in own.items():
        assert there[names.in_published(name)].shape == tensor.shape
        assert names.in_own(names.in_published(name)) == names.in_own(name) == name


def published_config(model_type: str) -> PreTrainedConfig:
    config: PreTrainedConfig = tiny_config(model_type)
    config.architectures = [published_class(config).__name__]
    return config


def names_by_peft(model: PreTrainedModel, config: LoraConfig) -> dict[str, torch.Size]:
    """What PEFT would write of an adapter of this config on a model that is on `meta`."""
    with EmptyOnMeta():
        adapted = get_peft_model(deepcopy(model), deepcopy(config), low_cpu_mem_usage=True)
    return {name: tensor.shape for name, tensor in saved_tensors(adapted, None).items()}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        (kind, name)
        for kind in TWO_CLASSES
        for name in ADAPTERS
        if name not in OF_EXPERTS or kind != "qwen3_5"
    ],
)
def test_what_is_written_are_the_tensors_that_peft_has_on_each_class(
    model_type: str, adapter: str
) -> None:
    """By the config that is written PEFT adapts the same modules of either class, and calls the
    tensors as they are called; what is read is what was written."""
    config = published_config(model_type)
    model = meta_model(config)
    text = meta_model(config)
    names = compare_classes(model, config)
    assert names.published is not None
    settings: dict[str, Any] = {"targets": None} | ADAPTERS[adapter]
    asked = lora_config(model, rank=2, alpha=4, dropout=0.0, **settings)
    adapted = inject_lora_params(model, asked, torch.device("cpu"), seed=None)
    tensors = {
        name: torch.randn_like(tensor) for name, tensor in saved_tensors(adapted, None).items()
    }
    written = config_in_files(model, asked, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == names_by_peft(text, written)
    published = tensors_in_files(model, tensors, "published")
    assert {name: tensor.shape for name, tensor in published.items()} == names_by_peft(
        names.published, written
    )
    assert not published.keys() <= tensors.keys()
    assert tensors_in_files(model, tensors).keys() == tensors.keys() | published.keys()
    for form in (tensors, published, tensors | published):
        own = tensors_in_own(model, form, Path("adapter"))
        assert own.keys() == tensors.keys() and all(
            torch.equal(own[name], tensors[name]) for name in own
        )
        compare_classes(text, config)
        assert names_by_peft(text, config_in_own(text, written, form, Path("adapter"))) == shapes


@pytest.mark.exhaustive
def test_these_are_all_types_that_have_two_classes() -> None:
    found = set()
    for model_type in STREAMED:
        config = tiny_config(model_type)
        trains = auto_class(config)._model_mapping.get(type(config), None)
        if trains is not None and published_class(config) is not trains:
            found.add(model_type)
    # which transformers itself does not read into the class that trains
    assert found - {"emu3"} == set(TWO_CLASSES)


def test_a_published_class_with_the_same_names_needs_none() -> None:
    for model_type in ("llama", "gemma3"):
        config = tiny_config(model_type)
        config.architectures = [published_class(config).__name__]
        assert compare_classes(meta_model(config), config).published is None


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
def test_an_adapter_that_peft_made_on_the_published_class_is_read_everywhere(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    whole = published_class(AutoConfig.from_pretrained(source)).from_pretrained(
        source, dtype=torch.float32
    )
    target = r".*language_model.*\.(q_proj|o_proj)"
    peft_model = get_peft_model(
        whole, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=target)
    )
    draw_b(peft_model)
    peft_model.save_pretrained(tmp_path / "adapter")
    expected = logits(peft_model)
    streamed = lema.streamed(source, tmp_path / "adapter", device="cpu", device_memory=None)
    torch.testing.assert_close(logits(streamed), expected)
    streamed.save_pretrained(str(tmp_path / "again"))
    streamed.load_adapter(tmp_path / "adapter", "default")
    torch.testing.assert_close(logits(streamed), expected)
    streamed.load_adapter(tmp_path / "adapter", "second")
    streamed.set_adapter("second")
    torch.testing.assert_close(logits(streamed), expected)
    streamed.close()
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(
        logits(type(whole).from_pretrained(merged)), expected, atol=1e-3, rtol=1e-3
    )
    again = PeftModel.from_pretrained(
        type(whole).from_pretrained(source, dtype=torch.float32), tmp_path / "again"
    )
    torch.testing.assert_close(logits(again), expected)


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
def test_a_saved_adapter_opens_again_and_its_two_forms_must_agree(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    saved = tmp_path / "adapter"
    with opened(source, lora_target_modules=["q_proj", "o_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(saved)
        trainer = model.get_trainer()
        trainer.save_checkpoint(tmp_path / "checkpoint")
        trainer.load_checkpoint(tmp_path / "checkpoint")
        kept = {
            name: one.detach().clone()
            for name, one in model.lora_manager.named_parameters()
            if one.requires_grad
        }
    model = LemaModel.from_pretrained(saved, backend=CpuBackend())
    found = {name: one for name, one in model.lora_manager.named_parameters() if one.requires_grad}
    assert found.keys() == kept.keys() and all(
        torch.equal(one, kept[name]) for name, one in found.items()
    )
    model.close()
    assert "language_model" in "".join(load_file(saved / "adapter_model.safetensors"))
    tensors = load_file(saved / "adapter_model.safetensors")
    tensors[next(name for name in tensors if "language_model" in name)].add_(1)
    save_file(tensors, saved / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=r"two tensors for .*, and they differ"):
        LemaModel.from_pretrained(saved, backend=CpuBackend())
    assert set(json.loads((saved / "adapter_config.json").read_text())["target_modules"]) == {
        "o_proj",
        "q_proj",
    }


@pytest.mark.parametrize("model_type", ["laguna", "deepseek_ocr2"])
def test_an_adapter_is_read_of_types_whose_names_peft_takes_for_those_of_files(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    saved = tmp_path / "adapter"
    with opened(source) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(saved)
        kept = {
            name: one.detach().clone()
            for name, one in model.lora_manager.named_parameters()
            if one.requires_grad
        }
    model = LemaModel.from_pretrained(saved, backend=CpuBackend())
    streamed = lema.streamed(source, saved, device="cpu", device_memory=None)
    streamed.load_adapter(saved, "second")
    for reader, adapter in (
        (model.lora_manager, "default"),
        (streamed, "default"),
        (streamed, "second"),
    ):
        found = dict(reader.named_parameters())
        assert all(
            torch.equal(found[name.replace(".default", f".{adapter}")], one)
            for name, one in kept.items()
        )
    model.close()
    streamed.close()
