"""What rows of the published client have besides text: images, and experts that a server chose."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from imageprocessors import picture, publish_with_processor
from learnerprocess import LearnerProcess
from publishedclass import publish
from tinker import types
from transformers import MixtralConfig

from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.images import RowOfChunks
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LAYERS = 8
CHOSEN = 2


@contextmanager
def client_of(model: Path, folder: Path, *arguments: str) -> Iterator[Any]:
    folder.mkdir()
    options = ["--name", str(model), "--max-length", "256", "--micro-batch-tokens", "90"]
    process = LearnerProcess(model, folder / "kept", [*options, *arguments])
    process.start()
    service = tinker.ServiceClient(base_url=process.url, api_key=process.secret)
    try:
        yield service.create_lora_training_client(str(model), rank=4, seed=3).result()
        service.close("success").result()
    finally:
        process.stop()


def test_rows_with_images_train(tmp_path: Path) -> None:
    model = publish_with_processor("qwen2_vl", tmp_path / "model")
    content = io.BytesIO()
    picture(1).save(content, "PNG")
    before, after = [11, 12, 13], [14, 15, 16, 17]
    learner = Learner.open(
        model, device="cpu", micro_batch_tokens=90, longest=256, modalities="all"
    )
    row = RowOfChunks(learner.images)
    row.add_tokens(torch.tensor(before))
    row.add_image(content.getvalue())
    row.add_tokens(torch.tensor(after))
    tokens = row.tokens
    weights = torch.tensor([0.0] * (len(tokens) - 4) + [1.0] * 4)
    own = Datum(tokens, tokens.roll(-1), {"weights": weights}, images=row.images)
    learner.add("one", AdapterSpec(4, seed=3))
    (scored,) = learner.run([AdapterRows("one", [own], "cross_entropy")])
    learner.close()
    (image,) = row.images
    chunks = [
        types.EncodedTextChunk(tokens=before),
        types.ImageChunk(data=content.getvalue(), format="png", expected_tokens=image.num_tokens),
        types.EncodedTextChunk(tokens=after),
    ]
    inputs = {"target_tokens": own.targets.tolist(), "weights": weights.tolist()}
    datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    with client_of(model, tmp_path / "images", "--set", "modalities=all") as client:
        result = client.forward_backward([datum], "cross_entropy").result()
        assert result.loss_fn_outputs[0]["logprobs"].tolist() == scored.logprobs[0].tolist()
        assert client.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0
    refused = pytest.raises(tinker.TinkerError, match="started for text alone")
    with client_of(model, tmp_path / "text") as client, refused:
        client.forward_backward([datum], "cross_entropy").result()


def test_rows_bring_the_experts_of_a_server(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=256,
    )
    model = publish("mixtral", tmp_path / "model", config)
    tokens = list(range(5, 15))
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(9, LAYERS, 4, generator=generator)
    choices = scores.argsort(dim=-1)[..., :CHOSEN].flatten(1)
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 9}
    routed = types.TensorData(
        data=choices.flatten().tolist(), dtype="int64", shape=[*choices.shape]
    )
    model_input = types.ModelInput.from_ints(tokens[:-1])
    data = [
        types.Datum(model_input=model_input, loss_fn_inputs=inputs | more)
        for more in ({"routed_experts": routed}, {})
    ]
    learner = Learner.open(model, device="cpu", micro_batch_tokens=90, longest=256)
    learner.add("one", AdapterSpec(4, seed=3))
    ids = torch.tensor(tokens)
    own = [Datum(ids[:-1], ids[1:], {}, of_row) for of_row in (choices, None)]
    (scored,) = learner.run([AdapterRows("one", own, "cross_entropy")])
    learner.close()
    with client_of(model, tmp_path / "experts") as client:
        result = client.forward_backward(data, "cross_entropy").result()
        outputs = [output["logprobs"].tolist() for output in result.loss_fn_outputs]
        assert outputs == [logprobs.tolist() for logprobs in scored.logprobs]
        assert outputs[0] != outputs[1]
