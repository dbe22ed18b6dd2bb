"""Every type that trains on rows with images takes them in packs and in chunks with the gradients
of the same rows whole and alone, or refuses that with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from imagerows import STREAMED_IMAGES, TOWERLESS, image_batch, publish_with_images
from mediasteps import opened, settings
from packedways import step_of
from parity import Outcome, all_gradients, relative_difference
from publishedclass import published_class
from torch import Tensor
from transformers import AutoConfig

from lema.data.media.rows import RowMedia
from lema.engine.packing import check_packing
from lema.errors import ConfigError
from lema.model.inputs import IMAGES

CHUNK = 5
ROUNDING = 5e-6  # of all gradients together: a delta net rounds more
HANDS_ON = "hand on more than the hidden state"
STATE = "rows of a pack influence each other"  # as a run says, before its first step
REFUSED = {
    **{("gemma4", way): HANDS_ON for way in ("chunks", "packs in chunks")},
    **{
        (kind, way): STATE
        # of the last, transformers takes no positions of text beside those of several kinds
        for kind in ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "hunyuan_vl")
        for way in ("packs", "packs in chunks")
    },
}
OF_TOKENS = ("input_ids", "attention_mask", "labels")
Batch = dict[str, Any]


class Drawn:
    """Pixels of rows that a processor would have made."""

    def __init__(self, batch: Batch, lengths: list[list[int]] | None = None) -> None:
        self.lengths = lengths
        self._values = {name: value for name, value in batch.items() if name not in OF_TOKENS}

    def inputs(self, ids: Tensor) -> Batch:
        """Return what a model is given besides the tokens."""
        assert len(ids) == 3
        return self._values


def alone(batch: Batch) -> Batch:
    """Return the rows side by side."""
    return {**{name: batch[name] for name in OF_TOKENS}, IMAGES: Drawn(batch)}


def in_packs(batch: Batch) -> Batch:
    """Return the first two rows in a pack, and the last in another, which has padding."""
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    packs: Batch = {"input_ids": [], "labels": [], "position_ids": []}
    width = sum(lengths[:2])
    for rows in ((0, 1), (2,)):
        parts = {
            "input_ids": [batch["input_ids"][row, : lengths[row]] for row in rows],
            "labels": [batch["labels"][row, : lengths[row]] for row in rows],
            "position_ids": [torch.arange(lengths[row]) for row in rows],
        }
        for labels in parts["labels"]:
            labels[0] = -100
        for name, values in parts.items():
            pack = torch.full((width,), -100 if name == "labels" else 0)
            joined = torch.cat(values)
            pack[: len(joined)] = joined
            packs[name].append(pack)
    values = {name: torch.stack(of_packs) for name, of_packs in packs.items()}
    return {**values, IMAGES: Drawn(batch, [lengths[:2], lengths[2:]])}


class Silent:
    """A processor that is given no images."""

    def __init__(self, batch: Batch) -> None:
        self._names = [name for name in batch if "token_type" in name]

    def inputs(self, texts: list[None], _: object) -> Batch:
        return {name: torch.zeros(len(texts), 1) for name in ("input_ids", *self._names)}


def texts_of(batch: Batch) -> list[Batch]:
    """Return rows without images of a data set in which others have some."""
    images: Any = RowMedia([None], cast(Any, Silent(batch)), cast(Any, None))
    return [{"input_ids": [*range(first, first + 6)], IMAGES: images} for first in (5, 20, 40, 60)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", STREAMED_IMAGES)
def test_packs_and_chunks_have_the_gradients_of_whole_rows(model_type: str, tmp_path: Path) -> None:
    directory = publish_with_images(model_type, tmp_path / "model")
    kind = published_class(AutoConfig.from_pretrained(directory))
    batch = image_batch(kind.from_pretrained(directory), [2, 1, 0])
    ways: dict[str, tuple[Callable[[Batch], Batch], Batch]] = {
        "whole": (alone, {}),
        "packs": (in_packs, {}),
        "chunks": (alone, {"sequence_chunk": CHUNK}),
        "packs in chunks": (in_packs, {"sequence_chunk": CHUNK}),
    }
    outcomes: dict[str, Outcome] = {}
    for way, (form, changes) in ways.items():
        options = {"lora_target_modules": TOWERLESS, "gradient_checkpointing": True, **changes}
        with opened(settings(directory, tmp_path, [], **options)) as model:
            why = REFUSED.get((model_type, way))
            if why is not None:
                with pytest.raises(ConfigError, match=why):
                    if "packs" in way:
                        check_packing(model.adapter, texts_of(batch), 2)
                    step_of(model, [form(batch)])
                continue
            if "packs" in way:
                check_packing(model.adapter, texts_of(batch), 2)
            outcomes[way] = step_of(model, [form(batch)])
    expected = outcomes["whole"]
    for way, step in outcomes.items():
        assert relative_difference(step.loss, expected.loss) < 2e-6, way
        assert relative_difference(all_gradients(step), all_gradients(expected)) < ROUNDING, way
