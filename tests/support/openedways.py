"""The ways in which programs open a checkpoint, and what each of them finds there."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from publishedclass import published_class

from lema.model.skeleton import auto_class
from lema.storage import GlobalBinaryIndex


def classes(directory: Path) -> list[Any]:
    """The three ways in which a checkpoint is opened."""
    config = transformers.AutoConfig.from_pretrained(directory)
    named = getattr(
        transformers, json.loads((directory / "config.json").read_text())["architectures"][0]
    )
    return list(dict.fromkeys([auto_class(config), published_class(config), named]))


def read(kind: Any, directory: Path) -> tuple[Any, tuple[list[str], list[str]]]:
    """A model, and the names that were missing from the files and not expected in them."""
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    return model.eval(), (sorted(report["missing_keys"]), sorted(report["unexpected_keys"]))


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of its files, by name."""
    return {name: record.shape for name, record in GlobalBinaryIndex(directory).items()}
