"""Steps of several models, in which processes divide each row or do not; `forked` starts them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from everytype import opened, whole_in, whole_loss
from forked import run_forked
from parity import DRAWS, draw_b, trained
from torch import Tensor

from lema.backend.group import sum_gradients

MicroBatches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Job:
    """A step to be taken.

    Args:
        directory: of the model.
        batches: its micro-batches.
        settings: of the run.
    """

    directory: Path
    batches: MicroBatches
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """What a step leaves in one process.

    Args:
        numbers: the loss, and every gradient, in one vector.
        evaluated: the loss of an evaluation of the same rows, and their trained tokens.
        sent: bytes that the process has sent in the step, by what they are.
        error: what was raised; empty: nothing.
    """

    numbers: Tensor
    evaluated: tuple[float, int] = (0.0, 0)
    sent: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def step(job: Job) -> Taken:
    """Take a step, with all processes that take it."""
    with opened(job.directory, **job.settings) as model:
        draw_b(model.lora_manager)
        torch.manual_seed(DRAWS)
        loss = model.adapter.loss(job.batches)
        loss.backward()
        replicas = model.backend.replicas
        parameters = list(trained(model.lora_manager).values())
        sum_gradients(replicas, parameters)
        value = loss.detach().clone().view(1)
        replicas.sum(value)
        formed = [parameter.grad for parameter in parameters if parameter.grad is not None]
        division = model.adapter.division
        sent = {} if division is None else dict(division.group.sent)
        for parameter in parameters:
            parameter.grad = None
        mean, count = model.adapter.evaluate(job.batches)
        numbers = torch.cat([value, *(gradient.flatten() for gradient in formed)])
        return Taken(numbers, (float(mean), count), sent)


def whole(job: Job) -> Tensor:
    """Return the loss, and every gradient, of a step of the whole model in double precision."""
    with opened(job.directory) as model:
        # drawn in single precision, because adapters of another type would be others
        reference = whole_in(job.directory, torch.float32, model.lora_manager)
        shifted = model.adapter.shifts_labels
    reference.double()
    # because grouped products of experts have no double precision
    reference.get_base_model().set_experts_implementation("eager")
    torch.manual_seed(DRAWS)
    loss, _ = whole_loss(reference, [dict(batch) for batch in job.batches], shifted=shifted)
    formed = [parameter.grad for parameter in trained(reference).values()]
    gradients = [gradient.flatten() for gradient in formed if gradient is not None]
    return torch.cat([loss.view(1).double(), *gradients])


def together(jobs: Sequence[Job], count: int, directory: Path) -> list[list[Taken]]:
    """Return what steps leave in each of so many processes, which have a directory for files."""
    out = Path(tempfile.mkdtemp(dir=directory))
    # in a file, because tensors that are handed to other processes wait for the one that made them
    torch.save(list(jobs), out / "jobs")
    run_forked(_steps, (out,), count, directory, 200)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _steps(out: Path) -> None:
    """Take one step after the other, in every process; each writes what they leave."""
    # once, for all models
    torch.distributed.init_process_group("gloo")
    results = []
    jobs: list[Job] = torch.load(out / "jobs", weights_only=False)
    for job in jobs:
        try:
            results.append(step(job))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(Taken(torch.zeros(1), error=f"{type(error).__name__}: {error}"))
    torch.save(results, out / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
