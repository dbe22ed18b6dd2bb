"""A vLLM server in a process of its own, asked over HTTP.

vLLM's command looks for the metadata of a distribution named `vllm`, which its build for the CPU
has not, so the module is run that the command runs.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

__all__ = ["MODULES", "Refused", "VllmServer", "arguments_of", "vllm_server"]

# What a small machine needs: no compiling, a small cache of keys and values, few rows at once. In
# blocks of 32 a cache of prefixes has what a row of 100 tokens begins with.
SMALL = (
    "--block-size=32",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=128",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=128",
)
START_SECONDS = 600
# vLLM 0.32's kernel for the CPU fails on the log-probabilities of several prompts in one batch if
# the head may have an adapter, so a server may be told which modules have.
MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)


class Refused(Exception):
    """The server answered with an error."""


@dataclass(frozen=True)
class VllmServer:
    """A server that answers."""

    url: str
    log: Path

    def ask(self, path: str, **what: Any) -> Any:
        """Return the answer to a POST, or to a GET where nothing is sent. `Refused`: an error."""
        body = json.dumps(what).encode() if what else None
        request = Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=120) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            raise Refused(error.read().decode()) from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def load(self, name: str, directory: Path, *, replace: bool = False) -> None:
        """Have it take an adapter; `replace`: in the place of the one of this name."""
        self.ask(
            "/v1/load_lora_adapter",
            lora_name=name,
            lora_path=str(directory),
            load_inplace=replace,
        )

    def unload(self, name: str) -> None:
        self.ask("/v1/unload_lora_adapter", lora_name=name)

    def next_log_probability(self, model: str, row: Sequence[int]) -> float:
        """Return that of the most likely token after a prompt, whose beginning the server takes
        from its cache of prefixes if it has it."""
        answer = self.ask(
            "/v1/completions",
            model=model,
            prompt=[list(row)],
            max_tokens=1,
            temperature=0.0,
            logprobs=1,
        )
        value: float = answer["choices"][0]["logprobs"]["token_logprobs"][0]
        return value

    def log_probabilities(self, model: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return those of each prompt's tokens but the first."""
        answer = self.ask(
            "/v1/completions",
            model=model,
            prompt=[list(row) for row in rows],
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [
            [
                said[str(token)]["logprob"]
                for token, said in zip(row[1:], choice["prompt_logprobs"][1:], strict=True)
            ]
            for row, choice in zip(rows, choices, strict=True)
        ]


def arguments_of(line: str) -> list[str]:
    """Return the arguments of a line `vllm serve MODEL ...` as the module takes them."""
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    return ["--model", *words[2:]]


@contextmanager
def vllm_server(arguments: Sequence[str], log: Path) -> Iterator[VllmServer]:
    """Start a server, and end it with all its processes when the block is left.

    Its processes have a group of their own, but stay in the session of who starts it: what ends that
    session ends them, too.

    Args:
        arguments: of the command, from `--model` on. They win over those of a small machine.
        log: a file for what it prints.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, *SMALL, *arguments]
    where = ["--host=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch, log.open("w") as out:
        process = subprocess.Popen(
            [*command, *where],
            env=_environment(scratch),
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            server = VllmServer(f"http://127.0.0.1:{port}", log)
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                _end_group(process.pid)


def _environment(scratch: str) -> dict[str, str]:
    """Return that of a server, which writes its sockets to `scratch`."""
    return os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # else every server takes the first core, whatever else runs there
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # compiling what counts ranks takes longer than all that it counts here
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TMPDIR": scratch,
        "OMP_NUM_THREADS": "1",
    }


def _wait(server: VllmServer, process: subprocess.Popen[bytes]) -> None:
    """Wait until it answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            server.ask("/health")
            return
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{server.log.read_text()[-6000:]}")


def _end_group(leader: int) -> None:
    """End what the server's processes left running."""
    try:
        os.killpg(leader, 9)
    except ProcessLookupError:
        return
