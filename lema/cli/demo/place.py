"""The demo's directory: marked as its own, so that running twice replaces its files and nothing else."""

from pathlib import Path

from lema.errors import ConfigError

__all__ = ["claim"]


MARK = ".lema-demo"
_MARK_TEXT = "`lema demo` made this directory, and replaces its own files in it when it runs again.\n"

# All that a run writes.
_OWN = (
    "train.yaml",
    "model/model*.safetensors*",
    "model/config.json",
    "model/generation_config.json",
    "model/tokenizer*.json",
    "model/chat_template.jinja",
    "data/text.txt",
    "data/chat.jsonl",
    "data/pairs.jsonl",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "adapter/README.md",
    "adapter/tokenizer*.json",
    "adapter/chat_template.jinja",
    "adapter/lema_config.json",
    "adapter/loss.png",
    "adapter/metrics.jsonl",
)


def claim(directory: Path) -> None:
    """Make the directory, or take away what an earlier run wrote to it.

    Raises:
        ConfigError: there is something at this path that the demo did not make; nothing was touched.
    """
    if problem := _problem(directory):
        where, what = problem
        raise ConfigError(
            what, where=str(where), how="name a directory that does not exist yet, as in: lema demo DIRECTORY"
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).write_text(_MARK_TEXT, encoding="utf-8")
    for pattern in _OWN:
        for file in directory.glob(pattern):
            file.unlink()


def _problem(directory: Path) -> tuple[Path, str] | None:
    """Say what at this path is not the demo's; None: nothing is."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        return directory, "this is not a directory that the demo made"
    if not directory.exists():
        return None
    if any(directory.iterdir()) and not (directory / MARK).is_file():
        return directory, "this directory was not made by the demo, and it is not empty"
    for folder in (directory / "model", directory / "data", directory / "adapter"):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            return folder, "this is not a directory that the demo made"
    for checkpoint in (directory / "adapter").glob("checkpoint-*"):
        return checkpoint, "there are checkpoints of another run in the demo's directory"
    return None
