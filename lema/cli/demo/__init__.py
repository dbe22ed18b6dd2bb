"""`lema demo`: makes a small model, fine-tunes it by streaming, saves it, and compares it with what PEFT reads."""

from pathlib import Path
from typing import TYPE_CHECKING

from lema.cli.demo.place import claim

if TYPE_CHECKING:
    from rich.console import Console

    from lema.cli.demo.report import Outcome

__all__ = ["run_demo"]


def run_demo(directory: Path, *, max_steps: int | None = None, console: "Console | None" = None) -> "Outcome":
    """Fine-tune a small model on bundled text, on the CPU, without network, and show what happens.

    Everything is written to `directory`; a second run replaces the files of the first. The text is `almanac.txt` in
    this package, written for this project and under its licence.

    Args:
        directory: where to put the model, the data, the config and the adapter; made where it does not exist.
        max_steps: optimizer steps to train for; None: as `train.yaml` in this package says.
        console: what to print on; None: standard output.

    Raises:
        ConfigError: `directory` was not made by the demo.
        LemaError: the loss did not fall, or the saved adapter gives other numbers in PEFT.
    """
    claim(directory)  # before the imports below, which take seconds
    from lema.cli.demo.run import run

    return run(directory, max_steps=max_steps, console=console)
