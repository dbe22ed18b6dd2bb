"""`lema serve-learner` in a process of its own, which can be killed and started again.

What it imports is imported once: each start is a fork of a process that has done so.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

__all__ = ["LearnerProcess", "free_port"]

FORKS = """
import os, sys
import typer, uvicorn
import lema_tools.learner.app, lema_tools.learner.listening, lema_tools.learner.service
from lema_tools.learner import serve_learner
sys.argv = ["lema serve-learner", *sys.argv[1:]]
for line in sys.stdin:
    if line.startswith("wait"):
        _, status = os.waitpid(int(line.split()[1]), 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        typer.run(serve_learner)
        os._exit(0)
    print(pid, flush=True)
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class LearnerProcess:
    """One server; the same directory and port at every start."""

    def __init__(self, model: Path, directory: Path, arguments: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.directory = directory
        self._log = directory.with_suffix(".log")
        self._pid: int | None = None
        command = [
            *(sys.executable, "-c", FORKS, str(model), "--name", "tiny", "--port", str(self.port)),
            *("--directory", str(directory), "--set", "device=cpu", "--max-length", "64"),
            *("--max-rank", "8", "--micro-batch-tokens", "24", *arguments),
        ]
        with self._log.open("ab") as log:
            self._forks = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                text=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def secret(self) -> str:
        return (self.directory / "token").read_text().split()[1]

    @property
    def pid(self) -> int:
        assert self._pid is not None, "it runs"
        return self._pid

    def _asked(self, line: str) -> int:
        assert self._forks.stdin is not None and self._forks.stdout is not None
        self._forks.stdin.write(f"{line}\n")
        self._forks.stdin.flush()
        return int(self._forks.stdout.readline())

    def start(self) -> None:
        self._pid = self._asked("start")
        while not self._answers():
            os.kill(self._pid, 0)
            assert self._forks.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/api/v1/healthz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal; return its exit status, or minus the signal."""
        assert self._pid is not None
        os.kill(self._pid, how)
        status = self._asked(f"wait {self._pid}")
        self._pid = None
        return status

    def stop(self) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                self.kill()
        self._forks.communicate()
