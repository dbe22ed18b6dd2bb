"""Several processes of this machine that talk through gloo, forked from one that has imported what all of them need.

They find what `torchrun` would have set. Starting them by `torchrun` takes each many seconds of importing: that is for
tests of commands. The process they are forked from has never differentiated, and so has no threads to lose.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NEEDED = ["dividedwork", "neuronranks", *(f"transformers.models.{one}.modeling_{one}" for one in ("llama", "qwen3"))]
GIVEN = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}


def run_forked(work: Callable[..., None], arguments: Sequence[Any], count: int, said: Path, timeout: float) -> None:
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), **GIVEN}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # the store is here
    files = [said / f"said {count} {rank}.txt" for rank in range(count)]
    processes: list[ForkServerProcess] = []
    with _environment({**GIVEN, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}):
        for rank, file in enumerate(files):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            processes.append(context.Process(target=_begin, args=(work, arguments, {**shared, **own}, file)))
            processes[-1].start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    failed = [file for process, file in zip(processes, files, strict=True) if process.exitcode]
    assert not failed, f"{len(late)} were killed after {timeout} s\n" + failed[0].read_text()[-3000:]


def command(words: Sequence[str], directory: Path) -> None:
    """Run a command line of ours in a directory."""
    from lema.cli import app, run

    os.chdir(directory)
    raise SystemExit(run(app, list(words)))


def _begin(work: Callable[..., None], arguments: Sequence[Any], variables: Mapping[str, str], file: Path) -> None:
    os.environ.update(variables)
    with file.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    work(*arguments)


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
