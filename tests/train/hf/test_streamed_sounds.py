"""`lema.streamed` of a published class that hears, or sees videos: the numbers of the whole model
with PEFT.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import difference
from imagerows import TOWERLESS, publish_with_images
from parity import draw_b
from peft import LoraConfig
from soundrows import SOUND_TYPES, VIDEO_TYPES, publish_with_sounds, sound_batch, video_batch
from torch import Tensor
from wholesteps import numbers_of_step, whole_as

import lema
from lema.errors import ConfigError

SEED = 42
KINDS = (*SOUND_TYPES, *VIDEO_TYPES)
ROWS = ([2, 1, 0], [1], [0, 0])
WAYS = [("all-linear", "device"), (TOWERLESS.replace("tower", "tower|audio"), "stream")]


def publish(kind: str, directory: Path) -> Path:
    write = publish_with_sounds if kind in SOUND_TYPES else publish_with_images
    return write(kind, directory)


def batch_of(model: Any, kind: str, counts: list[int]) -> dict[str, Tensor]:
    return sound_batch(kind, counts) if kind in SOUND_TYPES else video_batch(model, counts)


@pytest.mark.parametrize(("targets", "towers"), WAYS, ids=["all", "streamed towers"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_heard_or_seen_moving_trains_bitwise(
    kind: str, targets: str, towers: str, tmp_path: Path
) -> None:
    directory = publish(kind, tmp_path)
    adapter = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    settings = {"modalities": "all", "towers": towers, "device": "cpu", "seed": SEED}
    model = lema.streamed(directory, adapter, **settings)
    draw_b(model)
    model.train()
    reference = whole_as(model, directory, SEED)
    losses = []
    for counts in ROWS:
        batch = batch_of(reference, kind, counts)
        expected = numbers_of_step(reference, batch)
        losses.append(expected["loss"].item())
        numbers = numbers_of_step(model, batch)
        for name in expected.keys() | numbers.keys():
            assert difference(numbers.get(name), expected.get(name)) == 0.0, name
        if sum(counts):  # and what is seen or heard does matter
            name = "input_features" if kind in SOUND_TYPES else "pixel_values_videos"
            with torch.no_grad():
                assert not torch.equal(
                    model(**batch | {name: batch[name] + 1}).logits, expected["logits"]
                )
    assert len(set(losses)) == len(ROWS)
    model.close()


@pytest.mark.parametrize("kind", SOUND_TYPES)
def test_a_model_opened_for_text_refuses_sounds_in_a_sentence(kind: str, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = lema.streamed(publish(kind, tmp_path), adapter, device="cpu")
    with pytest.raises(ConfigError, match='set modalities="all"'):
        model(**sound_batch(kind, [1]))
    assert model(**sound_batch(kind, [0])).loss is not None
    model.close()
