"""A call of the module that holds the layers, by a caller of its own, whose rows go through the
layers in chunks of their sequence.

The model's own code before the layers is called on one chunk at a time, with the caller's options,
and so is what comes after them. Neither makes a mask of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers.utils import ModelOutput

from lema.errors import ConfigError
from lema.model import Split
from lema.model.flow import Prelude
from lema.model.sequence.chunks import Allocate, ChunkedRows
from lema.model.sequence.token_inputs import EMBEDDINGS, IDS, POSITIONS, TokenInputs
from lema.model.state.hooks import hooks_of

__all__ = [
    "CACHES",
    "CallChunks",
    "autocast_dtype",
    "check_hooks",
    "shape_of",
    "token_inputs",
]

# Borders of rows in a pack, which its positions say as well. They are for kernels that compute
# attention within rows, and for layers that keep a state.
BORDERS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
NUMBERS = "cache_position"  # of the tokens, which earlier releases of transformers pass
CACHE_OPTION = "use_cache"
# what models call their keys and values, from transformers 5.24 on and before
CACHES = ("cache", "past_key_values")


class CallChunks:
    """The chunks of a call.

    Args:
        split: the model.
        forward: that of the module that holds the layers.
        arguments: of it, by name.
        size: tokens of a chunk.
        device: of the model.

    Raises:
        ConfigError: it has arguments that may belong to the whole sequence.
    """

    def __init__(
        self,
        split: Split,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        size: int,
        device: torch.device,
    ) -> None:
        self._split = split
        self._forward = forward
        self._size = size
        self._device = device.type
        self._ambient = autocast_dtype(device.type)
        values = arguments
        if values.get(POSITIONS) is not None and not any(
            kind.num_states for kind in split.sequence_kinds()
        ):
            values = {name: value for name, value in values.items() if name not in BORDERS}
        self._inputs, self._options = token_inputs(forward, values)
        table = split.model.get_input_embeddings()
        owner = split.owner
        outside = {*owner.modules()} - {owner, table, *split.layers.modules()}
        check_hooks(hooks_of(outside))

    def rows(self, *, leaves_out_padding: bool, shares: bool) -> ChunkedRows:
        """Return the chunks of the call's rows; the arguments are those of `ChunkedRows`."""
        return self._split.rows_in_chunks(
            self._inputs,
            self._size,
            self._call,
            leaves_out_padding=leaves_out_padding,
            shares=shares,
        )

    def prelude(
        self, *, differentiate: bool, shares: bool = False, allocate: Allocate | None = None
    ) -> Prelude:
        """Run the model's own code before the layers; padding that all rows share is in no
        chunk. `shares`: as in `ChunkedRows`; `allocate`: as in its `prelude`."""
        rows = self.rows(leaves_out_padding=True, shares=shares)
        return rows.prelude(differentiate=differentiate, allocate=allocate)

    def finish(self, hidden: Tensor) -> ModelOutput:
        """Return what the module makes of the last layer's output, `[rows, sequence, hidden]`."""
        parts = []
        # of tokens alone, because nothing else reaches what comes after the layers
        tokens = {self._inputs.name: self._inputs.tokens}
        options = {CACHE_OPTION: False} if CACHE_OPTION in self._options else {}
        for start in range(0, hidden.shape[1], self._size):
            part = slice(start, start + self._size)
            batch = {name: tensor[:, part] for name, tensor in tokens.items()}
            run = partial(self._call, batch, options)
            parts.append(self._split.finish(hidden[:, part], run))
        output: ModelOutput = tree_map(_joined, *parts)
        return output

    def _call(self, batch: Mapping[str, Any], options: Mapping[str, Any]) -> object:
        # said again, because calls are made again in the backward, where nothing is set
        enabled = self._ambient is not None
        with torch.autocast(self._device, dtype=self._ambient, enabled=enabled):
            return self._forward(**{**self._options, **batch, **options})


def token_inputs(
    forward: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[TokenInputs, dict[str, Any]]:
    """Return what of a call's arguments belongs to its tokens, and the others.

    Args:
        forward: of the module that holds the layers.
        arguments: of its call, by name.

    Raises:
        ConfigError: some may belong to the whole sequence.
    """
    values = {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in (*CACHES, NUMBERS)
    }
    of_tokens = {name: value for name, value in values.items() if _has_tensors(value)}
    options = {name: value for name, value in values.items() if name not in of_tokens}
    return TokenInputs(of_tokens, of_tokens.keys() - signature(forward).parameters.keys()), options


def _has_tensors(value: object) -> bool:
    """Whether there are tensors in an argument that have something for tokens."""
    return any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(value))


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of products on a type of device; None: none is set."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def shape_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many rows a call has, and how many tokens each has."""
    ids: Tensor | None = arguments.get(IDS)
    tokens: Tensor = arguments[EMBEDDINGS] if ids is None else ids
    num_rows, width = tokens.shape[:2]
    return num_rows, width


def check_hooks(hooks: object) -> None:
    """Refuse hooks in, or on, layers through which sequences go in chunks. `ConfigError`: there
    are some."""
    if hooks is not None:
        raise ConfigError(
            "hooks on layers, and on modules around them, would see chunks of a sequence",
            where="sequence_chunk",
            how="remove the hooks, or leave it out",
        )


def _joined(*parts: object) -> object:
    """Return what the module has made of all chunks: tensors have a sequence."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(tensors, dim=1) if tensors else parts[0]
