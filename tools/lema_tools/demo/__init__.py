"""`lema demo`: makes a small model, fine-tunes it by streaming, saves it, and compares it with what
PEFT reads. Its directory is marked as its own, so that running twice replaces its files and nothing
else."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lema.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from lema_tools.demo.run import Outcome

__all__ = ["claim", "demo", "run_demo"]


MARK = ".lema-demo"
_MARK_TEXT = (
    "`lema demo` made this directory, and replaces its own files in it when it runs again.\n"
)

# All that a run writes.
_OWN = {
    "": "train.yaml",
    "model": (
        "model*.safetensors* config.json generation_config.json tokenizer*.json chat_template.jinja"
    ),
    "data": "text.txt chat.jsonl pairs.jsonl",
    "adapter": "adapter_config.json adapter_model.safetensors lema_config.json loss.png "
    "metrics.jsonl "
    "README.md row_forms.json generation_config.json "
    "tokenizer*.json chat_template.jinja",
}


def demo(
    directory: Annotated[
        Path, typer.Argument(help="Where to put the model, data and adapter.")
    ] = Path("lema-demo"),
) -> None:
    """Make a small model, fine-tune it by streaming, and check the adapter; no network, no GPU."""
    run_demo(directory)


def run_demo(
    directory: Path, *, max_steps: int | None = None, console: "Console | None" = None
) -> "Outcome":
    """Fine-tune a small model on bundled text, on the CPU, without network, and show what happens.
    Everything is written to `directory`, in place of an earlier run's; `train.yaml` beside this
    says how many steps there are. Raises `ConfigError` as `claim`; `LemaError` where the loss did
    not fall, or PEFT has other numbers."""
    claim(directory)  # before the imports below, which take seconds
    from lema_tools.demo.run import run

    return run(directory, max_steps=max_steps, console=console)


def claim(directory: Path) -> None:
    """Make the directory, or take away what an earlier run wrote to it; or `ConfigError`: the
    demo did not make it.
    """
    how = "name a directory that does not exist yet, as in: lema demo DIRECTORY"
    for path in map(directory.joinpath, _OWN):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ConfigError(
                "this is not a directory that the demo made", where=str(path), how=how
            )
        if (
            path == directory
            and path.exists()
            and any(path.iterdir())
            and not (path / MARK).is_file()
        ):
            what = "this directory was not made by the demo, and it is not empty"
            raise ConfigError(what, where=str(path), how=how)
    for checkpoint in (directory / "adapter").glob("checkpoint-*"):
        what = "there are checkpoints of another run in the demo's directory"
        raise ConfigError(what, where=str(checkpoint), how=how)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).write_text(_MARK_TEXT, encoding="utf-8", newline="\n")
    for folder, patterns in _OWN.items():
        for file in chain(*map((directory / folder).glob, patterns.split())):
            file.unlink()
