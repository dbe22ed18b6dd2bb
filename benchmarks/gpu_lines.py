"""Results that are on the disk as soon as they are known: one line of JSON each, in a file that
only grows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Lines"]


class Lines:
    """A file of such lines, whose end is added to; what is written is printed too.

    Args:
        file: to write; None: lines are printed alone.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **line: Any) -> None:
        """Add a line; it is whole, or not there, whenever the process is ended."""
        text = json.dumps(line)
        print(text, flush=True)
        if self._file is not None:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, text.encode() + b"\n")  # one call, which no signal cuts in two
            finally:
                os.close(descriptor)
