"""Requests wait in order, are joined, and are taken fairly."""

from __future__ import annotations

import pytest
import torch

from lema.train.learner.rows import Datum
from lema_tools.learner.jobs import Batch, Busy, Job, Jobs
from lema_tools.learner.names import ModelName
from lema_tools.learner.store import Request
from lema_tools.learner.wire import RowsRequest

MODELS = [ModelName(f"{number:016x}", 0) for number in range(4)]


def rows(model: ModelName, seq_id: int, tokens: int = 10, *, forward_only: bool = False) -> Job:
    ids = torch.zeros(tokens, dtype=torch.long)
    asked = RowsRequest(str(model), seq_id, forward_only, [Datum(ids, ids)], "cross_entropy", {})
    return Job(model, Request(seq_id, "rows", b""), rows=asked)


def step(model: ModelName, seq_id: int) -> Job:
    return Job(model, Request(seq_id, "optim_step", b""))


def queue(pass_tokens: int = 1000, most_waiting: int = 8, gap_seconds: float = 1000.0) -> Jobs:
    jobs = Jobs(pass_tokens, most_waiting, gap_seconds)
    for model in MODELS:
        jobs.open_line(model, 1)
    return jobs


def take(jobs: Jobs) -> list[tuple[int, int]]:
    batch = jobs.take()
    assert isinstance(batch, Batch)
    return [(MODELS.index(job.model), job.request.seq_id) for job in batch.jobs]


def test_rows_of_all_who_wait_make_one_pass() -> None:
    jobs = queue()
    for seq_id in (1, 2):
        for model in MODELS:
            jobs.put(rows(model, seq_id))
    assert sorted(take(jobs)) == [(model, seq_id) for model in range(4) for seq_id in (1, 2)]


def test_a_request_that_comes_once_more_has_had_its_turn() -> None:
    jobs = queue(gap_seconds=0.0)
    for _ in range(2):
        jobs.put(step(MODELS[0], 1))
    assert take(jobs) == [(0, 1)]
    jobs.put(step(MODELS[0], 1))
    jobs.put(step(MODELS[0], 2))
    assert take(jobs) == [(0, 2)]
    assert jobs.waiting()[MODELS[0]] == 0


def test_steps_come_first_because_rows_wait_behind_them() -> None:
    jobs = queue()
    jobs.put(rows(MODELS[0], 1))
    jobs.put(step(MODELS[1], 1))
    jobs.put(rows(MODELS[1], 2))
    assert take(jobs) == [(1, 1)]
    assert sorted(take(jobs)) == [(0, 1), (1, 2)]


def test_rows_that_form_no_gradient_are_passes_of_their_own() -> None:
    jobs = queue()
    jobs.put(rows(MODELS[0], 1, forward_only=True))
    jobs.put(rows(MODELS[0], 2))
    jobs.put(rows(MODELS[1], 1, forward_only=True))
    jobs.put(rows(MODELS[2], 1))
    assert sorted(take(jobs)) == [(0, 1), (1, 1)]
    assert sorted(take(jobs)) == [(0, 2), (2, 1)]


def test_who_sends_much_does_not_keep_the_others_waiting() -> None:
    jobs = queue(pass_tokens=25)
    for seq_id in range(1, 7):
        jobs.put(rows(MODELS[0], seq_id))
    jobs.put(rows(MODELS[1], 1))
    jobs.put(rows(MODELS[2], 1))
    assert take(jobs) == [(0, 1), (1, 1)]
    assert take(jobs) == [(2, 1), (0, 2)]
    assert take(jobs) == [(0, 3), (0, 4)]


def test_a_request_larger_than_a_pass_is_a_pass() -> None:
    jobs = queue(pass_tokens=25)
    jobs.put(rows(MODELS[0], 1, tokens=100))
    jobs.put(rows(MODELS[1], 1))
    assert take(jobs) == [(0, 1)]
    assert take(jobs) == [(1, 1)]


def test_a_request_waits_for_those_before_it() -> None:
    jobs = queue()
    jobs.put(rows(MODELS[0], 2))
    jobs.put(rows(MODELS[1], 1))
    assert take(jobs) == [(1, 1)]
    jobs.put(rows(MODELS[0], 1))
    assert take(jobs) == [(0, 1), (0, 2)]


def test_a_request_fails_if_one_before_it_does_not_come() -> None:
    jobs = queue(gap_seconds=0.0)
    jobs.put(rows(MODELS[0], 3))
    jobs.put(step(MODELS[0], 4))
    for seq_id in (3, 4):
        batch = jobs.take()
        assert batch is not None
        (job,) = batch.jobs
        assert (job.request.seq_id, job.error) == (
            seq_id,
            "request 1 of this model has not arrived, so this one is not done",
        )
    jobs.put(rows(MODELS[0], 5))
    batch = jobs.take()
    assert batch is not None
    assert batch.jobs[0].error is None


def test_no_more_wait_than_may() -> None:
    jobs = queue(most_waiting=2)
    for seq_id in (2, 3):
        jobs.check_room(MODELS[0], seq_id)
        jobs.put(rows(MODELS[0], seq_id))
    with pytest.raises(Busy):
        jobs.check_room(MODELS[0], 4)
    # the one that the others wait for is always let in, or nothing would go on
    jobs.check_room(MODELS[0], 1)
    jobs.check_room(MODELS[1], 1)


def test_tasks_take_turns_with_passes() -> None:
    jobs = queue()
    done: list[int] = []
    for number in range(2):
        task = Job(
            MODELS[0], Request(0, "rows", b""), task=lambda number=number: done.append(number)
        )
        jobs.put_task(task)
    for seq_id in range(1, 3):
        jobs.put(rows(MODELS[0], seq_id, tokens=900))
    kinds = []
    for _ in range(4):
        batch = jobs.take()
        assert batch is not None
        kinds.append("pass" if batch.is_pass else "task")
    assert kinds == ["pass", "task", "pass", "task"]
