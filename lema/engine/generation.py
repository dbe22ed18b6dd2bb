"""Text from a streamed model: `transformers`' own `generate`, with every layer leased as it is called."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase

from lema.engine.head.pieces import PiecedHead
from lema.errors import ConfigError, DataError
from lema.model import Split
from lema.storage.modelfiles import load_generation_config
from lema.stream import LayerStream, Lease
from lema.stream.schedule import forward_order

__all__ = ["generate", "streaming_forward"]

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


@contextmanager
def streaming_forward(split: Split, stream: LayerStream, head: PiecedHead | None = None) -> Iterator[None]:
    """Make the model's own forward lease each layer as it reaches it, and each piece of the head's weight where it is
    leased in pieces, for the length of a `with` block.

    The forward of one layer after the other is what a cache of keys and values needs, and what one token at a time
    allows; training goes layer-major instead.
    """

    order = forward_order(len(stream.layers))

    @contextmanager
    def leased(index: int) -> Iterator[Lease]:
        if not stream.announced:
            stream.announce(order[index:])
        with stream.lease(index) as lease:
            if index == order[-1]:
                # While this one computes the next token's first layers are read, because it will need them all.
                stream.announce(order)
            yield lease

    def forward(index: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with leased(index) as lease:
                return split.call_layer(index, lease.weights, args, kwargs)

        return run

    def product(pieces: PiecedHead, given: Tensor) -> Tensor:
        found = []
        for number, span in enumerate(pieces.spans, split.num_layers):
            with leased(number) as lease:
                found.append(pieces.product(given, lease.weights["weight"], span))
        return torch.cat(found, dim=-1)

    stream.cancel()
    in_pieces = nullcontext() if head is None else head.standing_in(partial(product, head))
    try:
        with split.replaced([forward(index) for index in range(split.num_layers)]), in_pieces:
            yield
    finally:
        stream.cancel()


def generate(
    split: Split,
    stream: LayerStream,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    options: Mapping[str, Any],
    head: PiecedHead | None = None,
) -> Tensor:
    """Return the new tokens, int64 `[prompts, at most max_new_tokens]`; `head`: where its weight is leased in pieces.

    Raises:
        DataError: there is no prompt, or one has no tokens.
        ConfigError: an option is none that `transformers` knows.
    """
    model = split.model
    settings, rest = _settings(directory, model.generation_config, tokenizer, max_new_tokens, options)
    inputs = _padded([tokenizer(prompt)["input_ids"] for prompt in prompts], settings.pad_token_id)
    # Not of any parameter, because those of the layers are on no device between leases.
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), split.autocast(), streaming_forward(split, stream, head):
            tokens: Tensor = cast(Any, model).generate(
                **{name: tensor.to(device) for name, tensor in inputs.items()}, generation_config=settings, **rest
            )
    finally:
        model.train(was_training)
    return tokens[:, inputs["input_ids"].shape[1] :]


def _settings(
    directory: Path,
    default: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the model's own settings with those that this call asks for, and the options that are no settings."""
    settings = load_generation_config(directory) or copy.deepcopy(default or GenerationConfig())
    wanted = {"do_sample": False, "use_cache": True, "max_new_tokens": max_new_tokens, "max_length": None, **options}
    if not wanted["do_sample"]:
        # Taken out, because `transformers` would warn of settings of sampling that came with the model.
        wanted = {name: None for name in SAMPLING if name not in options} | wanted
    if settings.eos_token_id is None:
        wanted.setdefault("eos_token_id", tokenizer.eos_token_id)
    rest = settings.update(**wanted)
    if unknown := rest.keys() - signature(GenerationMixin.generate).parameters.keys():
        how = "options are those of transformers' generate, such as do_sample, temperature and top_p"
        raise ConfigError(f"unknown option of generation: {', '.join(sorted(unknown))}", where="generate", how=how)
    if settings.pad_token_id is None:
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        settings.pad_token_id = padding or 0  # masked, so any token will do
    return settings, rest


def _padded(prompts: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` `[prompts, longest]`, padded on the left: what follows is appended."""
    if not prompts:
        raise DataError("there is no prompt", where="generate", how="give one text or several")
    if empty := [str(place) for place, prompt in enumerate(prompts, 1) if not len(prompt)]:
        what = "a prompt has no tokens"
        raise DataError(what, where=f"prompt {', '.join(empty)}", how="give a prompt of at least one character")
    width = max(map(len, prompts))
    rows = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
