"""The directory of a model, opened once: what is known of it before its weights or a device are."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lema.config import LemaConfig
from lema.data import forms_of, longest_row, needs_tokenizer, prepare_data
from lema.data.cache import folder_of
from lema.data.files import find_files
from lema.data.preference import prepare_preferences
from lema.model.skeleton import read_config
from lema.storage import resolve_model
from lema.storage.modelfiles import load_tokenizer

__all__ = ["ModelFiles", "read_data"]


class ModelFiles:
    """A model's directory, opened: its config and its tokenizer, without weights and without a device. `ModelError`:
    there is no model, or its config cannot be read. `trusted`: whether code that comes with the model may run."""

    def __init__(self, settings: LemaConfig, *, trust_remote_code: bool = False, directory: Path | None = None) -> None:
        name, revision = settings.model_name_or_path, settings.revision
        self.directory = directory or resolve_model(name, revision=revision, trust_remote_code=trust_remote_code)
        self.config = read_config(self.directory, trust_remote_code=trust_remote_code)
        self.trusted = trust_remote_code

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer in the directory. `DataError`: there is none."""
        how = "put the tokenizer's files next to the weights, or train on rows of input_ids and labels; if it has code "
        how += "of its own that you trust, add --trust-remote-code"
        return load_tokenizer(self.directory, trusted=self.trusted, how=how)


def read_data(config: LemaConfig, files: ModelFiles, data: Any) -> Any:
    """Read and tokenise data files, or rows, with the tokenizer of a model and the config's limits.

    Returns a `TokenDataset`; for an objective of examples, a `PreferenceDataset`. Raises `ConfigError` where
    `max_length` is more than the model's positions, `DataError` where the data is missing or malformed.
    """
    if data is config.train_data or data is config.eval_data:
        first = config.max_train_samples if data is config.train_data else config.max_eval_samples
        data = find_files(cast("Any", data), first)  # of data sets by name, one after the other
    text, forms = files.config.get_text_config(), forms_of(config)
    longest = longest_row(config.max_length, getattr(text, "max_position_embeddings", None))
    options: dict[str, Any] = {
        "max_length": sys.maxsize if config.packing == "wrapped" else longest,  # which are cut into packs later
        "overlong": config.overlong,
        "vocab_size": getattr(text, "vocab_size", None),
        "forms": forms,
        "cache": folder_of(config.data_cache),
    }
    if config.objective != "sft":
        return prepare_preferences(data, files.tokenizer, labelled=config.objective == "kto", **options)
    paths = data[0] if isinstance(data, list | tuple) and data else data
    of_files = isinstance(paths, str | Path)
    return prepare_data(data, files.tokenizer if not of_files or needs_tokenizer(data, forms) else None, **options)
