"""A plain client of a learner's HTTP interface, without the Tinker API's own, and a server to ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from torch import Tensor

from lema.train.learner.learner import Learner
from lema.train.learner.rows import Datum
from lema_tools.learner.access import Tokens
from lema_tools.learner.app import application
from lema_tools.learner.service import Limits, Service
from lema_tools.learner.store import Store
from lema_tools.learner.wire import _message

__all__ = ["Answer", "Client", "open_service", "rows_body", "running", "serving"]

NAME = "tiny"
LONGEST = 64


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server."""

    def __init__(self, port: int, secret: str) -> None:
        self._port = port
        self._secret = secret

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            sent = {"X-API-Key": self._secret} if headers is None else dict(headers)
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            connection.close()

    def post(self, route: str, /, **what: Any) -> Answer:
        headers = {"X-API-Key": self._secret, "Content-Type": "application/json"}
        return self.ask("POST", f"/api/v1/{route}", json.dumps(what).encode(), headers)

    def get(self, path: str) -> Answer:
        return self.ask("GET", f"/api/v1/{path}")

    def rows(self, body: bytes) -> Answer:
        headers = {"X-API-Key": self._secret, "Content-Type": "application/x-protobuf"}
        return self.ask("POST", "/api/v1/forward_backward", body, headers)

    def session(self) -> str:
        name: str = self.post("create_session", tags=[], sdk_version="0").json["session_id"]
        return name

    def model(self, session: str, number: int = 0, **lora: Any) -> str:
        asked = {"rank": 4, "seed": 1, **lora}
        answer = self.post(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model=NAME,
            lora_config=asked,
        )
        assert answer.status == 200, answer.body
        name: str = self.result(answer).json["model_id"]
        return name

    def retrieve(self, request_id: str) -> Answer:
        """Ask for an answer until it is there."""
        while True:
            answer = self.post("retrieve_future", request_id=request_id)
            if answer.status != 408:
                return answer

    def result(self, future: Answer) -> Answer:
        assert future.status == 200, future.body
        return self.retrieve(future.json["request_id"])

    def train(self, model: str, seq_id: int, data: Sequence[Datum], **options: Any) -> Answer:
        return self.result(self.rows(rows_body(model, seq_id, data, **options)))

    def step(self, model: str, seq_id: int, **adam: Any) -> Answer:
        params = {"learning_rate": 1e-2, **adam}
        return self.result(
            self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=params)
        )


def tensor_message(tensor: Tensor) -> Any:
    kind = 1 if tensor.is_floating_point() else 2
    values = tensor.numpy().astype("<f4" if kind == 1 else "<i8")
    return _message("Tensor")(dense=values.tobytes(), dtype=kind, shape=tensor.shape)


def rows_body(
    model: str,
    seq_id: int,
    data: Sequence[Datum],
    *,
    loss: str = "cross_entropy",
    options: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    """A request with rows, as the API's own client writes it."""
    message = _message("ForwardBackwardRequest")(
        model_id=model, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for name, value in (options or {}).items():
        message.loss_fn_config[name] = value
        message.loss_fn_config_v2[name].number = value
    for datum in data:
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = datum.tokens.numpy().astype("<i4").tobytes()
        for name, tensor in {"target_tokens": datum.targets, **datum.tensors}.items():
            row.loss_fn_inputs[name].CopyFrom(tensor_message(tensor))
    body: bytes = message.SerializeToString()
    return body


def logprobs_of(answer: Answer) -> list[Tensor]:
    """The log-probabilities in an answer, row by row."""
    message = _message("ForwardBackwardOutput").FromString(answer.body)
    rows = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        values = np.frombuffer(field.data, dtype="<f4")
        ends = np.frombuffer(field.offsets, dtype="<i8") // 4
        rows += [torch.tensor(values[a:b]) for a, b in pairwise(ends)]
    return rows


def loss_of(answer: Answer) -> float:
    message = _message("ForwardBackwardOutput").FromString(answer.body)
    return float(message.metrics["loss:sum"])


def open_service(directory: Path, model: Path, **options: Any) -> Service:
    """A server's work, with a tiny model on the CPU."""
    settings = {"device": "cpu", **options.pop("settings", {})}
    learner = Learner.open(
        model,
        micro_batch_tokens=24,
        longest=LONGEST,
        reserve=options.pop("reserve", (4, 8)),
        **settings,
    )
    limits = options.pop("limits", Limits(rank=8))
    chosen = {"pass_tokens": 10_000, "most_waiting": 64, **options}
    return Service(NAME, learner, Store(directory), limits, **chosen)


@contextmanager
def serving(
    service: Service, tokens: Tokens, *, most_bytes: int = 1_000_000, rate: float = 1e9
) -> Iterator[int]:
    """Serve in a thread; gives the port."""
    config = uvicorn.Config(
        application(service, tokens, most_bytes=most_bytes, rate=rate),
        port=0,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has not come up"
        thread.join(0.01)
    try:
        (listening,) = server.servers
        port: int = listening.sockets[0].getsockname()[1]
        yield port
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def running(directory: Path, model: Path, **options: Any) -> Iterator[tuple[Client, Service]]:
    """A server with a tiny model, and its first client."""
    tokens = Tokens.of(directory / "token")
    service = open_service(directory, model, **options)
    try:
        with serving(service, tokens) as port:
            secret = (directory / "token").read_text().split()[1]
            yield Client(port, secret), service
    finally:
        service.learner.close()
