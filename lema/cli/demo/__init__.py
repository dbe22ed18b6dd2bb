"""`lema demo`: makes a small model, fine-tunes it by streaming, saves it, and compares it with what PEFT reads.
Its directory is marked as its own, so that running twice replaces its files and nothing else."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from lema.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from lema.cli.demo.run import Outcome

__all__ = ["claim", "run_demo"]


MARK = ".lema-demo"
_MARK_TEXT = "`lema demo` made this directory, and replaces its own files in it when it runs again.\n"

# All that a run writes.
_OWN = {
    "": "train.yaml",
    "model": "model*.safetensors* config.json generation_config.json tokenizer*.json chat_template.jinja",
    "data": "text.txt chat.jsonl pairs.jsonl",
    "adapter": "adapter_config.json adapter_model.safetensors lema_config.json loss.png metrics.jsonl README.md "
    "tokenizer*.json chat_template.jinja",
}


def run_demo(directory: Path, *, max_steps: int | None = None, console: "Console | None" = None) -> "Outcome":
    """Fine-tune a small model on bundled text, on the CPU, without network, and show what happens. Everything is
    written to `directory`, in place of an earlier run's; `train.yaml` beside this says how many steps there are. Raises
    `ConfigError` as `claim`; `LemaError` where the loss did not fall, or PEFT has other numbers."""
    claim(directory)  # before the imports below, which take seconds
    from lema.cli.demo.run import run

    return run(directory, max_steps=max_steps, console=console)


def claim(directory: Path) -> None:
    """Make the directory, or take away what an earlier run wrote to it; or `ConfigError`: the demo did not make it."""
    if problem := next(_problems(directory), None):
        where, what = problem
        how = "name a directory that does not exist yet, as in: lema demo DIRECTORY"
        raise ConfigError(what, where=str(where), how=how)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).write_text(_MARK_TEXT, encoding="utf-8")
    for folder, patterns in _OWN.items():
        for file in chain(*map((directory / folder).glob, patterns.split())):
            file.unlink()


def _problems(directory: Path) -> Iterator[tuple[Path, str]]:
    for folder in (directory, directory / "model", directory / "data", directory / "adapter"):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            yield folder, "this is not a directory that the demo made"
        if folder == directory and folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
            yield folder, "this directory was not made by the demo, and it is not empty"
    for checkpoint in (directory / "adapter").glob("checkpoint-*"):
        yield checkpoint, "there are checkpoints of another run in the demo's directory"
