"""Steps of LEMA's own trainer on rows with images, videos or sounds, and the same steps of the whole
published class with PEFT, on what its processor makes of these rows.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aligned import aligned
from parity import draw_b, trained
from peft import get_peft_model
from PIL import Image
from publishedclass import published_class
from pytest import approx
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad
from transformers import AutoConfig

from lema import LemaConfig, LemaModel
from lema.data.batches import Batches, split_batch
from lema.model.files import read_data
from lema.storage.modelfiles import load_processor

__all__ = [
    "LANGUAGE",
    "Processed",
    "assert_same_gradients",
    "compare_dpo",
    "compare_sft",
    "in_parts",
    "logps",
    "opened",
]
__all__ += ["settings", "summed", "whole"]

LANGUAGE = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|down_proj)"
RATE = 16_000
Rows = list[dict[str, Any]]


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
        return self.of([*map(in_parts, chats)], rows)

    def of(self, chats: Sequence[Any], rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return what the processor makes of chats, of which each has the files of one row."""
        processor = self._processor
        texts = [processor.apply_chat_template(chat, tokenize=False) for chat in chats]
        images = [
            [Image.open(self._folder / name) for name in row.get("images", ())] for row in rows
        ]
        sounds = [heard(self._folder / name) for row in rows for name in row.get("audios", ())]
        videos = [
            [Image.open(self._folder / name) for name in frames]
            for row in rows
            for frames in row.get("videos", ())
        ]
        shown = {"videos": videos, "do_sample_frames": False} if videos else {}
        return {
            **processor(
                text=texts,
                images=images if any(images) else None,
                **({"audio": sounds, "sampling_rate": RATE} if sounds else {}),
                **shown,
                text_kwargs={"padding": True, "padding_side": "right"},
                add_special_tokens=False,
                return_tensors="pt",
            )
        }


def heard(path: Path) -> Any:
    """Return the samples of a WAV file of 16 bits."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (RATE, 2, 1)
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return samples.astype(np.float32) / np.float32(2**15)


def in_parts(chat: Any) -> Any:
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


def logps(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the log-probability of each row's completion."""
    logits = model(**inputs).logits[:, :-1].float()
    targets = labels[:, 1:]
    chosen = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return (chosen * (targets != -100)).sum(1)


def compare_sft(config: LemaConfig, rows: Rows) -> None:
    """Take a step on all rows, whose answers have six to nine tokens, and assert that its loss and
    gradients are bitwise those of the whole model."""
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
        assert float(evaluated) == approx(float(loss.detach()), rel=1e-6)
        assert count == total


def compare_dpo(config: LemaConfig, rows: Rows) -> None:
    """Take a step on all pairs, and assert that its loss and gradients are those of the formula
    with the whole model."""
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
                in_parts([*rows[number]["prompt"], *rows[number][side]])
                for number in numbers
                for side in ("chosen", "rejected")
            ]
            inputs = processed.of(chats, [rows[number] for number in numbers for _ in range(2)])
            assert torch.equal(inputs["input_ids"], batch["input_ids"])
            of_policy = logps(reference, inputs, batch["labels"])
            with torch.no_grad(), reference.disable_adapter():
                of_base = logps(reference, inputs, batch["labels"])
            ratio = of_policy - of_base
            value = -logsigmoid(0.1 * (ratio[::2] - ratio[1::2])).sum() / len(rows)
            value.backward()
            total += value.detach()
        assert float(loss.detach()) == approx(float(total), rel=1e-6)
        assert_same_gradients(model, reference, limit=1e-6)
