"""The shape of Llama 3 8B in 3 GB of this machine's memory: prints the README's row.

    OMP_NUM_THREADS=2 python runs/llama_8b_3gb_cpu.py --directory DIR     # 16 GB of disk, which it deletes

Options are those of `benchmarks/head.py`, which it calls; `--tiny`: a small model without a limit,
to see that it runs.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "head.py"


def main(arguments: list[str]) -> None:
    """Call the benchmark and print what it measured as a row."""
    command = [sys.executable, str(BENCHMARK), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])[0]
    peak, planned = (found[name] / 1e9 for name in ("peak_anonymous", "planned_peak"))
    limit = "none" if "--tiny" in arguments else "3.0 GB (a memory cgroup)"
    name = "a tiny model" if "--tiny" in arguments else "shape of Llama 3 8B, 16.1 GB"
    went = f"it trains; {peak:.1f} GB at the peak, {planned:.1f} GB planned"
    sys.stdout.write(
        f"| {name} | {limit} | - | {went} | `benchmarks/head.py`, {datetime.now(UTC):%Y-%m-%d} |\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
