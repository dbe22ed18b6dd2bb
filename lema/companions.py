"""The small files beside a model's weights that `transformers` reads: checked to be there, then loaded.

A tokenizer's files come from the same strangers as the weights. A link may not lead out of the model's directory, and a
pipe or a device, which would block or never end, is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from lema.errors import DataError, ModelError
from lema.header import regular_size
from lema.weights import check_inside

__all__ = ["check_companions", "load_generation_config", "load_tokenizer"]

COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
TEMPLATES = "additional_chat_templates"
MAX_BYTES = 500_000_000  # ten times the largest tokenizers


def check_companions(directory: Path) -> None:
    """Make sure that the files `transformers` may open in a model's directory are files, and lie in it.

    Raises:
        WeightsError: one is a link that leaves the directory, no regular file, or enormous.
    """
    folder = directory / TEMPLATES
    if folder.is_symlink() or folder.exists():
        check_inside(folder)
    for place in (directory, folder):
        for file in sorted({file for pattern in COMPANIONS for file in place.glob(pattern)}):
            check_inside(file)
            if not file.is_dir() and regular_size(file) > MAX_BYTES:
                raise DataError(
                    f"{file.name} is larger than the {MAX_BYTES:,} bytes that such a file may have", where=str(file)
                )


def load_tokenizer(directory: Path, *, trusted: bool, how: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory.

    Args:
        directory: the model's.
        trusted: run code that comes with it.
        how: what to do where there is none.

    Raises:
        DataError: there is none, it cannot be loaded, or one of its files is not what it should be.
    """
    check_companions(directory)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    # Any error at all: the files are from outside, and the library that reads them raises plain `Exception`.
    except Exception as error:
        said = str(error) or type(error).__name__
        raise DataError(
            f"the model has no tokenizer that can be loaded: {said}", where=str(directory), how=how
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise DataError(
            f"the model has no tokenizer that can be loaded: {type(tokenizer).__name__} is none",
            where=str(directory),
            how=how,
        )
    return tokenizer


def load_generation_config(directory: Path) -> GenerationConfig | None:
    """Load a model's own settings of generation; None: it has none.

    Raises:
        ModelError: the file cannot be read.
        WeightsError: it is a link that leaves the directory, or no regular file.
    """
    file = directory / "generation_config.json"
    if not file.is_symlink() and not file.exists():
        return None
    check_inside(file)
    regular_size(file)
    try:
        settings: GenerationConfig = GenerationConfig.from_pretrained(directory)
    except Exception as error:
        raise ModelError(
            f"transformers cannot read these settings of generation: {error}",
            where=str(file),
            how="correct the file, or delete it",
        ) from error
    return settings
