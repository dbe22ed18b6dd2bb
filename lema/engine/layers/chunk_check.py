"""Whether a layer makes the same of a few tokens in chunks as at once.

Chunks are right for a layer in which a token sees earlier tokens only, and these only by what the
cache hands on. `transformers`' cache says of most types that do not fit that they do not. What it
does not know of, such as a convolution over tokens or attention to later ones, shows when a layer
runs both ways. Each layer is asked when it is first on lease with its own weights, and once more
when batches first have padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lema.engine.engine import Engine
from lema.engine.layers.rows import Rows
from lema.errors import is_out_of_memory
from lema.model.capture import PASSED_THROUGH_THE_MODEL, without_dropout
from lema.model.flow import LayerCall
from lema.model.sequence.cache import refusal
from lema.model.sequence.chunks import PADDING, ChunkedCall
from lema.model.sequence.states import ChunkStates

__all__ = ["ChunkChecks", "RunLayer"]

RunLayer: TypeAlias = Callable[[LayerCall, Tensor], Tensor]
"""Runs a layer that is on lease, as it is called, on a hidden state."""

NUM_TOKENS = 12
CHUNK = 3
# of the length of what the layer adds to a token's hidden state, above rounding
TOLERANCE = {True: 0.1, False: 1e-4}  # by whether it computes in half precision
# of the tokens: rounding may send a token to other experts, but not many
SHARE = 0.25


class ChunkChecks:
    """Sees that a layer may be cut, the first time that it is, and once more where rows first have
    padding.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        # with which masks it has been seen to make the same in chunks as at once
        self._checked = set[bool]()

    def cuts(self, rows: Rows, run: RunLayer) -> bool:
        """Return whether one of the micro-batches is longer than a chunk.

        Args:
            rows: in front of the layer, which is on lease.
            run: runs it.

        Raises:
            ConfigError: the layer does not run in chunks, or makes something else.
        """
        calls = rows.calls[self._number]
        in_chunks = next((call for call in calls if isinstance(call, ChunkedCall)), None)
        if in_chunks is not None and in_chunks.rows.masked not in self._checked:
            _check_in_chunks(self._engine, in_chunks, run)
            self._checked.add(in_chunks.rows.masked)
        return in_chunks is not None


@torch.no_grad()
def _check_in_chunks(engine: Engine, call: ChunkedCall, run: RunLayer) -> None:
    """Run a layer on a few tokens of a micro-batch at once, and in chunks.

    Args:
        engine: the objects that every layer works with.
        call: of the layer, on the micro-batch.
        run: runs the layer.

    Raises:
        ConfigError: the layer does not run in chunks, or makes something else.
    """
    split = engine.split
    number = call.number
    drawn = engine.backend.rng_state()
    prelude, rows = call.rows.sample(NUM_TOKENS, CHUNK)
    hidden = prelude.hidden
    make_states = ChunkStates if engine.host_keys is None else engine.host_keys.states
    states = make_states(hidden.shape[1])

    def run_chunk(chunk: int) -> Tensor:
        span = rows.spans[chunk]
        with rows.cache.holding(number, span, states):
            return run(rows.call(number, chunk), hidden[:, span.slice])

    with without_dropout(split.layers[number]):
        expected = run(prelude.calls[number], hidden) - hidden
        try:
            chunks = range(len(rows.spans))
            difference = torch.cat([run_chunk(chunk) for chunk in chunks], dim=1) - hidden
            goes_on = _reaches(states, partial(run_chunk, chunks[-1]))
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            raise refusal(f"layer {number} does not run on a chunk: {error}") from error
    engine.backend.set_rng_state(drawn)
    call.rows.note_states(number, states.handed_on)
    if not goes_on:
        raise refusal(f"layer {number} does not go on from the state that a chunk has left")
    errors = (difference - expected).float().norm(dim=-1)
    lengths = expected.float().norm(dim=-1).clamp(min=1e-30)
    # the caller may have products in half precision of what is in single precision
    computing = torch.is_autocast_enabled(hidden.device.type)
    half = computing or torch.finfo(split.cast).bits < 32
    of_tokens = (errors / lengths)[:, PADDING * call.rows.masked :]
    if float((of_tokens > TOLERANCE[half]).float().mean()) > SHARE:
        raise refusal(f"layer {number} makes something else of a sequence in chunks than at once")


def _reaches(states: ChunkStates, run: Callable[[], Tensor]) -> bool:
    """Whether what `run` makes of a chunk depends on every state that the chunk before has left.
    Its numbers would not tell of a state that decays."""
    with torch.enable_grad():
        output = run()
        entered = states.leaves()
        if not states.num_handed_on:
            return True
        if len(entered) < states.num_handed_on or not output.requires_grad:
            return False
        gradients = torch.autograd.grad(output.sum(), entered, allow_unused=True)
    return all(gradient is not None for gradient in gradients)
