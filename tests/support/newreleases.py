"""Runs a module where this environment has other releases of libraries than `constraints.txt`, with which the default run was.

python tests/support/newreleases.py pytest tests/model/test_releases.py
"""

from __future__ import annotations

import subprocess
import sys

from libraryversions import installed, is_constrained

LIBRARIES = ("transformers", "peft", "accelerate", "torch")


def main(command: list[str]) -> int:
    """Return the exit status of the module, or 0 where it is not run."""
    others = [f"{name} {installed(name)}" for name in LIBRARIES if not is_constrained(name)]
    if not others:
        told = f"not run: the default run was with these releases of {', '.join(LIBRARIES)}"
    else:
        told = f"run: constraints.txt has other releases than {', '.join(others)}"
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()
    if not others:
        return 0
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
