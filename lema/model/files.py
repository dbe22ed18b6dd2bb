"""The directory of a model, opened once: what is known of it before its weights or a device are."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedTokenizerBase

from lema.config import LemaConfig
from lema.model.skeleton import read_config
from lema.storage import resolve_model
from lema.storage.modelfiles import load_tokenizer

__all__ = ["ModelFiles"]


class ModelFiles:
    """A model's directory, opened: its config and its tokenizer, without weights and without a device. `ModelError`:
    there is no model, or its config cannot be read. `trusted`: whether code that comes with the model may run."""

    def __init__(self, settings: LemaConfig, *, trust_remote_code: bool = False) -> None:
        name, revision = settings.model_name_or_path, settings.revision
        self.directory = resolve_model(name, revision=revision, trust_remote_code=trust_remote_code)
        self.config = read_config(self.directory, trust_remote_code=trust_remote_code)
        self.trusted = trust_remote_code

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in the directory. `DataError`: there is none."""
        how = "put the tokenizer's files beside the weights, or train on rows of input_ids and labels; if it has code "
        how += "of its own that you trust, add --trust-remote-code"
        return load_tokenizer(self.directory, trusted=self.trusted, how=how)
