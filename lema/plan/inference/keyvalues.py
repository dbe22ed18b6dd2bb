"""The memory that a batch of texts takes besides the weights: keys and values, and temporary
tensors.

No formula here knows a kind of cache. The model runs forward with the cache that `transformers`
makes for it, under `FakeTensorMode`, in which only shapes are computed, while live bytes are
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from lema.backend import Parallel, load
from lema.engine.generation.forward import layer_caches
from lema.errors import LemaError, ModelError
from lema.model import Split
from lema.model.capture import PASSED_THROUGH_THE_MODEL, tensors_in, values_unread
from lema.plan.work.meter import Tally, without_values
from lema.plan.work.workload import VALUES_NEEDED, cost_kinds, fake_weights
from lema.stream.placement import LayerBytes

__all__ = ["TextBytes", "text_bytes"]

MEASURED = 2  # rows; each of a batch takes the same
FEW = 2  # tokens
# of a prompt in chunks: before a layer, after it, and what is made of that
STATES = 3


@dataclass(frozen=True)
class TextBytes:
    """The memory of a batch of texts, without weights."""

    peak: int  # the most alive at once where keys and values stay on the device, they among it
    keys_values: (
        int  # of all layers, or the states that layers keep instead, once all tokens are made
    )
    layer: int  # of the layer that has most of them

    def of(self, rows: int) -> TextBytes:
        """Return what so many rows take, this being what `MEASURED` take."""
        return TextBytes(
            *(-(-rows * nbytes // MEASURED) for nbytes in (self.peak, self.keys_values, self.layer))
        )

    def on_device(self, *, host: bool) -> int:
        """Return the bytes on the device; `host`: all keys and values but one layer's are in
        host memory.
        """
        return self.peak - self.keys_values + self.layer if host else self.peak


def text_bytes(
    model: PreTrainedModel,
    layers: Sequence[LayerBytes],
    prompt: int,
    new: int,
    parallel: Parallel | None = None,
    chunk: int | None = None,
) -> TextBytes:
    """Run a prompt, and then the last token, through the model, on tensors without values; return
    what rows take.

    Of layers that cost alike and keep alike one is run for all. The model, with the decoder layers'
    weights on `meta`, is left as it was. A row has `prompt` tokens, padding among them, and `new`
    ones are made. `parallel` are the processes that its layers have been divided among; None: they
    are whole. Prompts go through each layer `chunk` tokens at a time; None: at once. Raises
    `ModelError` where what the model computes depends on values.
    """
    split = Split(model, load("cpu"), parallel=parallel)
    failure = None
    alike = cost_kinds(split, layers)
    # tried in the end, because layers may take keys and values that others made
    distinct = tuple(range(len(layers)))
    with without_values(model), values_unread(), torch.no_grad(), split.autocast():
        model.eval()
        for kinds in (alike, distinct):
            try:
                return _measured(split, layers, kinds, prompt, new, chunk)
            except (*VALUES_NEEDED, *PASSED_THROUGH_THE_MODEL, LemaError) as error:
                failure = error
    raise ModelError(
        "this model's computation depends on values, so the memory of its texts is not known",
        where=type(model).__name__,
        how="start with few prompts at once, and watch the memory",
    ) from failure


def _measured(
    split: Split,
    layers: Sequence[LayerBytes],
    kinds: tuple[int, ...],
    prompt: int,
    new: int,
    chunk: int | None,
) -> TextBytes:
    runs = _Runs(split, layers, kinds)
    with split.replaced([runs.of(index) for index in range(split.num_layers)]):
        if chunk is not None and prompt > chunk:
            first = runs.last_chunk(prompt, chunk)
        else:
            with runs.tallied() as tally:
                runs.forward(prompt)
            first = tally.peak + runs.uncounted_bytes
        with runs.tallied() as tally:
            cache = runs.forward(prompt + new - 1)
            # Where the model has no cache of layers, all that is left is what it keeps.
            keys_values = runs.cache_bytes or tally.live
            largest = runs.largest or keys_values
            before = tally.restart_peak()
            runs.forward(1, prompt + new, cache)
    return TextBytes(max(first, keys_values + tally.peak - before), keys_values, largest)


class _Runs:
    """Forwards of a model in which one layer of each kind runs, with weights without values."""

    def __init__(self, split: Split, layers: Sequence[LayerBytes], kinds: tuple[int, ...]) -> None:
        self._split = split
        self._kinds = kinds
        self._weights = [fake_weights(layers[kinds.index(kind)]) for kind in range(max(kinds) + 1)]
        self._tally = Tally()
        self._outputs: dict[Any, tuple[Any, int, int]] = {}
        # Bytes of keys and values of all layers; and of those that another stands for, with what
        # they are views of.
        self.cache_bytes = self.uncounted_bytes = 0
        self.largest = 0  # of one layer
        self._state_bytes = 0  # of a token's hidden state, of all rows
        self._most_keys = 0  # bytes of one layer's keys and values

    def tallied(self) -> Tally:
        """Return a tally that counts no weight."""
        self._tally = Tally()
        self._tally.leave_out([*self._split.model.parameters(), *self._split.model.buffers()])
        for weights in self._weights:
            self._tally.leave_out(weights.values())
        return self._tally

    def of(self, index: int) -> Callable[..., Any]:
        """Return what stands for a layer's forward."""

        def run(*args: object, **kwargs: object) -> object:
            hidden = args[0] if args else kwargs["hidden_states"]
            assert isinstance(hidden, Tensor), "a layer is called without hidden states"
            cache_layers = layer_caches(index, args, kwargs)
            alike = (
                self._kinds[index],
                *(
                    (type(cache_layer), getattr(cache_layer, "sliding_window", None))
                    for cache_layer in cache_layers
                ),
            )
            if alike in self._outputs:
                output, nbytes, storage_bytes = self._outputs[alike]
                self.cache_bytes = self.cache_bytes + nbytes
                self.uncounted_bytes = self.uncounted_bytes + storage_bytes
                return output
            output = self._split.call_layer(index, self._weights[self._kinds[index]], args, kwargs)
            tensors = [
                tensor
                for layer in layer_caches(index, args, kwargs)
                for tensor in tensors_in(vars(layer))
            ]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            storage_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self.cache_bytes = self.cache_bytes + nbytes
            self.largest = max(self.largest, nbytes)
            self._outputs[alike] = (output, nbytes, storage_bytes)
            self._state_bytes = hidden.nbytes // hidden.shape[1]
            keys = [getattr(layer, "keys", None) for layer in layer_caches(index, args, kwargs)]
            of_keys = sum(2 * tensor.nbytes for tensor in keys if tensor is not None)
            self._most_keys = max(self._most_keys, of_keys)
            return output

        return run

    def last_chunk(self, prompt: int, chunk: int) -> int:
        """Return the most alive at once while a prompt goes through one layer after the other in
        chunks: at the last chunk of it in the last layer."""
        self.forward(FEW)
        keys_of_token = self._most_keys // FEW
        with self.tallied() as tally:
            cache = self.forward(prompt - chunk)
            before = tally.restart_peak()
            self.forward(chunk, prompt, cache)
            working_bytes: int = tally.peak - before
            cache_bytes: int = self.cache_bytes
        # The layer at work has keys and values of all tokens twice for a moment, when they go into
        # the cache, also where that keeps those of a window.
        return (
            cache_bytes + working_bytes + prompt * (2 * keys_of_token + STATES * self._state_bytes)
        )

    def forward(
        self, tokens: int, so_far: int | None = None, cache: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run `tokens` tokens of each row, of `so_far` in all; return the cache by the name
        under which it is given.
        """
        self._outputs.clear()
        self.cache_bytes = self.uncounted_bytes = 0
        model = self._split.model
        few = (
            {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        )
        output = model(
            input_ids=torch.ones(MEASURED, tokens, dtype=torch.long),
            attention_mask=torch.ones(MEASURED, so_far or tokens, dtype=torch.long),
            use_cache=True,
            **few,
            **(cache or {}),
        )
        self._outputs.clear()  # because the layers' results are freed
        return {name: output[name] for name in ALL_CACHE_NAMES if output.get(name) is not None}
