"""What a layer makes of chunks, put together on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from lema.activations.chunks.cuts import Cut
from lema.activations.chunks.hostpool import HostPool

__all__ = ["ChunkResults"]


class ChunkResults:
    """What a layer makes of all chunks of a micro-batch, or the gradient of its input.

    Args:
        pool: has it in host memory; None: it is on the device.
        num_rows: of the micro-batch.
        length: tokens of the micro-batch.
        cuts: its chunks, of all rows, in the order of their tokens.
        state: where it is put, in which no copies are under way but of these chunks; None: it is
            made with the first chunk.
    """

    def __init__(
        self,
        pool: HostPool | None,
        num_rows: int,
        length: int,
        cuts: Sequence[Cut],
        state: Tensor | None = None,
    ) -> None:
        self._pool = pool
        self._shape = (num_rows, length)
        # padding before and behind all chunks
        self._first = cuts[0].tokens.start
        self._stop = cuts[-1].tokens.stop
        self._state = state
        self._put: Callable[[Cut, Tensor], None] | None = None
        self._copies = ExitStack()
        if state is not None:
            self._clear_padding(state)

    @property
    def state(self) -> Tensor:
        """`[rows, sequence, hidden]`."""
        assert self._state is not None, "a micro-batch has no tokens"
        return self._state

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Let go of what the device holds of it after a `with` block."""
        with self._copies:
            yield

    def put(self, cut: Cut, part: Tensor) -> None:
        """Put in what was made of a chunk; one row may stand for all."""
        if self._state is None:
            self._state = self._allocate(part)
        if self._pool is None:
            self._state[:, cut.tokens] = part.detach()
            return
        if self._put is None:
            self._put = self._copies.enter_context(self._pool.downloads(self._state))
        self._put(cut, part)

    def _allocate(self, part: Tensor) -> Tensor:
        shape = (*self._shape, *part.shape[2:])
        if self._pool is None:
            # zeros, because padding may be in no chunk
            return part.new_zeros(shape)
        state = self._pool.take(shape, part.dtype)
        if self._first > 0 or self._stop < self._shape[1]:
            self._pool.synchronize(state)
            self._clear_padding(state)
        return state

    def _clear_padding(self, state: Tensor) -> None:
        state[:, : self._first] = 0
        state[:, self._stop :] = 0
