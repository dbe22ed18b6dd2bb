"""The inputs of a step on their way to the device: all micro-batches in one copy that the host need not await.

One by one, from memory that is not page-locked, each would stop the host until all queued work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.neftune import activate_neftune

from lema.backend import Backend, Upload
from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.model.row_tables import RowTables

__all__ = ["Inputs", "add_noise", "model_inputs"]

MODEL_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})
TARGETS = "targets"
ALIGNMENT = 256  # of a tensor in memory: a multiple of torch's own
NUM_BUFFERS = 2  # the copy of one step may be under way while those of the next are gathered
LEAST_BYTES = 4096  # of a buffer
MicroBatch = Mapping[str, Tensor]


def model_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the parts of a micro-batch that are arguments of the model."""
    return {name: tensor for name, tensor in batch.items() if name in MODEL_INPUTS}


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Have the input's embeddings come with noise while the model is in training mode, as `transformers` draws it.
    `ConfigError`: the model looks its tokens up in no table."""
    try:
        table: Any = model.get_input_embeddings()
        assert isinstance(table.weight, Tensor)
        activate_neftune(model, alpha)
    except (NotImplementedError, AttributeError, AssertionError) as error:
        what = f"a {type(model).__name__} has no input embeddings for the noise"
        raise ConfigError(what, where="neftune_noise_alpha", how="leave it out") from error


class Inputs:
    """Puts the tensors of micro-batches on the device, through page-locked buffers that are used in turn: the next is
    the one whose copy began longest ago. It is waited for, so there are as many as copies of one step (`expect`)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shared = backend.memory().shared
        self._buffers: deque[tuple[Tensor, Upload]] = deque()
        self._num_buffers = NUM_BUFFERS
        self._largest = LEAST_BYTES

    def expect(self, num_copies: int) -> None:
        """Have as many buffers as a step makes copies, so that each is used again in the next step, and not before."""
        self._num_buffers = max(self._num_buffers, num_copies)

    def place(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """Return the same micro-batches on the device: views of memory that nothing else uses."""
        device = self._backend.device
        here = {
            id(tensor): tensor for batch in micro_batches for tensor in batch.values() if tensor.device.type == "cpu"
        }
        if self._shared or not here:
            return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]
        placed = self._upload(list(here.values()))
        there = dict(zip(here, placed, strict=True))
        return [{name: there.get(id(tensor), tensor) for name, tensor in batch.items()} for batch in micro_batches]

    def place_step(
        self, micro_batches: Sequence[MicroBatch], targets: Sequence[Tensor], tables: RowTables | None = None
    ) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Return what the model is given, and the targets, on the device; `tables` remembers which tokens these are."""
        pairs = zip(micro_batches, targets, strict=True)
        placed = self.place([{**model_inputs(batch), TARGETS: target} for batch, target in pairs])
        there = [batch.pop(TARGETS) for batch in placed]
        if tables is not None:
            tables.expect(len(micro_batches))
            for batch, original in zip(placed, micro_batches, strict=True):
                tables.remember(batch["input_ids"], original["input_ids"])
        return placed, there

    def _upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._buffer(end)
        for tensor, start in zip(tensors, starts, strict=True):
            _view(buffer, start, tensor).copy_(tensor)
        upload = self._backend.device_slots(end, 1).upload(buffer[:end])
        self._buffers.append((buffer, upload))
        slot = upload.wait()
        return [_view(slot, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]

    def _buffer(self, nbytes: int) -> Tensor:
        """Return a host buffer that no copy reads any more: that of the step before has long been copied."""
        # Twice as large, and all that are new alike, because locking memory takes long, and batches change in length.
        while self._largest < nbytes:
            self._largest *= 2
        if len(self._buffers) < self._num_buffers:
            return self._backend.host_buffer(self._largest)
        buffer, upload = self._buffers.popleft()
        upload.drained()
        return buffer if len(buffer) >= nbytes else self._backend.host_buffer(self._largest)


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from `start` on as a contiguous tensor of the shape and dtype of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
