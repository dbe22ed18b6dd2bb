"""Micro-batches with images up to the layers, where these have rows in chunks or in packs.

The model's own forward runs the towers, puts what they make among the embeddings, and makes
positions and masks, all of the rows as they are. It is stopped where it calls the module that holds
the layers. What that is given is joined into packs, and cut into chunks, from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lema.engine.layers.call_chunks import CallChunks, token_inputs
from lema.errors import ConfigError, is_out_of_memory
from lema.model import Split
from lema.model.capture import PASSED_THROUGH_THE_MODEL
from lema.model.flow import Prelude
from lema.model.sequence.blockmask import BlockMask, block_masks
from lema.model.sequence.chunks import Allocate
from lema.model.sequence.row_packs import RowPacks
from lema.model.sequence.token_inputs import IDS, MASK, POSITIONS

__all__ = ["ImageInputs", "front_of_images", "rows_of_packs"]

ImageInputs = Callable[[Tensor], Mapping[str, Tensor]]
"""Returns what the model is given of the images of rows besides their tokens, int64 `[rows,
sequence]`, and their mask."""


def front_of_images(
    split: Split,
    batch: Mapping[str, Tensor],
    images: ImageInputs,
    weights: Mapping[str, Tensor],
    *,
    lengths: Sequence[Sequence[int]] | None,
    size: int | None,
    differentiate: bool,
    allocate: Allocate | None,
) -> Prelude:
    """Run a micro-batch with images up to the layers.

    Args:
        split: the model.
        batch: the inputs of the model, without images, on the device.
        images: what it is given of images.
        weights: of the first layer; see `Split.prelude`.
        lengths: of each pack, the tokens of its rows; None: the rows are not packed.
        size: tokens of a chunk, if rows are longer; None: they are not cut.
        differentiate: let the hidden state keep its graph.
        allocate: as in `ChunkedRows.prelude`.

    Raises:
        ConfigError: rows of this model cannot be packed, or cut.
    """
    width = batch[IDS].shape[1]
    device = batch[IDS].device
    cuts = size is not None and width > size
    if lengths is None and not cuts:
        more = images(batch[IDS])
        return split.prelude(batch, weights, differentiate=differentiate, more=more)
    rows = batch if lengths is None else rows_of_packs(batch[IDS], lengths)
    with block_masks(of_sequences=True):
        call = split.owner_call({**rows, **images(rows[IDS])}, weights, differentiate=differentiate)
    forward = split.owner.forward
    parameters = signature(forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if "use_cache" in parameters or Parameter.VAR_KEYWORD in kinds:
        call["use_cache"] = False
    if lengths is not None:
        if POSITIONS not in parameters:
            raise _unpacked("it takes no position_ids, which mark the rows of a pack")
        call = _packed(forward, call, RowPacks(lengths, width, device))
    front = partial(_front, split, call, size if cuts else None, device)
    try:
        return front(differentiate=differentiate, allocate=allocate)
    except PASSED_THROUGH_THE_MODEL as error:
        if lengths is None or is_out_of_memory(error):
            raise
        raise _unpacked(f"it does not run on a pack: {error}") from error


def _front(
    split: Split,
    call: dict[str, Any],
    size: int | None,
    device: torch.device,
    *,
    differentiate: bool,
    allocate: Allocate | None,
) -> Prelude:
    """Run the module that holds the layers up to these, in chunks of so many tokens; None: at
    once."""
    forward = split.owner.forward
    if size is not None:
        with split.autocast():
            chunks = CallChunks(split, forward, call, size, device)
        return chunks.prelude(differentiate=differentiate, allocate=allocate)
    call = {**call, MASK: _in_full(call.get(MASK))}
    few = {IDS: torch.ones(1, 2, dtype=torch.long, device=device)}

    def run() -> object:
        with split.autocast():
            return forward(**call)

    return split.prelude(few, {}, differentiate=differentiate, run=run)


def _packed(
    forward: Callable[..., Any], call: Mapping[str, Any], packs: RowPacks
) -> dict[str, Any]:
    """Return the arguments of a call on packs, of those on their rows. `ConfigError`: it cannot be
    told to which row they belong."""
    try:
        inputs, options = token_inputs(forward, call)
    except ConfigError as error:
        raise _unpacked(f"something may belong to all rows ({error.what})") from error
    return {**options, **packs.packed(inputs)}


def _unpacked(why: str) -> ConfigError:
    return ConfigError(
        f"rows with images of this model cannot be packed: {why}",
        where="packing",
        how="set packing: false",
    )


def rows_of_packs(ids: Tensor, lengths: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the rows of packs as a batch, padded on the right.

    Args:
        ids: the tokens of the packs, int64 `[packs, sequence]`.
        lengths: of each pack, the tokens of its rows.
    """
    rows = [
        row
        for pack, of_pack in zip(ids, lengths, strict=True)
        for row in pack[: sum(of_pack)].split(list(of_pack))
    ]
    mask = [torch.ones_like(row) for row in rows]
    return {IDS: pad_sequence(rows, batch_first=True), MASK: pad_sequence(mask, batch_first=True)}


def _in_full(mask: object) -> object:
    """Return masks with their values, which every layer reads."""
    if isinstance(mask, Mapping):
        return {name: _in_full(item) for name, item in mask.items()}
    return mask.full() if isinstance(mask, BlockMask) else mask
