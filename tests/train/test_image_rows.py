"""Rows with images in LEMA's own trainer: the numbers are those of the whole published class with
PEFT, on what its processor makes of the same rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from imageprocessors import (
    PROCESSORS,
    image_examples,
    image_rows,
    publish_with_processor,
)
from mediasteps import (
    Processed,
    assert_same_gradients,
    compare_dpo,
    compare_sft,
    in_parts,
    logps,
    opened,
    settings,
    summed,
    whole,
)
from parity import trained
from writtenonce import Directories, written_once

from lema.data.batches import Batches
from lema.errors import ConfigError
from lema.model.files import read_data

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    return written_once(tmp_path_factory.mktemp("published"), publish_with_processor)


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_loss_and_gradients_are_those_of_the_whole_model(
    model_type: str, towers: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path)
    compare_sft(settings(published(model_type), tmp_path, rows, towers=towers), rows)


TOWER = re.compile(r"vision|visual")


@pytest.mark.parametrize("targets", ["all-linear", r".*(vision_tower|visual).*(qkv|q_proj|proj)"])
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_adapters_of_a_tower_get_the_gradients_of_the_whole_model(
    model_type: str, targets: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path, 3)
    config = settings(published(model_type), tmp_path, rows, lora_target_modules=targets)
    with opened(config) as model:
        assert any(map(TOWER.search, trained(model.lora_manager)))
        data = read_data(model.config, model.files, config.train_data)
        batches = Batches(data, len(rows), micro_batch_size=3)
        (batch,) = batches.micro_batches([0])
        model.adapter.loss([batch]).backward()
        reference = whole(model)
        inputs = Processed(model, rows).inputs(batches.groups([0])[0])
        (summed(reference, inputs, batch["labels"]) / data.counts.trained_tokens).backward()
        assert_same_gradients(model, reference)


def test_towers_are_adapted_if_they_are_named(published: Directories, tmp_path: Path) -> None:
    directory = published("qwen3_vl")
    rows = image_rows(tmp_path, 3)
    for changes in ({"lora_target_modules": None}, {"modalities": "text"}):
        targets = {"lora_target_modules": "all-linear"} | changes
        with opened(settings(directory, tmp_path, rows, **targets)) as model:
            assert not any(map(TOWER.search, trained(model.lora_manager)))
    for frozen in ({"towers": "stream"}, {"tower_cache": str(tmp_path / "cache")}):
        config = settings(directory, tmp_path, rows, lora_target_modules="all-linear", **frozen)
        with pytest.raises(ConfigError, match="trains"), opened(config) as model:
            model.get_trainer().fit(read_data(config, model.files, config.train_data))


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen3_vl"])
def test_dpo_is_that_of_the_whole_model(
    model_type: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_examples(tmp_path, 4)
    compare_dpo(settings(published(model_type), tmp_path, rows, objective="dpo"), rows)


def test_kto_with_images_compares_each_prompt_with_another_completion(
    published: Directories, tmp_path: Path
) -> None:
    rows = image_examples(tmp_path, 4, labelled=True)
    config = settings(published("qwen3_vl"), tmp_path, rows, objective="kto")
    with opened(config) as model:
        data = read_data(model.config, model.files, config.train_data)
        (batch,) = Batches(data, len(rows), micro_batch_size=4).micro_batches([0])
        loss = model.adapter.loss([batch])
        loss.backward()
        reference = whole(model)
        processed = Processed(model, rows)
        order = Batches(data, len(rows), micro_batch_size=4).groups([0])[0]
        inputs = processed.inputs(order, "completion")
        assert torch.equal(inputs["input_ids"], batch["input_ids"])
        of_batch = Batches(data, len(rows)).rows(0)
        before = [of_batch[of_batch.index(number) - 1] for number in order]
        mixed = processed.of(
            [
                in_parts([*rows[number]["prompt"], *rows[other]["completion"]])
                for number, other in zip(order, before, strict=True)
            ],
            [rows[number] for number in order],
        )
        assert torch.equal(mixed["input_ids"], batch["mismatched_input_ids"])
        of_policy = logps(reference, inputs, batch["labels"])
        with torch.no_grad():
            kl_policy = logps(reference, mixed, batch["mismatched_labels"])
            with reference.disable_adapter():
                of_base = logps(reference, inputs, batch["labels"])
                kl_base = logps(reference, mixed, batch["mismatched_labels"])
        kl = (kl_policy - kl_base).mean().clamp(min=0)
        good = torch.tensor([rows[number]["label"] for number in order])
        ratio = of_policy - of_base
        losses = torch.where(
            good, 1 - (0.1 * (ratio - kl)).sigmoid(), 1 - (0.1 * (kl - ratio)).sigmoid()
        )
        losses.mean().backward()
        assert float(loss.detach()) == pytest.approx(float(losses.mean().detach()), rel=1e-6)
        assert_same_gradients(model, reference, limit=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packing": "wrapped", "overlong": "truncate"}, "would cut an image"),
        ({"cache_frozen_prefix": True, "shuffle": False}, "not kept between epochs"),
    ],
)
def test_what_does_not_go_with_images_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, published: Directories, tmp_path: Path
) -> None:
    config = settings(published("llava"), tmp_path, image_rows(tmp_path), **changes)
    with opened(config) as model, pytest.raises(ConfigError, match=reason) as refused:
        model.get_trainer().fit(config.train_data, say=lambda _: None)
    assert refused.value.where in changes
