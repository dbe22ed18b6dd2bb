"""`lema serve-learner` in a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

__all__ = ["LearnerProcess", "free_port"]

RUN = "import sys; from lema_tools.learner import serve_learner; import typer; typer.run(serve_learner)"


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
        self._command = [
            *(sys.executable, "-c", RUN, str(model), "--name", "tiny", "--port", str(self.port)),
            *("--directory", str(directory), "--set", "device=cpu", "--max-length", "64"),
            *("--max-rank", "8", "--micro-batch-tokens", "24", *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def secret(self) -> str:
        return (self.directory / "token").read_text().split()[1]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)

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
        assert self._process is not None
        self._process.send_signal(how)
        status = self._process.wait()
        self._process = None
        return status

    def stop(self) -> None:
        if self._process is not None:
            self.kill()
