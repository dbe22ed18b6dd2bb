"""A child of gpu.py, as its parent sees it: it answers within a time, or is ended, and says what
went wrong.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import memory_kinds
from gpu_arms import Job

__all__ = ["Child", "Failed", "Refused"]

INTERVAL = 0.02  # seconds between looks at a child's memory
# One allocator for all arms, that can grow what it has reserved: else fragments decide what fits
# under a cap.
ALLOCATOR = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


class Failed(Exception):
    """A child ended, or did not answer in time; its message says which, and what it said last."""


class Refused(Failed):
    """A child said that what it was asked for does not fit its memory; it goes on."""


class Child:
    """A process that answers lines of JSON; in a group of its own, which ends with it.

    Args:
        job: what it is to be.

    Attributes:
        host_peak: the most host memory seen, anonymous and shared, in bytes.
        micro_batches: that it is prepared for.
        ended: whether it is of no use any more.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host_peak = 0
        self.ended = False
        self.micro_batches: int | None = None
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("gpu_child.py")),
                json.dumps(asdict(job)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={
                **ALLOCATOR,
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **os.environ,
            },
            start_new_session=True,
        )

    def ready(self, seconds: float) -> dict[str, Any]:
        """Wait until the arm is built."""
        return self._answer(seconds)

    def ask(self, what: str, seconds: float, **order: Any) -> dict[str, Any]:
        """Have it do something and return its answer.

        Raises:
            Failed: it could not, or took more than `seconds`.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone: `_answer` says why
            self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
            self._process.stdin.flush()
        return self._answer(seconds)

    def limit(self, cap: int | None) -> None:
        """Give it another cap from the next `prepare` on."""
        self.job = replace(self.job, cap=cap)

    def prepare(self, micro_batches: int, seconds: float) -> dict[str, Any]:
        """Have it prepare for steps of so many micro-batches, and count its host memory from here
        on.

        Raises:
            Refused: that does not fit; it may be asked for fewer.
            Failed: it could not, or took more than `seconds`.
        """
        self.host_peak = 0
        self.micro_batches = None
        answer = self.ask("prepare", seconds, micro_batches=micro_batches, cap=self.job.cap)
        if refused := answer.get("refused"):
            raise Refused(refused)
        self.micro_batches = micro_batches
        return answer

    def close(self) -> None:
        """End the child, and what it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        answers = self._process.stdout
        until = time.monotonic() + seconds
        assert answers is not None
        while not select.select([answers], [], [], INTERVAL)[0]:
            self._look()
            if time.monotonic() > until:
                raise self._failed(f"no answer in {seconds:.0f} s; {self._last_words()}")
        line = answers.readline()
        if not line:
            raise self._failed(f"ended with {self._process.wait()}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, why: str) -> Failed:
        self.ended = True
        return Failed(why)

    def _look(self) -> None:
        with suppress(OSError):
            kinds = memory_kinds(self._process.pid)
            self.host_peak = max(self.host_peak, kinds.get("anonymous", 0) + kinds.get("shared", 0))

    def _last_words(self) -> str:
        self._said.seek(0)
        return " | ".join(self._said.read()[-1500:].strip().splitlines()[-6:])
