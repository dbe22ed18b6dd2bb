"""Random models of any type, as published: of the class that sees images, where there is one."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import micro_batches
from peft import PeftModel
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from lema.model.skeleton import auto_class

# Types that stream whose published class has other names than the one that trains.
TWO_CLASSES = ("dots3_note", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp")


def published_class(config: PreTrainedConfig) -> Any:
    """The class that is published of a type: the one that sees images, where there is one."""
    known = AutoModelForImageTextToText._model_mapping
    return known[type(config)] if type(config) in known else auto_class(config)._model_mapping[type(config)]


def publish(model_type: str, directory: Path, config: PreTrainedConfig | None = None) -> Path:
    """Write a random model of a type as its publisher would, of the published class; `config`: another than the tiny
    one of the type."""
    config = config or tiny_config(model_type)
    if model_type == "emu3":
        pytest.skip("transformers itself reads no published checkpoint of it into the class that trains")
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


def logits(model: Any) -> Tensor:
    """The logits of a model, with an adapter or without, on text."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if type(base).__name__ == "Llama4ForConditionalGeneration":
        model = base.language_model  # its own forward asks for outputs of images that it does not have
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=micro_batches()[0]["input_ids"], use_cache=False).logits
    return found
