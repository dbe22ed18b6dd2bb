"""Rows of a learner with images: log-probabilities and gradients are those of PEFT on the whole
published class, on what its processor makes of the same images.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from imageprocessors import picture, publish_with_processor
from peft import LoraConfig, get_peft_model
from publishedclass import published_class
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from lema.errors import DataError
from lema.storage.modelfiles import load_processor
from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.images import LearnerImages, RowOfChunks
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum, micro_batches_of

SPEC = AdapterSpec(4, seed=2)
TOKENS = 90  # of a micro-batch
PICTURES = ((1,), (), (2, 3))  # of each row


@pytest.fixture(scope="module", params=["llava", "qwen2_vl", "qwen3_vl"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_with_processor(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture
def learner(directory: Path) -> Iterator[Learner]:
    opened = Learner.open(
        directory, device="cpu", micro_batch_tokens=TOKENS, longest=256, modalities="all"
    )
    yield opened
    opened.close()


def png(number: int) -> bytes:
    content = io.BytesIO()
    picture(number).save(content, "PNG")
    return content.getvalue()


def row_of(images: LearnerImages | None, pictures: Sequence[int], seed: int) -> Datum:
    """Text, and each picture with text after it."""
    generator = torch.Generator().manual_seed(seed)
    row = RowOfChunks(images)
    row.add_tokens(torch.randint(10, 40, (5,), generator=generator))
    for number in pictures:
        row.add_image(png(number))
        row.add_tokens(torch.randint(10, 40, (4,), generator=generator))
    tokens = row.tokens
    weights = torch.ones(len(tokens))
    for image in row.images:
        weights[image.first : image.first + image.num_tokens] = 0.0
    return Datum(tokens, tokens.roll(-1), {"weights": weights}, images=row.images)


def whole_inputs(processor: Any, part: Any, rows: dict[int, Sequence[int]]) -> dict[str, Tensor]:
    """What the whole model is given: tokens, and what the processor makes of all pictures of the
    micro-batch together.
    """
    inputs: dict[str, Tensor] = part.inputs()
    pictures = [picture(number) for datum in part.data for number in rows[id(datum)]]
    if pictures:
        text = "".join([processor.image_token] * len(pictures))
        made = processor(text=[text], images=[pictures], return_tensors="pt")
        columns = {name for name in made if "token_type" in name}
        inputs |= {
            name: made[name]
            for name in made
            if name not in ("input_ids", "attention_mask", *columns)
        }
        placeholder = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        for name in columns:
            inputs[name] = (inputs["input_ids"] == placeholder).to(made[name].dtype)
    return inputs


def test_rows_with_images_are_those_of_the_whole_model(directory: Path, learner: Learner) -> None:
    data = [row_of(learner.images, numbers, seed) for seed, numbers in enumerate(PICTURES)]
    numbers = {id(datum): of_row for datum, of_row in zip(data, PICTURES, strict=True)}
    request = AdapterRows("one", data, "cross_entropy")
    learner.check_rows(request)
    adapter = learner.add("one", SPEC)
    (scored,) = learner.run([request])
    config = AutoConfig.from_pretrained(directory)
    whole: Any = published_class(config).from_pretrained(directory)
    processor: Any = load_processor(directory, trusted=False)
    torch.manual_seed(SPEC.seed)
    targets = learner._targets.chosen(SPEC)
    whole = get_peft_model(whole, LoraConfig(r=4, lora_alpha=32, target_modules=targets))
    whole.eval()
    row = 0
    for part in micro_batches_of([request], TOKENS):
        inputs = whole_inputs(processor, part, numbers)
        logits = whole(**inputs).logits.float()
        width = logits.shape[1]
        expected = torch.zeros(len(part.data), width, dtype=torch.long)
        weights = torch.zeros(len(part.data), width)
        for at, datum in enumerate(part.data):
            expected[at, : len(datum.tokens)] = datum.targets
            weights[at, : len(datum.tokens)] = datum.tensors["weights"]
        losses = cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="none")
        losses = losses.view(expected.shape)
        (losses * weights).sum().backward()
        for at, datum in enumerate(part.data):
            assert torch.equal(-losses[at, : len(datum.tokens)], scored.logprobs[row]), row
            row += 1
    own = {n.replace(".default.", "."): p for n, p in whole.named_parameters() if p.requires_grad}
    assert own.keys() == adapter.parameters.keys()
    for path, parameter in adapter.parameters.items():
        assert torch.equal(own[path].grad, parameter.grad), path


def test_what_is_no_image_of_a_row_is_refused(learner: Learner) -> None:
    images = learner.images
    assert images is not None
    row = RowOfChunks(images)
    for content, said in (
        (b"", "the file is empty"),
        (b"GIF89a", "no image of a format"),
        (b"no image", "no image of a format"),
        (png(1)[:60], "cannot be decoded"),
        (bytes(40_000_000), "40,000,000 bytes"),
    ):
        with pytest.raises(DataError, match=said):
            row.add_image(content)
    with pytest.raises(DataError, match="the model's token for an image in its text"):
        row.add_tokens(torch.tensor([5, *images.placeholders]))
    with pytest.raises(DataError, match="was started for text alone"):
        RowOfChunks(None).add_image(png(1))
