"""Rows with images in LEMA's own trainer: the numbers are those of the whole published class with
PEFT, on what its processor makes of the same rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from imageprocessors import (
    PROCESSORS,
    image_examples,
    image_rows,
    publish_with_processor,
)
from parity import draw_b, trained
from peft import get_peft_model
from PIL import Image
from publishedclass import published_class
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad
from transformers import AutoConfig

from lema import LemaConfig, LemaModel
from lema.data.batches import Batches, split_batch
from lema.errors import ConfigError
from lema.model.files import read_data
from lema.storage.modelfiles import load_processor

LANGUAGE = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|down_proj)"
Directories = Callable[[str], Path]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    root = tmp_path_factory.mktemp("published")

    def directory(model_type: str) -> Path:
        path = root / model_type
        return path if path.exists() else publish_with_processor(model_type, path)

    return directory


def settings(model: Path, folder: Path, rows: Rows, **changes: Any) -> LemaConfig:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "device": "cpu",
        "modalities": "all",
        "lora_target_modules": LANGUAGE,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "train_data": str(data),
        "output_dir": str(folder / "out"),
        "batch_size": 4,
        "micro_batch_size": 3,
        "device_memory": None,
        "max_length": 64,
        "save_steps": 0,
    }
    return LemaConfig(str(model), **(given | changes))


@contextmanager
def opened(config: LemaConfig) -> Iterator[LemaModel]:
    model = LemaModel(config)
    try:
        model.initialize_lora()
        draw_b(model.lora_manager)
        model.skeleton.train()
        yield model
    finally:
        model.close()


def whole(model: LemaModel) -> Any:
    """Return PEFT's model of the whole published class, with the same adapter."""
    kind = published_class(AutoConfig.from_pretrained(model.directory))
    base = aligned(kind.from_pretrained(model.directory, dtype=torch.float32))
    adapter = model.lora_manager
    assert adapter is not None
    reference = get_peft_model(base, adapter.peft_config["default"])
    draw_b(reference)
    own = trained(adapter)
    with torch.no_grad():
        for name, parameter in trained(reference).items():
            parameter.copy_(own[name])
    return reference.train()


class Processed:
    """What the published processor makes of rows, given to it as any trainer gives them."""

    def __init__(self, model: LemaModel, rows: Rows) -> None:
        self._processor: Any = load_processor(model.directory, trusted=False)
        self._folder = Path(str(model.config.train_data)).parent
        self._rows = rows

    def inputs(self, numbers: Sequence[int], column: str = "messages") -> dict[str, Tensor]:
        rows = [self._rows[number] for number in numbers]
        chats = [[*row.get("prompt", []), *row[column]] for row in rows]
        return self.of([*map(_in_parts, chats)], [row["images"] for row in rows])

    def of(self, chats: Sequence[Any], names: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        processor = self._processor
        texts = [processor.apply_chat_template(chat, tokenize=False) for chat in chats]
        images = [[Image.open(self._folder / name) for name in row] for row in names]
        return {
            **processor(
                text=texts,
                images=images if any(images) else None,
                padding=True,
                padding_side="right",
                add_special_tokens=False,
                return_tensors="pt",
            )
        }


def _in_parts(chat: Any) -> Any:
    return [
        message
        if isinstance(message["content"], list)
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in chat
    ]


def assert_same_gradients(model: LemaModel, reference: Any, limit: float = 0.0) -> None:
    own = trained(model.lora_manager)
    assert any(
        bool(parameter.grad.any()) for parameter in own.values() if parameter.grad is not None
    )
    for name, parameter in trained(reference).items():
        gradient = own[name].grad
        if gradient is None or parameter.grad is None:
            given = gradient if parameter.grad is None else parameter.grad
            assert given is None or not bool(given.any()), name
            continue
        assert float((gradient - parameter.grad).abs().max()) <= limit, name


def summed(reference: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the loss as `transformers` sums it."""
    logits = reference(**inputs).logits
    targets = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    flat = logits.float().view(-1, logits.shape[-1])
    return cross_entropy(flat, targets, reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("towers", ["device", "stream"])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_loss_and_gradients_are_those_of_the_whole_model(
    model_type: str, towers: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path)
    config = settings(published(model_type), tmp_path, rows, towers=towers)
    with opened(config) as model:
        data = read_data(model.config, model.files, config.train_data)
        batches = Batches(data, len(rows), micro_batch_size=3, seed=1)
        micro_batches = batches.micro_batches([0])
        loss = model.adapter.loss(micro_batches)
        loss.backward()
        reference = whole(model)
        processed = Processed(model, rows)
        total = data.counts.trained_tokens
        assert total == sum(6 + number % 4 for number in range(len(rows)))
        values = []
        for numbers, batch in zip(batches.groups([0]), micro_batches, strict=True):
            inputs = processed.inputs(numbers)
            assert torch.equal(inputs["input_ids"], batch["input_ids"])
            value = summed(reference, inputs, batch["labels"]) / total
            value.backward()
            values.append(value.detach())
        assert torch.equal(loss.detach(), sum(values, torch.zeros(())))
        assert_same_gradients(model, reference)
        evaluated, count = model.adapter.evaluate(micro_batches)
        assert torch.equal(evaluated, loss.detach())
        assert count == total
        # cut into rows, as where memory runs out
        rows_alone = [part for batch in micro_batches for part in split_batch(batch, 1)]
        assert len(rows_alone) == len(rows)
        evaluated, count = model.adapter.evaluate(rows_alone)
        assert float(evaluated) == pytest.approx(float(loss.detach()), rel=1e-6)
        assert count == total


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


def logps(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the log-probability of each row's completion."""
    logits = model(**inputs).logits[:, :-1].float()
    targets = labels[:, 1:]
    chosen = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return (chosen * (targets != -100)).sum(1)


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen3_vl"])
def test_dpo_is_that_of_the_whole_model(
    model_type: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_examples(tmp_path, 4)
    config = settings(published(model_type), tmp_path, rows, objective="dpo")
    with opened(config) as model:
        data = read_data(model.config, model.files, config.train_data)
        batches = Batches(data, len(rows), micro_batch_size=4)
        micro_batches = batches.micro_batches([0])
        loss = model.adapter.loss(micro_batches)
        loss.backward()
        reference = whole(model)
        processed = Processed(model, rows)
        total = torch.zeros(())
        for batch, numbers in zip(micro_batches, batches.groups([0]), strict=True):
            chats = [
                _in_parts([*rows[number]["prompt"], *rows[number][side]])
                for number in numbers
                for side in ("chosen", "rejected")
            ]
            names = [rows[number]["images"] for number in numbers for _ in range(2)]
            inputs = processed.of(chats, names)
            assert torch.equal(inputs["input_ids"], batch["input_ids"])
            of_policy = logps(reference, inputs, batch["labels"])
            with torch.no_grad(), reference.disable_adapter():
                of_base = logps(reference, inputs, batch["labels"])
            ratio = of_policy - of_base
            value = -logsigmoid(0.1 * (ratio[::2] - ratio[1::2])).sum() / len(rows)
            value.backward()
            total += value.detach()
        assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
        assert_same_gradients(model, reference, limit=1e-6)


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
                _in_parts([*rows[number]["prompt"], *rows[other]["completion"]])
                for number, other in zip(order, before, strict=True)
            ],
            [rows[number]["images"] for number in order],
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
        ({"packing": True}, "whose positions a model counts anew for each row"),
        ({"sequence_chunk": 8}, "among the tokens of a whole sequence"),
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
