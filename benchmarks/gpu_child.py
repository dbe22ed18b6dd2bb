"""One process of gpu.py: it measures the machine, or puts one arm's model onto the device and takes
steps when told to.

    python benchmarks/gpu_child.py '{"arm": "lema", ...}'

It prints a line of JSON when it is ready, and one for each line of JSON it is given:

- `{"do": "prepare", "micro_batches": 4, "cap": null}`: what the arm says of itself, after warm-up
  steps, or that it does not fit; the cap may be another than before.
- `{"do": "step"}`: the step's seconds, its loss, bytes moved, and memory: the most on the device
  since `prepare`, what is in host memory now, by kind.
- `{"do": "link"}`, `{"do": "matmul", ...}`, `{"do": "parity", ...}`: see gpu_machine.py and
  gpu_parity.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import Shape, memory_kinds
from gpu_arms import ARMS, Job, Prepared
from gpu_device import Device
from gpu_machine import link, matmul
from gpu_parity import parity

from lema.errors import MemoryLimitError
from lema_cuda.attention import switch_off

__all__ = ["Arm", "job_of"]


def job_of(said: dict[str, Any]) -> Job:
    """Return the job that a line of JSON describes."""
    return Job(**{**said, "shape": Shape(**said["shape"])})


def _answers(job: Job, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    device = Device(job.device)
    machine: dict[str, Callable[..., dict[str, Any]]] = {
        "link": link,
        "matmul": matmul,
        "parity": parity,
    }
    arm = Arm(job, device) if job.arm in ARMS else None
    yield {"ready": True, "capped": arm is not None and arm.capped}
    for line in lines:
        order = json.loads(line)
        what = order.pop("do")
        if what in machine:
            yield machine[what](job.device, **order)
        else:
            assert arm is not None, f"{job.arm} measures the machine only"
            yield arm.prepare(**order) if what == "prepare" else arm.step()


class Arm:
    """The arm of a job, built, and prepared for some number of micro-batches.

    Args:
        job: of the arm.
        device: that it computes on.

    Attributes:
        capped: whether the allocator refuses more than the cap.
    """

    def __init__(self, job: Job, device: Device) -> None:
        self._job = job
        self._device = device
        self.capped = device.cap(job.cap)
        if device.torch.type == "cuda":
            # for every arm as for LEMA's, so that all choose among the same attentions
            switch_off(device.torch)
        self._prepare = ARMS[job.arm](job)
        self._prepared: Prepared | None = None

    def prepare(self, micro_batches: int, cap: int | None) -> dict[str, Any]:
        """Prepare for steps of so many micro-batches; return what the arm says of itself, or
        that it does not fit.
        """
        self.close()
        if cap != self._job.cap:
            self._job = replace(self._job, cap=cap)
            self.capped = self._device.cap(cap)
            self._prepare = ARMS[self._job.arm](self._job)
        self._device.forget_peak()
        shape = self._job.shape
        tokens = self._job.tokens
        ids = torch.randint(
            0, shape.vocabulary, (micro_batches, tokens), generator=torch.Generator().manual_seed(0)
        )
        began = time.perf_counter()
        try:
            self._prepared = self._prepare(ids)
        except MemoryLimitError as error:
            return {"refused": str(error)}
        for _ in range(self._prepared.warm_up):
            self._prepared.step()
        self._device.synchronize()
        return {**self._prepared.about, "prepare_seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Give back what was prepared."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def step(self) -> dict[str, Any]:
        """Take a step; return its seconds, its loss, bytes moved, and memory."""
        assert self._prepared is not None, "prepare it first"
        before = self._prepared.counters()
        began = time.perf_counter()
        loss = self._prepared.step()
        self._device.synchronize()
        seconds = time.perf_counter() - began
        moved = {name: value - before[name] for name, value in self._prepared.counters().items()}
        return {
            "seconds": seconds,
            "loss": loss,
            **moved,
            **self._device.peak(),
            "host": memory_kinds(),
        }


def main() -> None:
    """Talk to gpu.py: JSON in on stdin, JSON out on stdout; whatever libraries print goes to
    stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        for answer in _answers(job_of(json.loads(sys.argv[1])), sys.stdin):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # noqa: BLE001 - it becomes a row of the table
        traceback.print_exc()
        print(
            json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}),
            file=answers,
            flush=True,
        )
        os._exit(1)  # threads of a library that failed may wait for ever


if __name__ == "__main__":
    main()
