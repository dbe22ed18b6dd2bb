"""The commands of docs/gguf.md run as they stand there, but for those of Ollama, which is not here."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ggufruns import write_adapter, write_base

PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"
# What others make: programs to install.
INSTALLS = ("git clone", "pip ")
PROGRAMS = ("llama-server", "llama-completion")


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition("    #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(INSTALLS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every `lema` line of the page has run."""
    directory = tmp_path_factory.mktemp("page")
    base = write_base("llama", directory / "MODEL")
    write_adapter(base, directory / "output/my-run")
    for command in commands():
        if command.startswith("lema "):
            run([sys.executable, "-m", "lema", *shlex.split(command)[1:]], directory)
    return directory


def run(command: list[str], directory: Path) -> str:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_is_run_or_is_ollamas() -> None:
    programs = {command.split()[0] for command in commands()}
    assert programs == {"lema", "ollama", *PROGRAMS}


def test_lema_writes_what_the_page_says(place: Path) -> None:
    for name in ("gguf/model.gguf", "gguf/Modelfile", "base/model.gguf", "lora/adapter.gguf"):
        assert (place / name).is_file()
    assert "ADAPTER ./adapter.gguf" in (place / "lora/Modelfile").read_text()


@pytest.mark.skipif(shutil.which("llama-completion") is None, reason="it is not built")
def test_llama_completion_goes_on_with_a_text(place: Path) -> None:
    lines = [command for command in commands() if command.startswith("llama-completion")]
    assert len(lines) == 2
    for line in lines:
        assert "the miller" in run(shlex.split(line), place)


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="it is not built")
def test_llama_server_answers(place: Path) -> None:
    (line,) = [command for command in commands() if command.startswith("llama-server")]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [*shlex.split(line), "--port", str(port), "-c", "128"]
    with subprocess.Popen(
        words, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    ) as server:
        try:
            answer = asked(f"http://127.0.0.1:{port}/v1/chat/completions", server)
        finally:
            server.kill()
    assert '"role":"assistant"' in answer


def asked(url: str, server: "subprocess.Popen[bytes]") -> str:
    """Ask until the server is up."""
    body = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    until = time.monotonic() + 120
    while True:
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(request) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.5)
