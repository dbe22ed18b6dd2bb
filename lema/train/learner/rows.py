"""The rows that a caller brings, checked, and the micro-batches that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from lema.errors import DataError
from lema.model.layers.routing import FREE
from lema.train.learner.images import RowImage
from lema.train.learner.losses import Loss, LossOptions, loss_named

__all__ = ["ROUTED", "AdapterRows", "Datum", "MicroBatch", "micro_batches_of"]

ROUTED = "routed_experts"  # what callers call their choices of experts


@dataclass(frozen=True, eq=False)
class Datum:
    """One row.

    Args:
        tokens: int64 `[tokens]`.
        targets: what each position is scored on, int64 `[tokens]`, or `[tokens, candidates]`.
        tensors: what the loss needs of it by name, fp32, of the shape of `targets`.
        choices: of each token which experts the routers choose, int64 `[tokens, layers * experts of
            each token]`, `FREE` where they choose themselves; None: they do everywhere.
        images: its images, whose tokens are among its own.
    """

    tokens: Tensor
    targets: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Tensor | None = None
    images: Sequence[RowImage] = ()

    def check(self, loss: Loss, vocabulary: int, longest: int) -> None:
        """Make sure that it is a row of a model, for a loss.

        Args:
            loss: the loss.
            vocabulary: how many tokens the model has.
            longest: tokens of a row, at most.

        Raises:
            DataError: it is not.
        """
        size = len(self.tokens)
        if not 0 < size <= longest:
            raise DataError(f"a row has {size} tokens", how=f"give it 1 to {longest}")
        if self.targets.shape[:1] != (size,) or self.targets.dim() not in (1, 2):
            what = (
                f"target_tokens have the shape {[*self.targets.shape]}, and the row {size} tokens"
            )
            raise DataError(what, how=f"give them the shape [{size}], or [{size}, candidates]")
        for what, ids in (("tokens", self.tokens), ("target_tokens", self.targets)):
            if ids.numel() and not bool(((ids >= 0) & (ids < vocabulary)).all()):
                raise DataError(
                    f"{what} of a row are not all of the vocabulary",
                    how=f"they are numbers from 0 to {vocabulary - 1}",
                )
        if missing := [name for name in loss.needed if name not in self.tensors]:
            raise DataError(
                f"the loss {loss.name} needs {', '.join(missing)} of each row",
                where="loss_fn_inputs",
            )
        readable = {*loss.needed, *loss.taken}
        if unread := sorted(self.tensors.keys() - readable):
            raise DataError(
                f"the loss {loss.name} does not read {', '.join(unread)[:200]}",
                where="loss_fn_inputs",
                how=f"it reads {', '.join(sorted(readable))}",
            )
        for name, tensor in self.tensors.items():
            if tensor.shape != self.targets.shape:
                what = (
                    f"{name} has the shape {[*tensor.shape]}, target_tokens {[*self.targets.shape]}"
                )
                raise DataError(what, where="loss_fn_inputs", how="give both the same shape")
            if not bool(torch.isfinite(tensor).all()):
                raise DataError(f"{name} is not finite everywhere", where="loss_fn_inputs")


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The rows of one request: all go through one adapter, and have one loss.

    Args:
        adapter: the name of the adapter.
        data: the rows.
        loss: the name of the loss.
        options: its options.
    """

    adapter: str
    data: Sequence[Datum]
    loss: str
    options: LossOptions = field(default_factory=dict)

    def check(self, vocabulary: int, longest: int) -> None:
        """Make sure that they are rows of a model; the arguments and errors are those of
        `Datum.check`.
        """
        loss = loss_named(self.loss)
        loss.settled(self.options)
        if not self.data:
            raise DataError("a request has no rows", how="send one at least")
        if len({datum.targets.dim() for datum in self.data}) > 1:
            what = "some rows of a request have one target for each token, some have candidates"
            raise DataError(what, where="target_tokens", how="send them in two requests")
        for datum in self.data:
            datum.check(loss, vocabulary, longest)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some rows of a request that are computed at once, padded on the right."""

    request: int  # the number of the request
    first: int  # the number of its first row in the request
    data: Sequence[Datum]

    def inputs(self) -> dict[str, Tensor]:
        """Return `input_ids`, int64 `[rows, tokens]`, and `attention_mask` if something is
        padded.
        """
        lengths = [len(datum.tokens) for datum in self.data]
        width = max(lengths)
        ids = torch.zeros(len(lengths), width, dtype=torch.long)
        mask = torch.zeros(len(lengths), width, dtype=torch.long)
        for row, (datum, length) in enumerate(zip(self.data, lengths, strict=True)):
            ids[row, :length] = datum.tokens
            mask[row, :length] = 1
        return (
            {"input_ids": ids}
            if min(lengths) == width
            else {
                "input_ids": ids,
                "attention_mask": mask,
            }
        )

    def choices(self, num_layers: int) -> Tensor | None:
        """Return the choices of experts of a model with so many layers, int64 `[rows, tokens,
        layers, experts of each token]`, `FREE` for padding and rows that bring none; None: no row
        brings some.
        """
        there = [datum.choices for datum in self.data if datum.choices is not None]
        if not there:
            return None
        width = max(len(datum.tokens) for datum in self.data)
        choices = torch.full((len(self.data), width, there[0].shape[1]), FREE)
        for row, datum in enumerate(self.data):
            if datum.choices is not None:
                choices[row, : len(datum.choices)] = datum.choices
        by_layer: Tensor = choices.unflatten(-1, (num_layers, -1))
        return by_layer


def micro_batches_of(requests: Sequence[AdapterRows], most_tokens: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of some requests: rows that follow each other in one request, as many
    as have no more than `most_tokens` with their padding, but one at least.

    They do not depend on what other requests come with, and so neither does any number.
    """
    for number, request in enumerate(requests):
        lengths = [len(datum.tokens) for datum in request.data]
        first = 0
        while first < len(lengths):
            widths = accumulate(lengths[first:], max)
            fits = [width * rows <= most_tokens for rows, width in enumerate(widths, 1)]
            rows = max(1, (*fits, False).index(False))
            yield MicroBatch(number, first, request.data[first : first + rows])
            first += rows
