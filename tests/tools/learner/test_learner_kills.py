"""A server is killed at any instant, and nothing that it has acknowledged is lost: adapters are
those of a learner that nobody killed, bit for bit, and no answer is ever given in two versions.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException

import pytest
import torch
from learnerclient import Answer, Client, logprobs_of, rows_body
from learnerprocess import LearnerProcess
from test_learner_server import data
from tiny import Checkpoint

from lema.train.learner.adapter import AdamSettings, AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows

CheckpointOf = Callable[..., Checkpoint]
KILLS = int(os.environ.get("LEARNER_KILLS", "4"))
ADAM = AdamSettings(learning_rate=1e-2)
MODELS = 2


@pytest.fixture(scope="module")
def process(
    checkpoint_of: CheckpointOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LearnerProcess]:
    directory = tmp_path_factory.mktemp("learner") / "kept"
    process = LearnerProcess(checkpoint_of("llama").streamed, directory)
    process.start()
    yield process
    process.stop()


class Patient:
    """A client that asks again where it gets no answer, as the API's own does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.answers: dict[str, bytes] = {}

    def insist(self, ask: Callable[[], Answer]) -> Answer:
        while True:
            try:
                answer = ask()
            except (OSError, HTTPException):
                time.sleep(0.02)
                continue
            if answer.status not in (408, 429, 503, 507):
                assert answer.status == 200, answer.body
                return answer

    def result(self, ask: Callable[[], Answer]) -> Answer:
        name = self.insist(ask).json["request_id"]
        answer = self.insist(lambda: self._client.post("retrieve_future", request_id=name))
        self.answers[name] = answer.body
        return answer

    def ask_again(self) -> None:
        """All answers are still what they were."""
        for name, body in self.answers.items():
            again = self.insist(
                lambda name=name: self._client.post("retrieve_future", request_id=name)
            )  # type: ignore[misc]
            assert again.body == body, name


def test_no_acknowledged_step_is_lost(process: LearnerProcess, checkpoint_of: CheckpointOf) -> None:
    client = Client(process.port, process.secret)
    patient = Patient(client)
    models = []
    for number in range(MODELS):
        session = client.session()
        models.append(client.model(session, seed=number))
    drawn = random.Random(7)
    killed = threading.Event()

    def kill() -> None:
        for _ in range(KILLS):
            time.sleep(drawn.uniform(0.02, 0.6))
            assert process.kill() == -signal.SIGKILL
            process.start()
        killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    steps = 0
    while not killed.is_set() or steps < 3:
        for number, model in enumerate(models):
            rows = rows_body(model, 2 * steps + 1, data(100 * number + steps, (8, 6)))
            patient.result(lambda rows=rows: client.rows(rows))  # type: ignore[misc]
            asked = {
                "model_id": model,
                "seq_id": 2 * steps + 2,
                "adam_params": {"learning_rate": 1e-2},
            }
            patient.result(lambda asked=asked: client.post("optim_step", **asked))  # type: ignore[misc]
        steps += 1
    killer.join()
    patient.ask_again()
    learner = Learner.open(
        checkpoint_of("llama").streamed, device="cpu", micro_batch_tokens=24, longest=64
    )
    for number, model in enumerate(models):
        name = f"own{number}"
        learner.add(name, AdapterSpec(4, seed=number))
        for step in range(steps):
            learner.run([AdapterRows(name, data(100 * number + step, (8, 6)), "cross_entropy")])
            learner.step(name, ADAM)
        last = [AdapterRows(name, data(1), "cross_entropy")]
        (scored,) = learner.run(last, differentiate=False)
        answer = client.train(model, 2 * steps + 1, data(1), forward_only=True)
        assert all(map(torch.equal, logprobs_of(answer), scored.logprobs))
    learner.close()


def test_gradients_since_the_last_step_outlive_a_kill(
    process: LearnerProcess, checkpoint_of: CheckpointOf
) -> None:
    client = Client(process.port, process.secret)
    model = client.model(client.session())
    client.train(model, 1, data(1))
    client.step(model, 2)
    scored = client.train(model, 3, data(2))
    waits = client.rows(rows_body(model, 4, data(3)))  # accepted, perhaps not done
    process.kill()
    process.start()
    assert client.retrieve(f"{model}:3").body == scored.body
    assert client.result(waits).status == 200
    norm = client.step(model, 5).json["metrics"]["grad_norm:mean"]
    learner = Learner.open(
        checkpoint_of("llama").streamed, device="cpu", micro_batch_tokens=24, longest=64
    )
    learner.add("own", AdapterSpec(4, seed=1))
    learner.run([AdapterRows("own", data(1), "cross_entropy")])
    learner.step("own", ADAM)
    for seed in (2, 3):
        learner.run([AdapterRows("own", data(seed), "cross_entropy")])
    assert learner.step("own", ADAM) == norm
    learner.close()


def test_a_polite_end_leaves_nothing_undone(process: LearnerProcess) -> None:
    client = Client(process.port, process.secret)
    model = client.model(client.session())
    futures = [client.rows(rows_body(model, seq_id, data(seq_id))) for seq_id in range(1, 6)]
    assert process.kill(signal.SIGTERM) == 0
    process.start()
    assert {client.result(future).status for future in futures} == {200}
    assert client.step(model, 6).status == 200
