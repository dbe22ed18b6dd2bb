"""The `lema` command, which first makes sure that the package `lema` that Python finds is this
project's.

The public index has another project's package of that name. Where both are installed, one
overwrites or hides the other, and an import would end in an error that says nothing of it.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["main"]

STRANGE = """error: Python finds another project's package `lema`, in {place}
  fix:   pip uninstall lema, then pip install --force-reinstall --no-deps lema-lora
"""
INTERRUPTED = 130  # the exit code


def main() -> None:
    """Run the command line and leave the process with its exit code: 2, if the package is not
    this project's.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Nothing is written until the command line is there, which sees Ctrl-C itself
        # (`lema.cli.interrupts`).
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    # these take much of the time in which Ctrl-C may come before that
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("lema")  # which runs nothing of it
    directories = [Path(path) for path in (spec.submodule_search_locations if spec else None) or ()]
    if not any(map(_is_ours, directories)):
        sys.stderr.write(STRANGE.format(place=directories[0] if directories else "no place"))
        sys.exit(2)
    from lema.cli import main as run

    run()


def _is_ours(directory: "Path") -> bool:
    """Whether a package `lema` is this project's: the other one overwrites `__init__.py` where it
    is installed later, and takes it away where it is uninstalled.
    """
    beginning = directory / "__init__.py"
    if not (directory / "cli" / "app.py").is_file() or not beginning.is_file():
        return False
    return "def lazy_exports(" in beginning.read_text(encoding="utf-8", errors="replace")
