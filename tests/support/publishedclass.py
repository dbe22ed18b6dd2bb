"""Random models of any type, as published: of the class that sees images, where there is one."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import micro_batches
from peft import PeftModel
from safetensors.torch import load_file
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from lema.model.skeleton import auto_class

# Types that stream whose published class has other names than the one that trains.
TWO_CLASSES = ("dots3_note", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")


def published_class(config: PreTrainedConfig) -> Any:
    """The class that is published of a type: the one that sees images, where there is one."""
    known = AutoModelForImageTextToText._model_mapping
    return (
        known[type(config)]
        if type(config) in known
        else auto_class(config)._model_mapping[type(config)]
    )


def publish(model_type: str, directory: Path, config: PreTrainedConfig | None = None) -> Path:
    """Write a random model of a type as its publisher would, of the published class; `config`:
    another than the tiny one of the type."""
    config = config or tiny_config(model_type)
    torch.manual_seed(1)
    model = published_class(config)._from_config(deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0.0
    model.save_pretrained(directory)
    return directory


def adapted(whole: Any, adapter: Path, *, misread: bool = False) -> PeftModel:
    """PEFT's model with a saved adapter. `misread`: PEFT's reader loses what it has written of such
    a type, because it sends names in memory through rules for names in files; what is in the file
    is put where its names say."""
    if not misread:
        return PeftModel.from_pretrained(whole, str(adapter)).eval()
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        model = PeftModel.from_pretrained(whole, str(adapter)).eval()
    tensors = load_file(adapter / "adapter_model.safetensors")
    named = {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name): one for name, one in tensors.items()
    }
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    assert {name for name, _ in model.named_parameters() if ".lora_" in name} == named.keys()
    return model


def logits(model: Any) -> Tensor:
    """The logits of a model, with an adapter or without, on text."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if type(base).__name__ == "Llama4ForConditionalGeneration":
        # its own forward asks for outputs of images that it does not have
        model = base.language_model
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=micro_batches()[0]["input_ids"], use_cache=False).logits
    return found
