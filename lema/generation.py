"""Text from a streamed model: `transformers`' own generate, with every layer leased as it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lema.errors import DataError
from lema.split import Split
from lema.stream.lease import LayerStream
from lema.stream.schedule import forward_order

__all__ = ["generate", "streaming_forward"]


@contextmanager
def streaming_forward(split: Split, stream: LayerStream) -> Iterator[None]:
    """Make the model's own forward lease each layer as it reaches it, for the length of a `with` block.

    The forward of one layer after the other is what a cache of keys and values needs, and what one token at a time
    allows; training goes layer-major instead.
    """

    def forward(index: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not stream.announced:
                stream.announce(forward_order(split.num_layers)[index:])
            with stream.lease(index) as lease:
                if index == split.num_layers - 1:
                    stream.announce(forward_order(split.num_layers))  # the next token will need them
                return split.call_layer(index, lease.weights, args, kwargs)

        return run

    stream.cancel()
    try:
        with split.replaced([forward(index) for index in range(split.num_layers)]):
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
) -> Tensor:
    """Return the new tokens, int64 `[prompts, at most max_new_tokens]`.

    Raises:
        DataError: a prompt has no tokens.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    if encoded["input_ids"].shape[1] == 0:
        raise DataError("the prompt has no tokens", how="give a prompt of at least one character")
    model = split.model
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    settings = _generation_config(directory, model.generation_config)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), split.autocast(), streaming_forward(split, stream):
            tokens: Tensor = cast(Any, model).generate(
                **{name: tensor.to(device) for name, tensor in encoded.items() if name != "token_type_ids"},
                generation_config=settings,
                use_cache=True,
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                **{"do_sample": False, **options},
            )
    finally:
        model.train(was_training)
    return tokens[:, encoded["input_ids"].shape[1] :]


def _generation_config(directory: Path, default: GenerationConfig | None) -> GenerationConfig | None:
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory)
    return default
