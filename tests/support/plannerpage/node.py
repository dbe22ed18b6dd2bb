"""The planner's scripts in Node, which has no page: what they say of texts and numbers."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from plannerpage.browser import SCRIPTS
from plannerpage.write import PAGE

__all__ = ["NODE", "evaluated"]

NODE = shutil.which("node")
OF_FORM = (*SCRIPTS, "form")


def evaluated(expression: str, values: Any, folder: Path) -> Any:
    """Return what an expression of JavaScript is, with the page's scripts before it.

    Args:
        expression: may use what the scripts define, and `values`.
        values: of JSON types.
        folder: where the program is written.
    """
    assert NODE is not None, "the caller skips what needs Node where there is none"
    scripts = [(PAGE / f"{name}.js").read_text(encoding="utf-8") for name in OF_FORM]
    end = f"const values = {json.dumps(values)};\nconsole.log(JSON.stringify({expression}));\n"
    program = folder / "program.js"
    program.write_text("\n".join([*scripts, end]), encoding="utf-8")
    done = subprocess.run(
        [NODE, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
