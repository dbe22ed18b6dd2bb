"""Python imports this in every process that a test starts: what LEMA reads through pickle there
ends it with 97.

Where OTHER_SYSTEM is set, what is not on every system is hidden from LEMA
(`tests/support/othersystem.py`).
"""

import atexit
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

UNPICKLED = 97


def _supporting(name: str) -> Any:
    """Import a file of `tests/support`, whatever the path is, under the name that tests know it
    by.
    """
    spec = spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tell() -> None:
    if told := pickles.found():
        sys.stdout.flush()
        sys.stderr.write("\n".join(told) + "\n")
        sys.stderr.flush()
        os._exit(UNPICKLED)


if os.environ.get("OTHER_SYSTEM"):
    othersystem = _supporting("othersystem")
    othersystem.hide(othersystem.of_lema)

pickles = _supporting("pickles")
pickles.watch()
atexit.register(_tell)
