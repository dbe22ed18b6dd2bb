"""Several processes of this machine that talk through gloo, forked from one that has imported what
all of them need.

They find what `torchrun` would have set. Starting them by `torchrun` takes each many seconds of
importing: that is for tests of how processes are started, and ended. The process they are forked
from has never differentiated, and so has no threads to lose.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pickles
import torch

TESTS = Path(__file__).parents[1]
NEEDED = ["lema.cli.app", "lema.train.run", "lema.train.phases.run", "dividedwork", "neuronranks"]
# which a run imports late
NEEDED += [
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "peft.tuners.lora.bnb",
]
NEEDED += [f"transformers.models.{one}.modeling_{one}" for one in ("llama", "qwen3", "mixtral")]
GIVEN = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
TO_SEE_IT = 30.0  # seconds


def run_forked(
    work: Callable[..., None], arguments: Sequence[Any], count: int, said: Path, timeout: float
) -> None:
    """Call `work(*arguments)` in so many processes at once.

    Args:
        work: a function of a module that can be imported.
        arguments: of it.
        count: how many processes.
        said: a directory for what they write to their standard outputs.
        timeout: seconds, after which they are killed.

    Raises:
        AssertionError: one did not end well; the last of what it said.
    """
    with _files(said, count) as files:
        codes = _forked(work, arguments, files, timeout)
        failed = [outs[1] for code, outs in zip(codes, files, strict=True) if code]
        assert not failed, f"exit codes {codes}\n" + failed[0].read_text()[-3000:]


def run_program(
    arguments: Sequence[str],
    count: int,
    said: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in so many processes: a script's path, or `-m` and a module, then what
    it is given.

    Args:
        arguments: the command line.
        count: how many processes.
        said: a directory for what they write.
        env: variables beside those of every process.
        timeout: seconds, after which they are killed.

    Returns:
        What all have written, and the first exit code that is not 0.
    """
    with _files(said, count) as files:
        codes = _forked(
            _program, [list(arguments), Path.cwd(), {**os.environ, **(env or {})}], files, timeout
        )
        out, errors = ("".join(outs[which].read_text() for outs in files) for which in (0, 1))
    return subprocess.CompletedProcess(
        list(arguments), next((code for code in codes if code), 0), out, errors
    )


def _program(arguments: list[str], directory: Path, env: Mapping[str, str]) -> None:
    os.environ.update({name: value for name, value in env.items() if name not in GIVEN})
    os.chdir(directory)
    named = arguments[0] == "-m"
    sys.argv = arguments[1:] if named else arguments
    if named:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def _files(said: Path, count: int) -> Iterator[list[tuple[Path, Path]]]:
    """Files for what so many processes write to their standard outputs."""
    with tempfile.TemporaryDirectory(dir=said, prefix="said-") as directory:
        yield [
            (Path(directory) / f"{rank}.out", Path(directory) / f"{rank}.err")
            for rank in range(count)
        ]


def _forked(
    work: Callable[..., None],
    arguments: Sequence[Any],
    files: Sequence[tuple[Path, Path]],
    timeout: float,
) -> list[int]:
    """Return the exit code of each process; when one fails, the others have little time to see
    it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), **GIVEN}
    # the store is here
    shared |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes: list[ForkServerProcess] = []
    paths = [
        str(TESTS / "neuron"),
        str(TESTS / "support"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    with _environment({**GIVEN, "PYTHONPATH": os.pathsep.join(paths)}):
        for rank, outs in enumerate(files):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(len(files)), "LOCAL_WORLD_SIZE": str(len(files))}
            processes.append(
                context.Process(target=_begin, args=(work, arguments, {**shared, **own}, outs))
            )
            processes[-1].start()
    end = time.monotonic() + timeout
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + TO_SEE_IT)
        if time.monotonic() > end:
            for process in running:
                process.kill()
        wait([process.sentinel for process in running], timeout=1)
    return [process.exitcode or 0 for process in processes]


def command(words: Sequence[str], directory: Path) -> None:
    """Run a command line of ours in a directory."""
    from lema.cli.app import app
    from lema.cli.exitcodes import run

    os.chdir(directory)
    raise SystemExit(run(app, list(words)))


def _begin(
    work: Callable[..., None],
    arguments: Sequence[Any],
    variables: Mapping[str, str],
    outs: tuple[Path, Path],
) -> None:
    # because a collection writes to every object's page, which is then no longer shared, and takes
    # long
    gc.freeze()
    os.environ.update(variables)
    for number, file in zip((1, 2), outs, strict=True):
        with file.open("w") as out:
            os.dup2(out.fileno(), number)
    pickles.watch()
    try:
        work(*arguments)
    finally:
        if told := pickles.found():
            raise SystemExit("\n".join(told))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let what is started in a `with` block have these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
