"""What a user hands in to train on: a batch as one mapping of tensors, checked; data of any form
as rows of tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from lema.config import LemaConfig
from lema.data import TokenDataset, longest_row, num_positions
from lema.data.columns import FLAGS
from lema.data.dataset import Rows
from lema.data.preference import PreferenceDataset
from lema.data.read import Data, mixed
from lema.engine import StreamedModel
from lema.engine.head.loss import IGNORED
from lema.engine.packing import Packs, check_packing, packs_of, tried_rows
from lema.errors import ConfigError, DataError
from lema.model.files import ModelFiles, read_data

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Dataset", "as_batch", "as_rows", "check_images", "pack_rows", "packed"]

NAMES = ("input_ids", "labels", "attention_mask")


def as_batch(
    inputs: Tensor | Mapping[str, Any],
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    text_config: "PreTrainedConfig | None" = None,
    files: ModelFiles | None = None,
) -> dict[str, Tensor]:
    """Return one mapping of `input_ids`, `labels` and, where given, `attention_mask`; see
    `LemaTrainer.train_step`. The model's `text_config` tells the vocabulary, and with the tokenizer
    in its `files` what padding looks like. Raises `DataError` where a tensor is missing, or they
    are not whole numbers of one shape `[batch, sequence]`, or a token is outside the vocabulary, or
    rows look padded and nothing says where."""
    batch = _tensors(inputs, labels, attention_mask)
    if "labels" not in batch:
        batch["labels"] = _all_but_padding(batch, text_config, files)
    _check_shapes(batch)
    if isinstance(inputs, Mapping):
        batch |= _of_rows(inputs, len(batch["input_ids"]))
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is not None:
        _check_range("input_ids", batch["input_ids"], vocab_size)
        _check_range("labels", batch["labels"][batch["labels"] != IGNORED], vocab_size)
    return batch


def _tensors(
    inputs: Tensor | Mapping[str, Any], labels: Tensor | None, attention_mask: Tensor | None
) -> dict[str, Tensor]:
    """Return what was given of token ids, labels and mask by name; all are tensors."""
    if isinstance(inputs, Tensor):
        batch: dict[str, Any] = {"input_ids": inputs}
    elif isinstance(inputs, Mapping) and "input_ids" in inputs:
        batch = {name: inputs[name] for name in NAMES if inputs.get(name) is not None}
    else:
        raise DataError(
            "a batch is a tensor of token ids, or a mapping with input_ids", where="train_step"
        )
    extra_tensors = {"labels": labels, "attention_mask": attention_mask}
    batch |= {name: tensor for name, tensor in extra_tensors.items() if tensor is not None}
    if wrong := [name for name, value in batch.items() if not isinstance(value, Tensor)]:
        raise DataError(f"{', '.join(wrong)} should be torch tensors", where="train_step")
    return batch


def _all_but_padding(
    batch: Mapping[str, Tensor], text_config: "PreTrainedConfig | None", files: ModelFiles | None
) -> Tensor:
    """Return labels of every token but padding, which the mask shows; without one there may be
    none.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    if mask is None and ids.ndim == 2:
        # Only a tokenizer that was used is asked, because loading one takes seconds.
        tokenizer = vars(files).get("tokenizer") if files is not None else None
        for source in (text_config, tokenizer):
            pad = getattr(source, "pad_token_id", None)
            _check_padding(ids, pad, getattr(source, "eos_token_id", None))
    if mask is None or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask == 0, IGNORED)


def _check_shapes(batch: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not of one shape `[batch, sequence]`, or not whole numbers."""
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if (
        len(set(shapes.values())) != 1
        or batch["input_ids"].ndim != 2
        or batch["input_ids"].numel() == 0
    ):
        raise DataError(
            f"a batch is [batch, sequence] throughout and not empty, not {shapes}",
            where="train_step",
        )
    for name in ("input_ids", "labels"):
        if batch[name].dtype not in (torch.int64, torch.int32):
            raise DataError(
                f"{name} should be whole numbers, not {batch[name].dtype}", where="train_step"
            )


def _of_rows(inputs: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Return what an objective knows of each of so many rows, such as their advantages."""
    rows = {
        name: tensor
        for name, tensor in inputs.items()
        if isinstance(tensor, Tensor) and name not in NAMES
    }
    if wrong := [name for name, tensor in rows.items() if len(tensor) != count]:
        raise DataError(
            f"{', '.join(wrong)} should have one entry for each row", where="train_step"
        )
    return rows


def _check_padding(ids: Tensor, pad: int | None, end: object) -> None:
    """Refuse rows that end or begin with padding, more than the one token that may end a text:
    it would be trained.
    """
    if pad is None or ids.numel() == 0:
        return
    once = 2 if pad == end or (isinstance(end, list) and pad in end) else 1
    width = min(once, ids.shape[1])
    # one at the beginning may open a text
    edges = (ids[:, -width:], ids[:, : min(2, ids.shape[1])])
    if ids.shape[1] > 2 and any(bool((edge == pad).all(dim=1).any()) for edge in edges):
        how = (
            "give the tokenizer's whole batch, train_step(batch), or attention_mask, or labels "
            "with -100 at padding"
        )
        raise DataError(
            "rows are padded, but there is no attention_mask", where="train_step", how=how
        )


def _check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise DataError(
            f"{name} holds {int(tokens.min() if tokens.min() < 0 else tokens.max())}, "
            f"which is outside the vocabulary of {vocab_size} tokens",
            where="train_step",
            how=(
                "use the tokenizer of the model being trained; label -100 excludes a token "
                "from training"
            ),
        )


Dataset: TypeAlias = Data | Rows
"""Rows of `input_ids` and `labels`; text, prompts or messages as dictionaries; or files."""


def as_rows(
    data: Dataset, config: LemaConfig, files: ModelFiles | None, report: Callable[[str], None]
) -> Rows:
    """Return data as rows of `input_ids` and `labels`: as they are where they have them, and
    nothing that says which to leave out; else read and tokenised as files are. They are such rows;
    or text, prompts or messages as dictionaries, a `datasets.Dataset` of them, or files.
    `report` is called with what there is to say of data that were tokenised. Raises `DataError` as
    `lema.data.prepare_data`, and where there is no tokenizer."""
    if isinstance(data, TokenDataset | PreferenceDataset):
        return data
    if isinstance(data, list | Mapping) and data == config.train_data:
        data = config.train_data  # data sets, which the config knows
    elif _is_numbered(data):
        # once, because a row of the caller's may take time to make
        first = data[0] if len(data) else None
        if not isinstance(first, Mapping | str | Path):
            return data
        if isinstance(first, Mapping) and {"input_ids", "labels"} <= first.keys():
            # not all, where making a row may take time
            sample = data if type(data) is list else [first]
            if not any(FLAGS & row.keys() for row in sample):
                return data
    if files is None:
        how = (
            "tokenise them with lema.data.prepare_data, or take the trainer from "
            "LemaModel.get_trainer"
        )
        raise DataError(
            "the rows are not token ids, and this trainer has no tokenizer", where="fit", how=how
        )
    read: TokenDataset | PreferenceDataset = read_data(config, files, data)
    read = mixed(config, read) if data is config.train_data else read
    for line in (f"data: {read.counts}", *read.notes):
        report(line)
    return read


def _is_numbered(data: object) -> TypeGuard[Rows]:
    return (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not isinstance(data, str | Mapping)
    )


def check_images(rows: Rows, config: LemaConfig) -> None:
    """Refuse, with `ConfigError`, settings that do not go with rows that have images."""
    if not getattr(rows, "has_images", False):
        return
    if config.packing == "wrapped":
        what = "the rows have images, and packs of rows that are cut would cut an image"
        raise ConfigError(what, where="packing", how="set it to true, which packs whole rows")
    if config.context_parallel_size is not None:
        what = "the rows have images, which a model puts among the tokens of a whole sequence"
        raise ConfigError(what, where="context_parallel_size", how="leave it out")
    if config.cache_frozen_prefix:
        what = "the rows have images, and what layers make of them is not kept between epochs"
        raise ConfigError(what, where="cache_frozen_prefix", how="set it to false")


def packed(
    rows: Rows,
    model: StreamedModel,
    config: LemaConfig,
    report: Callable[[str], None] = lambda _: None,
    *,
    checked: bool = False,
) -> Rows:
    """Return rows joined into packs, where the config asks for that; `report` is told how many
    there are. The model is asked whether it can be trained on them, unless it is `checked` already.
    Raises `ConfigError` where it does not keep the rows of a pack apart, `DataError` where a row
    does not fit."""
    if not config.packing:
        return rows
    if not len(rows):
        raise DataError("the data set is empty", how="give at least one row")
    if not checked:
        at_once = config.micro_batch_size or config.batch_size
        check_packing(model, tried_rows(rows), at_once)
    packs = pack_rows(rows, config, model.split.model.config)
    for line in packs.notes if isinstance(packs, Packs) else ():
        report(line)
    return packs


def pack_rows(rows: Rows, config: LemaConfig, model_config: "PreTrainedConfig") -> Rows:
    """Return rows joined into packs, where the settings ask for that, whatever the model makes of
    packs.

    Args:
        rows: the rows.
        config: the settings.
        model_config: of the model, whose positions limit a pack.
    """
    if not config.packing:
        return rows
    length = longest_row(config.max_length, num_positions(model_config, config))
    return packs_of(rows, length, config)
