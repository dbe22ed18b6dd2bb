"""Rows padded to a multiple of a number of tokens, for equal shares of a sequence, or for few
shapes to compile.

The padding is neither attended to nor trained on, and its logits are not returned: losses and
gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lema.config import LemaConfig
from lema.data.batches import OF_ROWS
from lema.data.forms import longest_row
from lema.engine.head.loss import IGNORED
from lema.errors import ConfigError, DataError

__all__ = ["Padding", "cut", "padding_of", "side_by_side"]

VALUES = {"labels": IGNORED}  # of all else zeros: nothing attends to them


@dataclass(frozen=True)
class Padding:
    """How long rows become."""

    multiple: int = 1  # their length is a multiple of this
    positions: int | None = None  # the longest row that the model takes; None: any

    def longest(self, config: LemaConfig) -> int:
        """Return the tokens that the longest row of a run may be made; `ConfigError` as
        `longest_row`.
        """
        return -(-longest_row(config.max_length, self.positions) // self.multiple) * self.multiple

    def of(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a micro-batch `[batch, sequence]` with longer rows, and the mask that says so; or
        as it is.

        A batch that needs no padding gets a mask as well, so that one shape is one graph; none is
        made where the positions say which rows were packed into one, since a mask would hide that.

        `DataError`: rows become longer than the model's positions."""
        if self.multiple == 1:
            return batch
        length = batch["input_ids"].shape[1]
        longer = -(-length // self.multiple) * self.multiple
        if self.positions is not None and longer > self.positions:
            raise DataError(
                (
                    f"rows of {length} tokens become {longer} long, and the model has "
                    f"{self.positions} positions"
                ),
                where=f"pad_to_multiple_of: {self.multiple}",
                how="lower max_length to "
                f"{self.positions // self.multiple * self.multiple or self.positions} or "
                "less, "
                "or choose another multiple",
            )
        padded = dict(batch)
        # because positions mark packed rows, and a mask would hide where each begins
        if "position_ids" not in padded:
            padded.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        if longer == length:
            return padded
        tokens = {
            name
            for name, tensor in padded.items()
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and name not in OF_ROWS
        }
        more = (0, longer - length)
        return {
            name: pad(tensor, more, value=VALUES.get(name, 0)) if name in tokens else tensor
            for name, tensor in padded.items()
        }


def cut(logits: list[Tensor], batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Leave out of logits `[batch, sequence, vocabulary]` those of padding that was added to
    these micro-batches.
    """
    logits[:] = [
        batch_logits[:, : batch["input_ids"].shape[1]]
        for batch_logits, batch in zip(logits, batches, strict=True)
    ]


def side_by_side(logits: Sequence[Tensor], width: int) -> Tensor:
    """Return logits of micro-batches, some of them cut to their longest row, padded to the width
    of the batch.
    """
    return (
        torch.cat(
            [pad(batch_logits, (0, 0, 0, width - batch_logits.shape[1])) for batch_logits in logits]
        )
        if logits
        else torch.empty(0)
    )


def padding_of(config: LemaConfig, parts: int, positions: int | None) -> Padding:
    """Return how rows are padded for `parts` processes that hold one copy of the model, which has
    so many `positions`. `ConfigError`: so many processes cannot share such rows."""
    shares = parts if config.sequence_parallel else 1
    multiple = config.pad_to_multiple_of or shares
    if multiple % shares:
        what = f"rows of a multiple of {multiple} tokens cannot be cut into {shares} equal shares"
        how = f"set it to a multiple of {shares}, leave it out, or set sequence_parallel: false"
        raise ConfigError(what, where="pad_to_multiple_of", how=how)
    return Padding(multiple, positions)
