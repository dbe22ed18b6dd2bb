"""A published class that sees images, whose rows go through its layers in chunks: loss and every
gradient are, to rounding, those of whole rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from imagerows import TOWERLESS, image_batch, publish_with_images
from parity import Outcome, all_gradients, draw_b, relative_difference
from peft import LoraConfig
from publishedclass import published_class
from transformers import AutoConfig

import lema

ROUNDING = 2e-6  # of all gradients together
TYPES = ("gemma3", "qwen3_vl", "qwen2_vl", "paligemma", "llava_next", "idefics3", "internvl")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("model_type", TYPES)
def test_chunks_have_the_gradients_of_whole_rows(
    model_type: str, micro_batch_size: int | None, tmp_path: Path
) -> None:
    directory = publish_with_images(model_type, tmp_path)
    kind = published_class(AutoConfig.from_pretrained(directory))
    batch = image_batch(kind.from_pretrained(directory), [2, 1, 0])
    steps = []
    for chunk in (None, 5):
        adapter = LoraConfig(r=4, target_modules=TOWERLESS, task_type="CAUSAL_LM")
        model = lema.streamed(
            directory,
            adapter,
            device="cpu",
            modalities="all",
            seed=1,
            sequence_chunk=chunk,
            micro_batch_size=micro_batch_size,
        )
        try:
            draw_b(model)
            model.train()
            torch.manual_seed(3)
            loss = model(**batch).loss
            loss.backward()
            steps.append(Outcome.of(model, loss))
        finally:
            model.close()
    whole, in_chunks = steps
    assert relative_difference(in_chunks.loss, whole.loss) < 1e-6
    assert relative_difference(all_gradients(in_chunks), all_gradients(whole)) < ROUNDING
