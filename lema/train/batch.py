"""A batch as a user hands it in: one mapping of tensors, checked before any layer is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lema.engine.head.loss import IGNORED
from lema.errors import DataError

__all__ = ["as_batch"]


NAMES = ("input_ids", "labels", "attention_mask")


def as_batch(
    inputs: Any, labels: Tensor | None = None, attention_mask: Tensor | None = None, vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return one mapping of `input_ids`, `labels` and, where given, `attention_mask`; see `LemaTrainer.train_step`.

    Raises:
        DataError: a tensor is missing, or they are not whole numbers of one shape `[batch, sequence]`, or a token is
            outside the vocabulary.
    """
    if isinstance(inputs, Tensor):
        given: dict[str, Any] = {"input_ids": inputs}
    elif isinstance(inputs, Mapping) and "input_ids" in inputs:
        given = {name: inputs[name] for name in NAMES if inputs.get(name) is not None}
    else:
        raise DataError("a batch is a tensor of token ids, or a mapping with input_ids", where="train_step")
    batch = {**given}
    if labels is not None:
        batch["labels"] = labels
    if attention_mask is not None:
        batch["attention_mask"] = attention_mask
    if wrong := [name for name, value in batch.items() if not isinstance(value, Tensor)]:
        raise DataError(f"{', '.join(wrong)} should be torch tensors", where="train_step")
    if "labels" not in batch:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        batch["labels"] = ids if mask is None or mask.shape != ids.shape else ids.masked_fill(mask == 0, IGNORED)
    _check_shapes(batch)
    if isinstance(inputs, Mapping):  # what an objective knows of rows, such as their advantages
        rows = {name: one for name, one in inputs.items() if isinstance(one, Tensor) and name not in NAMES}
        if wrong := [name for name, one in rows.items() if len(one) != len(batch["input_ids"])]:
            raise DataError(f"{', '.join(wrong)} should have one entry for each row", where="train_step")
        batch |= rows
    if vocab_size is not None:
        _check_range("input_ids", batch["input_ids"], vocab_size)
        _check_range("labels", batch["labels"][batch["labels"] != IGNORED], vocab_size)
    return batch


def _check_shapes(batch: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if len(set(shapes.values())) != 1 or batch["input_ids"].ndim != 2 or batch["input_ids"].numel() == 0:
        raise DataError(f"a batch is [batch, sequence] throughout and not empty, not {shapes}", where="train_step")
    for name in ("input_ids", "labels"):
        if batch[name].dtype not in (torch.int64, torch.int32):
            raise DataError(f"{name} should be whole numbers, not {batch[name].dtype}", where="train_step")


def _check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise DataError(
            f"{name} holds {int(tokens.min() if tokens.min() < 0 else tokens.max())}, "
            f"which is outside the vocabulary of {vocab_size} tokens",
            where="train_step",
            how="use the tokenizer of the model being trained; label -100 is what is not learnt",
        )
