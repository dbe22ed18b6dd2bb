"""A server is closed by default: who has no secret gets nothing, clients do not see each other, no
path of a client's reaches the file system, and what is malformed is the client's fault.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learnerclient import Answer, Client, open_service, rows_body, running, serving
from test_learner_server import data
from tiny import Checkpoint

from lema.errors import ConfigError, DataError
from lema_tools.learner.access import Gate, Tokens
from lema_tools.learner.names import CheckpointName, ModelName
from lema_tools.learner.service import Limits, Service

CheckpointOf = Callable[..., Checkpoint]
SECRETS = {"ann": "tml-" + "a" * 24, "bob": "tml-" + "b" * 24}
MOST_BYTES = 200_000
MALFORMED = int(os.environ.get("LEARNER_MALFORMED", "3000"))
CRASHED = 500


@pytest.fixture(scope="module")
def served(
    checkpoint_of: CheckpointOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, int, Path]]:
    directory = tmp_path_factory.mktemp("learner")
    file = directory / "secrets"
    file.write_text("".join(f"{name} {secret}\n" for name, secret in SECRETS.items()))
    file.chmod(0o600)
    limits = Limits(rank=8, sessions=40, models=40)
    service = open_service(directory / "kept", checkpoint_of("llama").streamed, limits=limits)
    with serving(service, Tokens.of(file), most_bytes=MOST_BYTES) as port:
        yield service, port, directory
    service.learner.close()


@pytest.fixture
def ann(served: tuple[Service, int, Path]) -> Client:
    return Client(served[1], SECRETS["ann"])


@pytest.fixture
def bob(served: tuple[Service, int, Path]) -> Client:
    return Client(served[1], SECRETS["bob"])


def test_a_secret_is_made_at_the_first_start(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "token"
    tokens = Tokens.of(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    name, secret = file.read_text().split()
    assert tokens.owner(secret) == name
    assert tokens.owner(secret + "x") is None
    assert tokens.owner("") is None
    assert Tokens.of(file).owner(secret) == name  # the same at the next start
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        Tokens.of(file)
    file.chmod(0o600)
    file.write_text("ann short\n")
    with pytest.raises(ConfigError, match="no name and a secret"):
        Tokens.of(file)


def test_without_a_secret_there_is_nothing(served: tuple[Service, int, Path]) -> None:
    _, port, _ = served
    client = Client(port, "")
    for path in ("/", "/docs", "/openapi.json", "/metrics", "/api/v1/sessions", "/nothing"):
        for headers in ({}, {"X-API-Key": "tml-" + "c" * 24}, {"Authorization": "Bearer x"}):
            assert client.ask("GET", path, headers=headers).status == 401
    assert client.ask("GET", "/api/v1/healthz", headers={}).status == 200
    secret = SECRETS["ann"]
    basic = base64.b64encode(f"me:{secret}".encode()).decode()
    for headers in ({"Authorization": f"Bearer {secret}"}, {"Authorization": f"Basic {basic}"}):
        assert client.ask("GET", "/", headers=headers).status == 200


def test_clients_do_not_see_each_other(ann: Client, bob: Client) -> None:
    session = ann.session()
    model = ann.model(session)
    ann.train(model, 1, data(1))
    path = ann.result(ann.post("save_weights", model_id=model, path="mine", seq_id=2)).json["path"]
    ann.result(ann.post("save_weights_for_sampler", model_id=model, path="s", seq_id=3))
    sampler = ann.post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        model_path=f"tinker://{model}/sampler_weights/s",
    ).json["sampling_session_id"]
    own = bob.session()
    refused = [
        bob.post("get_info", model_id=model),
        bob.rows(rows_body(model, 4, data(1))),
        bob.post("optim_step", model_id=model, seq_id=4, adam_params={}),
        bob.post("save_weights", model_id=model, path="x", seq_id=4),
        bob.post("retrieve_future", request_id=f"{model}:1"),
        bob.post("retrieve_future", request_id=f"{model}:0"),
        bob.post("load_weights", session_id=own, model_seq_id=0, path=path, optimizer=True),
        bob.post("weights_info", tinker_path=path),
        bob.post("session_heartbeat", session_id=session),
        bob.post("create_model", session_id=session, model_seq_id=9, base_model="tiny", lora_config={"rank": 2}),
        bob.post("unload_model", model_id=model),
        bob.get(f"training_runs/{model}"),
        bob.get(f"training_runs/{model}/checkpoints"),
        bob.get(f"sessions/{session}"),
        bob.ask("DELETE", f"/api/v1/training_runs/{model}/checkpoints/weights/mine"),
    ]  # fmt: skip
    assert [answer.status for answer in refused] == [404] * len(refused)
    assert bob.get(f"samplers/{sampler}").status == 410
    asked = {"prompt": {"chunks": [{"tokens": [3], "type": "encoded_text"}]}, "sampling_params": {}}
    assert bob.post("asample", sampling_session_id=sampler, seq_id=0, **asked).status == 410
    assert model not in json.dumps(bob.get("training_runs").json)
    assert bob.get("checkpoints").json["checkpoints"] == []
    assert session not in bob.get("sessions").json["sessions"]
    assert model not in bob.ask("GET", "/").body.decode()


NAMES = ["..", ".", "a/b", "../../x", "/etc/passwd", "", "a\x00b", "é", "-x", "x" * 200, ".hidden", "a..b", "a\nb"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_path(name: str) -> None:
    model = ModelName("0123456789abcdef", 0)
    with pytest.raises(DataError):
        CheckpointName.of(model, "weights", name)
    with pytest.raises(DataError):
        CheckpointName.read(f"tinker://{model}/weights/{name}")


def test_no_path_of_a_client_leaves_the_directory(
    ann: Client, served: tuple[Service, int, Path]
) -> None:
    _, _, directory = served
    before = sorted(one for one in directory.parent.rglob("*") if directory not in one.parents)
    model = ann.model(ann.session())
    for seq_id, name in enumerate(["../../../x", "/tmp/x", "..", "a/../../b"], 1):
        for route in ("save_weights", "save_weights_for_sampler"):
            answer = ann.post(route, model_id=model, path=name, seq_id=seq_id)
            assert answer.status == 400
    for path in (
        "tinker://../weights/x",
        f"tinker://{model}/../x",
        "tinker:///etc/passwd",
        "file:///etc",
    ):
        assert ann.post("weights_info", tinker_path=path).status == 400
    assert ann.ask(
        "DELETE", f"/api/v1/training_runs/{model}/checkpoints/weights/..%2f.."
    ).status in (400, 404)
    after = sorted(one for one in directory.parent.rglob("*") if directory not in one.parents)
    assert after == before


def test_sizes_are_bounded_before_anything_is_read(
    ann: Client, served: tuple[Service, int, Path]
) -> None:
    _, port, _ = served
    headers = {"X-API-Key": SECRETS["ann"]}
    large = ann.ask("POST", "/api/v1/optim_step", b"x" * (MOST_BYTES + 1), headers)
    assert large.status == 413
    packed = ann.ask("POST", "/api/v1/optim_step", b"x", {**headers, "Content-Encoding": "zstd"})
    assert packed.status == 415
    for length in (str(10**12), "-5", "much"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: {SECRETS['ann']}\r\n"
            raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert raw.recv(200).split(b" ")[1] in (b"400", b"413")


def test_who_asks_too_often_is_told_to_wait(served: tuple[Service, int, Path]) -> None:
    _, _, directory = served
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["owner"])

    gate = Gate(app, Tokens.of(directory / "secrets"), most_bytes=10, rate=1e-9, burst=3.0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    def ask(name: str) -> None:
        headers = [(b"x-api-key", SECRETS[name].encode())]
        scope = {"type": "http", "path": "/", "headers": headers}
        asyncio.run(gate(scope, receive, send))

    for _ in range(5):
        ask("ann")
    ask("bob")
    assert passed == ["ann"] * 3 + ["bob"]
    assert [message["status"] for message in sent if "status" in message] == [429, 429]


def test_limits_of_a_client(ann: Client) -> None:
    session = ann.session()
    too_large = ann.post(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 9},
    )
    assert too_large.status == 400
    assert "rank of 9" in too_large.json["error"]
    other = ann.post(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="other",
        lora_config={"rank": 2},
    )
    assert other.status == 404


def test_adapters_beyond_the_memory_are_refused_in_a_sentence(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    limits = Limits(rank=64, sessions=2, models=2)
    options = {"limits": limits, "reserve": (2, 4)}
    with running(tmp_path / "kept", checkpoint_of("llama").streamed, **options) as (client, _):
        session = client.session()
        large = create(client, session, 0, rank=9)
        assert large.status == 400  # and no 5xx, upon which clients would ask again and again
        assert "an adapter of rank 9 takes" in large.json["error"]
        assert "lower rank" in large.json["error"]
        for number in range(2):
            client.model(session, number, rank=4)
        third = create(client, session, 2, rank=4)
        assert third.status == 400
        assert "your sessions have 2 models already" in third.json["error"]
        # of what is finished nothing counts any more
        other = client.session()
        assert client.post("create_session", tags=[], sdk_version="0").status == 400
        assert client.post(f"sessions/{session}/finish").status == 204
        assert create(client, other, 0, rank=4).status == 200
        metrics = client.ask("GET", "/metrics").body.decode()
        assert "lema_learner_adapter_bytes 0" in metrics


def create(client: Client, session: str, number: int, **lora: int) -> Answer:
    asked = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
    return client.post("create_model", **asked, lora_config=lora)


def test_nothing_that_is_malformed_is_the_servers_fault(
    ann: Client, served: tuple[Service, int, Path]
) -> None:
    """Seeded, so that what fails once fails again."""
    service, _, _ = served
    drawn = random.Random(13)
    model = ann.model(ann.session())
    routes = [
        (method.upper(), path)
        for path, methods in ann.ask("GET", "/openapi.json").json["paths"].items()
        for method in methods
    ]
    good = rows_body(model, 1, data(3))
    headers = {"X-API-Key": SECRETS["ann"], "Content-Type": "application/json"}
    rows = {**headers, "Content-Type": "application/x-protobuf"}
    statuses: dict[int, int] = {}
    for number in range(MALFORMED):
        if number % 3 == 0:
            answer = ann.ask("POST", "/api/v1/forward_backward", mangled(good, drawn), rows)
        else:
            method, path = drawn.choice(routes)
            filled = "/".join(
                word(drawn) if part.startswith("{") else part for part in path.split("/")
            )
            body = json.dumps(some(drawn, model, 0)).encode()
            if number % 5 == 0:
                body = mangled(body, drawn)
            if "retrieve" in path or "sessions" in path:
                body = body.replace(b"request_id", b"request")  # which would wait
            answer = ann.ask(method, filled, None if method == "GET" else body, headers)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status < CRASHED, (number, answer.body[:200])
    assert statuses[422] + statuses[400] > MALFORMED // 3
    assert 429 not in statuses, "requests have not come through"
    # the worker has lived through what was accepted, and goes on
    fresh = ann.model(ann.session())
    assert ann.train(fresh, 1, data(1)).status == 200
    assert "grad_norm:mean" in ann.step(fresh, 2).json["metrics"]
    assert service._thread.is_alive()


WORDS = ["0", "-1", "x", "..", "%00", "a" * 300, "weights", "1e9", "null", "%2e%2e", "é"]


def word(drawn: random.Random) -> str:
    from urllib.parse import quote

    return quote(drawn.choice(WORDS), safe="%")


def some(drawn: random.Random, model: str, depth: int) -> Any:
    """A value of JSON, often with names that the API knows."""
    names = [
        "model_id", "session_id", "seq_id", "path", "adam_params", "lora_config", "rank", "base_model", "model_seq_id",
        "tags", "sdk_version", "prompt", "chunks", "tokens", "sampling_params", "learning_rate", "tinker_path", "optimizer",
        "type", "user_metadata", "num_samples", "sampling_session_id", "temperature", "stop",
    ]  # fmt: skip
    kind = drawn.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return drawn.choice([0, 1, -1, 2**31, 2**63, 10**30, -(2**70)])
    if kind == 1:
        return drawn.choice([0.5, -1e308, 1e-320, float("nan"), float("inf")])
    if kind == 2:
        return drawn.choice([model, "", "tiny", "\x00", "é" * 50, "a" * 2000, "tinker://x/y/z"])
    if kind == 3:
        return drawn.choice([None, True, False])
    if kind == 4 and depth:
        return []
    if kind == 5:
        return [some(drawn, model, depth + 1) for _ in range(drawn.randrange(4))]
    return {drawn.choice(names): some(drawn, model, depth + 1) for _ in range(drawn.randrange(7))}


def mangled(body: bytes, drawn: random.Random) -> bytes:
    """Bytes that are changed, cut, doubled or torn out somewhere."""
    content = bytearray(body)
    for _ in range(drawn.randrange(1, 6)):
        if not content:
            break
        at = drawn.randrange(len(content))
        kind = drawn.randrange(4)
        if kind == 0:
            content[at] = drawn.randrange(256)
        elif kind == 1:
            del content[at : at + drawn.randrange(1, 9)]
        elif kind == 2:
            content[at:at] = bytes(drawn.randrange(256) for _ in range(drawn.randrange(1, 9)))
        else:
            del content[at:]
    return bytes(content)


def test_a_full_disk_is_an_answer(
    ann: Client, served: tuple[Service, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lema.errors import DiskFull

    service, _, _ = served
    model = ann.model(ann.session())
    first = ann.train(model, 1, data(1))
    store = service._store

    def full(*_: object) -> None:
        raise DiskFull("the disk is full", where="here")

    # A request that cannot be written down is not accepted; clients ask again by themselves.
    with monkeypatch.context() as patch:
        patch.setattr(store, "append", full)
        assert ann.rows(rows_body(model, 2, data(2))).status == 507
    second = ann.train(model, 2, data(2))
    # A step whose state cannot be written has not happened, and its client is told so.
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_state", full)
        failed = ann.step(model, 3).json
    assert failed["category"] == "server"
    assert "disk is full" in failed["error"]
    # The gradients are still there, so that it can be taken again.
    stepped = ann.step(model, 4).json["metrics"]["grad_norm:mean"]
    other = ann.model(ann.session())
    assert ann.train(other, 1, data(1)).body == first.body
    assert ann.train(other, 2, data(2)).body == second.body
    assert ann.step(other, 3).json["metrics"]["grad_norm:mean"] == stepped


def test_memory_that_runs_out_is_an_answer(
    ann: Client, served: tuple[Service, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _, _ = served
    models = [ann.model(ann.session()) for _ in range(2)]
    run = service.learner.run
    most = 2

    def scarce(requests: Any, **options: Any) -> Any:
        if sum(len(request.data) for request in requests) > most:
            raise torch.OutOfMemoryError("no memory")
        return run(requests, **options)

    with monkeypatch.context() as patch:
        patch.setattr(service.learner, "run", scarce)
        failed = ann.train(models[0], 1, data(1)).json
    assert failed["category"] == "server"
    # the next one finds the adapter as it was
    assert ann.train(models[0], 2, data(2)).body == ann.train(models[1], 1, data(2)).body
    norms = [ann.step(model, seq_id).json for model, seq_id in zip(models, (3, 2), strict=True)]
    assert norms[0] == norms[1]
