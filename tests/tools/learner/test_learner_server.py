"""A server with the Tinker API, asked by plain HTTP: what it trains is what a learner trains, and
requests have their order and their answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learnerclient import Client, logprobs_of, loss_of, rows_body, running
from peft import PeftModel
from safetensors.torch import load_file
from tiny import VOCABULARY, Checkpoint
from transformers import AutoModelForCausalLM

from lema.train.learner.adapter import AdamSettings, AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum
from lema_tools.learner.service import Service
from lema_tools.learner.wire import _message

CheckpointOf = Callable[..., Checkpoint]


def data(seed: int, lengths: tuple[int, ...] = (9, 7, 12)) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (length + 1,), generator=generator)
        rows.append(Datum(ids[:-1], ids[1:], {"weights": torch.rand(length, generator=generator)}))
    return rows


@pytest.fixture(scope="module")
def served(
    checkpoint_of: CheckpointOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Client, Service]]:
    directory = tmp_path_factory.mktemp("learner")
    with running(directory, checkpoint_of("llama").streamed) as pair:
        yield pair


@pytest.fixture
def client(served: tuple[Client, Service]) -> Client:
    return served[0]


def test_training_is_a_learners(
    client: Client, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    session = client.session()
    model = client.model(session)
    learner = Learner.open(
        checkpoint_of("llama").streamed, device="cpu", micro_batch_tokens=24, longest=64
    )
    adapter = learner.add("one", AdapterSpec(4, seed=1))
    for step in range(2):
        answer = client.train(model, 1 + 2 * step, data(step))
        (scored,) = learner.run([AdapterRows("one", data(step), "cross_entropy")])
        assert all(map(torch.equal, logprobs_of(answer), scored.logprobs))
        assert loss_of(answer) == scored.loss
        norm = learner.step("one", AdamSettings(learning_rate=1e-2))
        assert client.step(model, 2 + 2 * step).json == {"metrics": {"grad_norm:mean": norm}}
    saved = client.result(client.post("save_weights", model_id=model, path="a", seq_id=5))
    path = saved.json["path"]
    assert path == f"tinker://{model}/weights/a"
    own = adapter.state()
    assert client.post("weights_info", tinker_path=path).json["lora_rank"] == 4
    again = client.result(
        client.post("load_weights", session_id=session, model_seq_id=7, path=path, optimizer=True)
    ).json["model_id"]
    later = client.train(again, 1, data(9), forward_only=True)
    assert (
        logprobs_of(later)[0].tolist()
        == logprobs_of(client.train(model, 6, data(9), forward_only=True))[0].tolist()
    )
    # the optimizer's state came with it, so the next step is the same as well
    for name, first in ((model, 7), (again, 2)):
        client.train(name, first, data(4))
        client.step(name, first + 1)
    learner.run([AdapterRows("one", data(4), "cross_entropy")])
    learner.step("one", AdamSettings(learning_rate=1e-2))
    outcomes = [
        client.train(name, seq_id, data(8), forward_only=True).body
        for name, seq_id in ((model, 9), (again, 4))
    ]
    assert outcomes[0] == outcomes[1]
    assert own.keys() == adapter.state().keys()
    learner.close()


def test_what_is_published_is_pefts(
    served: tuple[Client, Service], checkpoint_of: CheckpointOf
) -> None:
    client, service = served
    model = client.model(client.session(), seed=4)
    client.train(model, 1, data(1))
    client.step(model, 2)
    scored = client.train(model, 3, data(2), forward_only=True)
    answer = client.result(
        client.post("save_weights_for_sampler", model_id=model, path="s", seq_id=4)
    )
    assert answer.json["path"] == f"tinker://{model}/sampler_weights/s"
    directory = next(service._store.checkpoints.glob("*/sampler_weights/s"))
    names = load_file(directory / "adapter_model.safetensors")
    assert not [name for name in names if "lora_" not in name]
    base = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published)
    whole = PeftModel.from_pretrained(base, directory)
    for row, logprobs in zip(data(2), logprobs_of(scored), strict=True):
        with torch.no_grad():
            logits = whole(input_ids=row.tokens[None]).logits[0].float()
        own = logits.log_softmax(-1).gather(-1, row.targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs, own, rtol=1e-5, atol=1e-5)
    listed = client.get(f"training_runs/{model}/checkpoints").json["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["sampler_weights/s"]
    run = client.get(f"training_runs/{model}").json
    assert run["last_sampler_checkpoint"]["tinker_path"] == answer.json["path"]
    gone = client.ask("DELETE", f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/s")
    assert gone.status == 204
    assert not directory.exists()


def test_requests_have_their_order_whenever_they_come(client: Client) -> None:
    session = client.session()
    models = [client.model(session, number) for number in range(2)]
    for seq_id in (1, 3, 4):
        assert client.rows(rows_body(models[0], seq_id, data(seq_id))).status == 200
    client.post("optim_step", model_id=models[0], seq_id=5, adam_params={})
    answered = client.retrieve(f"{models[0]}:1")
    assert client.rows(rows_body(models[0], 2, data(2))).status == 200
    for seq_id in (1, 2, 3, 4):
        own = client.train(models[1], seq_id, data(seq_id))
        assert client.retrieve(f"{models[0]}:{seq_id}").body == own.body
    step = client.result(client.post("optim_step", model_id=models[1], seq_id=5, adam_params={}))
    assert client.retrieve(f"{models[0]}:5").json == step.json
    assert client.retrieve(f"{models[0]}:1").body == answered.body


def test_a_request_that_comes_again_is_done_once(client: Client) -> None:
    model = client.model(client.session())
    first = client.train(model, 1, data(1))
    assert client.train(model, 1, data(1)).body == first.body
    step = client.step(model, 2)
    assert client.step(model, 2).json == step.json
    assert client.post("optim_step", model_id=model, seq_id=2, adam_params={}).status == 400
    assert client.rows(rows_body(model, 1, data(3))).status == 400
    info = client.post("get_info", model_id=model).json
    assert info["lora_rank"] == 4
    assert client.train(model, 3, data(2), forward_only=True).status == 200


def test_what_is_wrong_with_rows_is_their_answer(client: Client) -> None:
    model = client.model(client.session())
    wrong = [Datum(torch.tensor([3, 4]), torch.tensor([4, 10_000]))]
    answer = client.train(model, 1, wrong).json
    assert answer["category"] == "user"
    assert "vocabulary" in answer["error"]
    assert client.train(model, 2, data(1), loss="nll").json["category"] == "user"
    assert "nothing to step with" in client.step(model, 3).json["error"]
    # and the model goes on
    client.train(model, 4, data(1))
    assert "grad_norm:mean" in client.step(model, 5).json["metrics"]
    first = client.result(client.post("save_weights", model_id=model, path="x", seq_id=6))
    assert "error" not in first.json
    again = client.result(client.post("save_weights", model_id=model, path="x", seq_id=7))
    assert "already" in again.json["error"]
    over = client.post("save_weights", model_id=model, path="x", seq_id=8, overwrite=True)
    assert client.result(over).json["path"] == first.json["path"]


def test_texts_are_sampled_by_the_model_itself(client: Client, checkpoint_of: CheckpointOf) -> None:
    session = client.session()
    model = client.model(session, seed=6)
    client.train(model, 1, data(1))
    client.step(model, 2, learning_rate=0.1)
    client.result(client.post("save_weights_for_sampler", model_id=model, path="s", seq_id=3))
    prompt = data(5)[0].tokens.tolist()
    asked = {
        "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "stop": []},
    }
    texts = {}
    sources = {
        "adapter": {"model_path": f"tinker://{model}/sampler_weights/s"},
        "base": {"base_model": "tiny"},
    }
    for number, (name, source) in enumerate(sources.items()):
        made = client.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=number, **source
        ).json["sampling_session_id"]
        sampled = client.result(
            client.post("asample", sampling_session_id=made, seq_id=0, num_samples=2, **asked)
        )
        message = _message("SampleResponse").FromString(sampled.body)
        tokens = [np.frombuffer(one.tokens, dtype="<i4").tolist() for one in message.sequences]
        assert len(tokens) == 2
        assert tokens[0] == tokens[1]
        texts[name] = tokens[0], np.frombuffer(message.sequences[0].logprobs, dtype="<f4")
    assert texts["adapter"][0] != texts["base"][0]
    # what was sampled is scored with the same numbers by the learner
    tokens, logprobs = texts["adapter"]
    ids = torch.tensor([*prompt, *tokens])
    row = Datum(ids[:-1], ids[1:])
    (scored,) = logprobs_of(client.train(model, 4, [row], forward_only=True))
    torch.testing.assert_close(scored[-6:], torch.tensor(logprobs), rtol=1e-4, atol=1e-4)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published)
    greedy = whole.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert greedy[0, len(prompt) :].tolist() == texts["base"][0]


def test_texts_differ_unless_they_have_one_seed(client: Client) -> None:
    session = client.session()
    made = client.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
    ).json["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]}
    texts = []
    for number, seed in enumerate([None, None, 3, 3]):
        params = {"max_tokens": 12, "seed": seed, "stop": []}
        asked = {"seq_id": number, "prompt": prompt, "sampling_params": params}
        sampled = client.result(client.post("asample", sampling_session_id=made, **asked))
        message = _message("SampleResponse").FromString(sampled.body)
        texts.append(np.frombuffer(message.sequences[0].tokens, dtype="<i4").tolist())
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


def test_the_page_and_the_metrics_count(client: Client) -> None:
    model = client.model(client.session())
    client.train(model, 1, data(1))
    client.step(model, 2)
    page = client.ask("GET", "/").body.decode()
    assert model in page
    assert "Optimizer steps" in page
    metrics = client.ask("GET", "/metrics").body.decode()
    values = dict(line.split() for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["lema_learner_passes_total"]) >= 1
    assert float(values["lema_learner_optimizer_steps_total"]) >= 1
    routes = client.ask("GET", "/openapi.json").json["paths"]
    assert "/api/v1/optim_step" in routes
    assert client.ask("GET", "/docs").status == 200
