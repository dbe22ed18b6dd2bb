"""Several processes on this machine, started by `torchrun` as a user would; they talk through gloo."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent


def run_processes(
    arguments: list[str], count: int, *, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node COUNT ARGUMENTS`; a script's path, or `-m` and a module, then what it is given.

    What `tests/` holds can be imported; each process has one thread, and warnings are errors.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *launch, *arguments],
        env={**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
