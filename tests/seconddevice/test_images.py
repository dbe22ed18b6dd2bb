"""Rows with images on the second device: towers there as a whole, and streamed, make the loss and
the gradients of the CPU.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from imagerows import image_batch, publish_with_images
from parity import draw_b
from peft import LoraConfig
from publishedclass import published_class
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig

import lema

LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"


def step(directory: Path, device: str, batch: dict[str, Tensor], **settings: Any) -> list[Tensor]:
    """Return the loss and all gradients, in host memory."""
    adapter = LoraConfig(r=4, target_modules=LANGUAGE, task_type="CAUSAL_LM")
    options = {"modalities": "all", "seed": 1, "device_memory": None, **settings}
    with closing(lema.streamed(directory, adapter, device=device, **options)) as model:
        torch.manual_seed(1)
        draw_b(model)
        there = {name: one.to(model.opened.backend.device) for name, one in batch.items()}
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(**there).loss
            loss.backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return [loss.detach().cpu(), *(one.cpu() for one in gradients)]


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3"])
def test_images_make_the_loss_and_gradients_of_the_cpu(model_type: str, tmp_path: Path) -> None:
    directory = publish_with_images(model_type, tmp_path / model_type)
    whole = published_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory)
    batch = image_batch(whole, [2, 1, 0])
    expected = step(directory, "cpu", batch)
    assert len(expected) > 4
    for settings in ({}, {"towers": "stream"}, {"micro_batch_size": 1, "towers": "stream"}):
        found = step(directory, "second", batch, **settings)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
