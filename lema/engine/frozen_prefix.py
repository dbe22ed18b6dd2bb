"""The outputs of the frozen layers at the bottom for each micro-batch, kept on disk from one epoch
to the next.

Where nothing below a layer trains and nothing there is drawn at random, the same micro-batch
arrives at that layer the same in every epoch, bit for bit. It is recognised by its tokens and
masks, and by what the modules before the layers keep from call to call: the table of a rotary
embedding may go by the longest row that was seen before. Rows are not kept one by one, because the
products of a layer may round otherwise when a row is computed together with others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.activations.boundaries import view_like
from lema.activations.diskstore import DiskStore
from lema.activations.hoststore import HostPool
from lema.activations.protocols import WaitingPiece
from lema.backend import Backend
from lema.backend.trace import NO_TRACE, NoTrace
from lema.errors import ConfigError
from lema.storage.spillfile import OffloadFile, whole_blocks

__all__ = ["PrefixCache"]

NUM_BUFFERS = 3  # hidden states on their way to or from the disk
Key = bytes


@dataclass(frozen=True)
class _Piece:
    """What is kept of a micro-batch."""

    waiting_piece: WaitingPiece  # of its hidden state
    like: Tensor  # what that looks like
    around: Mapping[str, Any]  # what the modules before the layers kept


class PrefixCache:
    """Hidden states at the input of `layer`, the lowest that gradients reach, by micro-batch; the
    layers below it are spared. `num_tokens` are those of all micro-batches that will be kept,
    padding included. The file in `directory` has no name and ends with this object. `ConfigError`:
    there is no layer to spare. `DiskError`: no file can be made."""

    def __init__(
        self,
        backend: Backend,
        layer: int,
        directory: Path,
        num_tokens: int,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        if layer == 0:
            raise _refusal(
                "gradients reach the lowest layer, so there is no layer below it to skip"
            )
        self.layer = layer
        self._backend = backend
        self._num_tokens = num_tokens
        how = (
            "free some space, set offload_dir to a directory on another disk, or set "
            "cache_frozen_prefix: false"
        )
        file = OffloadFile(directory, "the output of frozen layers", how, trace)
        self._store = DiskStore(file, HostPool(backend.host_buffer, num_buffers=NUM_BUFFERS))
        self._pieces: dict[Key, _Piece] = {}

    def holds(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether every one of these has been kept."""
        return all(_key(batch) in self._pieces for batch in micro_batches)

    def fits(
        self, micro_batches: Sequence[Mapping[str, Tensor]], around: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether what is held of micro-batches was made while the modules before the layers kept
        what is `around` them now: of each, as JSON types, after these modules have run on it."""
        pieces = [self._pieces[_key(batch)] for batch in micro_batches]
        return all(piece.around == snapshot for piece, snapshot in zip(pieces, around, strict=True))

    def keep(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        hidden: Sequence[Tensor],
        around: Sequence[Mapping[str, Any]],
        *,
        lowest: int,
        drawn: bool,
        handed_on: bool,
        stateful: bool,
    ) -> None:
        """Keep the hidden states of micro-batches at the layer, and what was `around` them, as
        `fits` has it, unless they are kept already. `ConfigError`: gradients, which go down to the
        layer `lowest`, reach a layer that is spared; or something was `drawn` at random below the
        layer; or more than the hidden state was `handed_on`; or something there is `stateful`, from
        call to call. `DiskError`: the disk has no room for all, or fails."""
        if lowest < self.layer:
            raise _refusal(f"gradients reach layer {lowest}, so its output changes in every epoch")
        if drawn:
            raise _refusal(
                "the layers below the adapters use random numbers (dropout), which change "
                "in every epoch"
            )
        if handed_on:
            raise _refusal("the layers below the adapters pass on more than the hidden state")
        if stateful:
            raise _refusal("the layers below the adapters keep something from call to call")
        for batch, state, snapshot in zip(micro_batches, hidden, around, strict=True):
            before = self._pieces.get(key := _key(batch))
            if before is not None and before.around == snapshot:
                continue
            like = torch.empty_like(state, device="meta", requires_grad=False)
            # because a disk that is too small shall be known at the first batch, not at the last
            if not self._pieces:
                self._store.reserve(
                    whole_blocks(like.nbytes) * -(-self._num_tokens // batch["input_ids"].numel())
                )
            piece = self._store.allocate(like.nbytes)
            view_like(piece.fill(), like).copy_(state.detach())
            piece.filled(lambda: None)  # because `copy_` to host memory returns when it has ended
            self._pieces[key] = _Piece(piece, like, snapshot)
            if before is not None:
                before.waiting_piece.drop()

    def fetch(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
        """Return micro-batches' hidden states, on the device. `ReadError`, `DiskError`: not
        read, or not written.
        """
        states: list[Tensor] = []
        pieces = [self._pieces[_key(batch)] for batch in micro_batches]
        for number, piece in enumerate(pieces):
            for following in pieces[number : number + NUM_BUFFERS]:
                following.waiting_piece.expect()
            like = piece.like
            state = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=self._backend.device
            )
            states.append(state.copy_(view_like(piece.waiting_piece.memory(), like)))
            piece.waiting_piece.used(lambda: None)
        return tuple(states)

    def close(self) -> None:
        """Give the space back."""
        self._store.close()
        self._pieces.clear()


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="cache_frozen_prefix", how="set cache_frozen_prefix: false")


def _key(batch: Mapping[str, Tensor]) -> Key:
    """Return what tells a micro-batch from every other: everything in it but its labels."""
    digest = hashlib.sha256()
    for name in sorted(batch.keys() - {"labels"}):
        tensor = batch[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.digest()
