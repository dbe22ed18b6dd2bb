"""The published client of the Tinker API, unchanged, trains and samples on a learner.

`tox -e learner` has it installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from learnerprocess import LearnerProcess
from smallrun import tokenizer
from tinker import types
from tiny import VOCABULARY, write_checkpoint

from lema.train.learner.adapter import AdamSettings, AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in whose directory a tokenizer is, too."""
    directory = write_checkpoint("llama", tmp_path_factory.mktemp("llama")).published
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LearnerProcess]:
    process = LearnerProcess(
        model, tmp_path_factory.mktemp("learner") / "kept", ["--name", str(model)]
    )
    process.start()
    yield process
    process.stop()


@pytest.fixture
def service(process: LearnerProcess) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=process.url, api_key=process.secret)
    yield client
    client.close("success").result()


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return drawn


def weighted(seed: int, length: int = 10) -> tuple[Any, Datum]:
    tokens = ids(seed, length)
    weights = [0.0, 0.0, *[1.0] * (length - 3)]
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    own = Datum(
        torch.tensor(tokens[:-1]), torch.tensor(tokens[1:]), {"weights": torch.tensor(weights)}
    )
    return datum, own


def test_supervised_training_is_a_learners(service: Any, model: Path) -> None:
    (supported,) = service.get_server_capabilities().supported_models
    assert (supported.model_name, supported.trainable) == (str(model), True)
    client = service.create_lora_training_client(str(model), rank=4, seed=3).result()
    assert client.get_info().lora_rank == 4
    assert client.get_tokenizer().vocab_size == tokenizer().vocab_size
    learner = Learner.open(model, device="cpu", micro_batch_tokens=24, longest=64)
    learner.add("one", AdapterSpec(4, seed=3))
    pairs = [weighted(seed, 6 + seed) for seed in range(4)]
    for step in range(3):
        future = client.forward_backward([datum for datum, _ in pairs], "cross_entropy")
        rate = 1e-2 / (step + 1)
        stepped = client.optim_step(types.AdamParams(learning_rate=rate, weight_decay=0.1))
        result = future.result()
        (scored,) = learner.run([AdapterRows("one", [own for _, own in pairs], "cross_entropy")])
        assert result.metrics["loss:sum"] == scored.loss
        for output, logprobs in zip(result.loss_fn_outputs, scored.logprobs, strict=True):
            assert output["logprobs"].tolist() == logprobs.tolist()
        norm = learner.step("one", AdamSettings(learning_rate=rate, weight_decay=0.1))
        assert stepped.result().metrics == {"grad_norm:mean": norm}
    learner.close()


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_of_reinforcement_learning_learn(service: Any, model: Path, loss: str) -> None:
    client = service.create_lora_training_client(str(model), rank=4, seed=3).result()
    client.save_weights_for_sampler("start").result()
    tokens = ids(5, 12)
    sampled = client.forward([weighted(5, 12)[0]], "cross_entropy").result()
    logprobs = sampled.loss_fn_outputs[0]["logprobs"].tolist()
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": [1.0] * 11}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    for _ in range(3):
        client.forward_backward([datum], loss)
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = client.forward([datum], loss).result().loss_fn_outputs[0]["logprobs"].tolist()
    assert sum(after) > sum(logprobs)


def test_a_loss_of_ones_own_is_two_calls(service: Any, model: Path) -> None:
    clients = [
        service.create_lora_training_client(str(model), rank=4, seed=8).result() for _ in range(2)
    ]
    data = [weighted(seed)[0] for seed in range(2)]

    def own(rows: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        weights = [torch.tensor(row.loss_fn_inputs["weights"].data) for row in rows]
        loss = -sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True))
        return loss, {"rows:sum": float(len(rows))}

    result = clients[0].forward_backward_custom(data, own).result()
    plain = clients[1].forward_backward(data, "cross_entropy").result()
    assert result.metrics["rows:sum"] == 2.0
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)
    norms = [
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm:mean"]
        for client in clients
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_states_are_saved_loaded_and_listed(service: Any, model: Path) -> None:
    client = service.create_lora_training_client(str(model), rank=2, seed=1).result()
    data = [weighted(1)[0]]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2))
    path = client.save_state("first").result().path
    expected = client.forward(data, "cross_entropy").result().metrics
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.forward(data, "cross_entropy").result().metrics == expected
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2))
    assert client.forward(data, "cross_entropy").result().metrics != expected
    client.load_state_with_optimizer(path).result()
    assert client.forward(data, "cross_entropy").result().metrics == expected
    rest = service.create_rest_client()
    (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert listed.tinker_path == path
    runs = rest.list_training_runs().result().training_runs
    assert client.model_id in [run.training_run_id for run in runs]
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 2


def test_texts_are_sampled_and_scored(service: Any, model: Path) -> None:
    client = service.create_lora_training_client(str(model), rank=2, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(ids(2, 5))
    params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=7, stop=[])
    response = sampler.sample(prompt, 3, params).result()
    assert [len(one.tokens) for one in response.sequences] == [4, 4, 4]
    assert response.sequences[0].logprobs is not None
    scores = sampler.compute_logprobs(prompt).result()
    assert scores[0] is None
    assert all(score < 0 for score in scores[1:])
    base = service.create_sampling_client(base_model=str(model)).result()
    assert base.sample(prompt, 1, params).result().sequences[0].stop_reason == "length"


def test_a_mistake_is_told_and_the_client_goes_on(service: Any, model: Path) -> None:
    client = service.create_lora_training_client(str(model), rank=2, seed=1).result()
    tokens = ids(2, 80)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 79},
    )
    with pytest.raises(tinker.TinkerError, match="79 tokens"):
        client.forward_backward([datum], "cross_entropy").result()
    client.forward_backward([weighted(1)[0]], "cross_entropy").result()
    client.optim_step(types.AdamParams()).result()


def test_another_secret_is_refused(process: LearnerProcess) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=process.url, api_key="tml-" + "0" * 30).holder  # noqa: B018
