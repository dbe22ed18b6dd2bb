"""Requests of several clients go through the layers in one pass, which reads the weights once, and
each client gets what it would get alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from learnerclient import open_service, rows_body
from test_learner_server import data
from tiny import Checkpoint

from lema.errors import DataError
from lema_tools.learner.protocol import LoraOptions
from lema_tools.learner.service import Service

CheckpointOf = Callable[..., Checkpoint]
RANK = 8  # at most
BESIDE = 600_000  # bytes that two layers, the head and a micro-batch take


def limited(directory: Path, model: Path, clients: int) -> Service:
    """A server whose layers stream: no layer stays on the device."""
    first = open_service(directory / "first", model)
    reserved = clients * first.learner._targets.nbytes(RANK)
    first.learner.close()
    service = open_service(
        directory / "kept",
        model,
        reserve=(clients, RANK),
        settings={"device_memory": reserved + BESIDE},
    )
    assert not service.learner.opened.allocation.residents
    return service


async def trained(
    service: Service, clients: Sequence[int], *, joined: bool
) -> dict[int, list[bytes]]:
    """The answers to a forward_backward and a step of each client; `joined`: all wait first."""
    service.answers.start()
    waiting: dict[int, list[str]] = {}
    for client in clients:
        owner = f"client{client}"
        session = await service.create_session(owner, {})
        lora = LoraOptions(rank=1 + client % RANK, seed=client, train_mlp=client % 3 != 0)
        model = (await service.create_model(owner, session, 0, lora, {})).rpartition(":")[0]
        rows = await service.accept_rows(owner, rows_body(model, 1, data(client)))
        step = await service.accept(
            owner, model, 2, "optim_step", {"learning_rate": 1e-2, "grad_clip_norm": 1.0}
        )
        waiting[client] = [rows, step]
        if not joined:
            work(service, 2)
    if joined:
        work(service, 1 + len(clients))
    answers = {}
    for client, futures in waiting.items():
        results = [await service.retrieve(f"client{client}", future) for future in futures]
        answers[client] = [result.body for result in results if result is not None]
    return answers


def work(service: Service, batches: int) -> None:
    """Have the worker do so many batches, and no more."""
    for _ in range(batches):
        batch = service.jobs.take()
        assert batch is not None
        service._worker.do(batch)


@pytest.mark.parametrize("clients", [3, 16])
def test_a_pass_of_all_clients_reads_what_one_reads(
    clients: int, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    model = checkpoint_of("llama").streamed
    alone = limited(tmp_path / "alone", model, clients)
    expected = asyncio.run(trained(alone, range(clients), joined=False))
    assert alone.meter.counts()["passes"] == clients
    of_one = alone.meter.counts()["weight_bytes"] / clients
    alone.learner.close()
    service = limited(tmp_path / "joined", model, clients)
    answers = asyncio.run(trained(service, range(clients), joined=True))
    counts = service.meter.counts()
    assert (counts["passes"], counts["pass_adapters"]) == (1, clients)
    # what the first pass learns of the layers is read beside
    assert 0 < counts["weight_bytes"] <= 1.2 * of_one
    assert answers == expected
    service.learner.close()


def test_a_request_that_is_sent_twice_at_once_is_one(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    service = open_service(tmp_path / "kept", checkpoint_of("llama").streamed)

    async def send(model: str) -> list[str | BaseException]:
        bodies = [rows_body(model, 1, data(seed)) for seed in (1, 1, 2)]
        sent = [service.accept_rows("ann", body) for body in bodies]
        return await asyncio.gather(*sent, return_exceptions=True)

    async def train() -> None:
        session = await service.create_session("ann", {})
        model = await service.create_model("ann", session, 0, LoraOptions(rank=2, seed=1), {})
        name = model.rpartition(":")[0]
        outcomes = await send(name)
        same = [outcome for outcome in outcomes if outcome == f"{name}:1"]
        refused = [str(outcome) for outcome in outcomes if isinstance(outcome, DataError)]
        assert len(same) + len(refused) == 3
        assert refused
        assert all("was another one" in sentence for sentence in refused)
        waiting = service.jobs.waiting()
        assert [*waiting.values()] == [1]
        # what is on disk, and would be taken again after a kill, is what waits
        (request,) = service._store.requests(next(iter(waiting)))
        batch = service.jobs.take()
        assert batch is not None
        assert batch.jobs[0].request == request

    asyncio.run(train())
    service.learner.close()


def test_adapters_that_do_not_fit_take_turns(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    model = checkpoint_of("llama").streamed
    roomy = open_service(tmp_path / "roomy", model)
    expected = asyncio.run(trained(roomy, range(3, 8), joined=True))
    room = 2 * roomy.learner._targets.nbytes(RANK)
    roomy.learner.close()
    narrow = open_service(
        tmp_path / "narrow", model, reserve=(2, RANK), settings={"device_memory": room + 900_000}
    )
    answers = asyncio.run(trained(narrow, range(3, 8), joined=True))
    assert answers == expected
    counts = narrow.meter.counts()
    assert counts["passes"] >= 2  # not all are on the device at once
    assert counts["replayed_requests"] >= 1  # and who comes back takes its rows once more
    narrow.learner.close()
