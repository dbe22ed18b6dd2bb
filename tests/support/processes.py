"""Several processes on this machine, started by `torchrun` as a user would; they talk through
gloo.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

SUPPORT = Path(__file__).parent


def run_processes(
    arguments: list[str], count: int, *, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node COUNT ARGUMENTS`; a script's path, or `-m` and a module, then
    what it is given.

    What `tests/support` holds can be imported; each process has one thread.
    """
    with started_processes(arguments, count, env=env) as started:
        out, errors = started.communicate(timeout=timeout)
    return subprocess.CompletedProcess(started.args, started.returncode, out, errors)


@contextmanager
def started_processes(
    arguments: list[str], count: int, *, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the same for the length of a `with` block; what still runs at its end is killed."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    started = subprocess.Popen(
        [sys.executable, *launch, *arguments],
        env={**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            for one in [*psutil.Process(started.pid).children(recursive=True), started]:
                one.kill()
            started.communicate()
