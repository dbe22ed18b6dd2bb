"""The tokens of a batch of prompts, padded on the left, each layer's weights leased once per
token for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from lema.data.chat.tokens import to_continue
from lema.data.files import Row
from lema.data.forms import check_ids
from lema.engine.generation.forward import KeyValues, streaming_forward
from lema.engine.generation.prefill import Prefill
from lema.engine.generation.stopping import Generated, StopCriteria
from lema.engine.head.pieces import PiecedHead
from lema.errors import ConfigError, DataError, LemaError, ModelError
from lema.model import Split
from lema.storage.modelfiles import library_errors
from lema.stream import LayerStream

__all__ = ["checked", "complete", "encoded"]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_h",
)


def complete(
    split: Split,
    stream: LayerStream,
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: Mapping[str, Any],
    *,
    keys_values: KeyValues = "device",
    on_token: Callable[[int], object] = lambda _: None,
    head: PiecedHead | None = None,
    prefill: Prefill | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> list[Generated]:
    """Return what is made for each prompt of token ids; as `num_return_sequences`, more than one
    for each. `generation_config` has the settings of generation that came with the model, if any
    did; `options` are those of `transformers`' `generate`. `on_token` is called after each token
    with how many texts got one, of beams it is not. `prefill`: takes long prompts through the
    layers in chunks; None: prompts go at once. `more`: what the model is given besides tokens, as
    pixels are, with which prompts go at once. `DataError`: there is no prompt, or one has no
    tokens, or one that the model has no row for. `ConfigError`: an option is none that
    `transformers` knows, or a text is to stop at an empty string; `ModelError`: the model's own
    code fails."""
    directory = Path(split.model.config.name_or_path or "")
    if split.model.config.is_encoder_decoder:
        what = "the model's config says that it has an encoder, which this model has not"
        raise ConfigError(
            what, where=f"{directory / 'config.json'}: is_encoder_decoder", how="set it to false"
        )
    vocab_size: int | None = getattr(split.model.config.get_text_config(), "vocab_size", None)
    settings, extra_options, strings = _asked(
        generation_config or split.model.generation_config, tokenizer, max_new_tokens, options
    )
    settings.pad_token_id = _padding(settings, tokenizer, vocab_size)
    last = settings.eos_token_id
    width = max(map(len, checked(prompts, vocab_size)))
    ending = frozenset([] if last is None else [last] if isinstance(last, int) else last)
    rows = len(prompts) * (settings.num_return_sequences or 1)
    user_criteria = extra_options.pop("stopping_criteria", None) or []
    stopping = StopCriteria(width, rows, ending, strings, tokenizer, on_token)
    if beams := (settings.num_beams or 1) > 1:
        # Left to `transformers`, because a beam's place in the batch is another after each token.
        settings.stop_strings = strings or None
        extra_options["tokenizer"] = tokenizer
    criteria = StoppingCriteriaList(user_criteria if beams else [*user_criteria, stopping])
    inputs = {**_padded(prompts, settings.pad_token_id), **(more or {})}
    # Not of any parameter, because those of the layers are on no device between leases.
    device = next(
        parameter.device for parameter in split.model.parameters() if not parameter.is_meta
    )
    was_training = split.model.training
    split.model.eval()
    try:
        reported = _model_errors(directory)
        with (
            reported,
            torch.no_grad(),
            split.autocast(),
            streaming_forward(split, stream, keys_values, head, prefill if more is None else None),
        ):
            sequences: Tensor = cast(Any, split.model).generate(
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                **extra_options,
                stopping_criteria=criteria,
                generation_config=settings,
            )
    finally:
        split.model.train(was_training)
    tokens = sequences[:, width:]  # padded where a text ended before the others
    if beams:
        return [_until(row, ending) for row in tokens.tolist()]
    return [
        Generated(tuple(row[:length]), reason)
        for row, length, reason in zip(
            tokens.tolist(), stopping.lengths, stopping.reasons, strict=True
        )
    ]


@contextmanager
def _model_errors(directory: Path) -> Iterator[None]:
    """Say where the error of a model's own code comes from: settings of its `config.json` that do
    not go together, such as sliding layers without a window, show where `transformers` makes the
    cache. `ModelError`."""
    try:
        yield
    except LemaError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = (
            "transformers cannot generate with this model or these options: "
            f"{type(error).__name__}: {error}"
        )
        how = "check config.json, generation_config.json and the options"
        raise ModelError(what, where=str(directory), how=how) from error


def encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt, with the special tokens that the tokenizer puts in
    front of texts.
    """
    with library_errors(tokenizer.name_or_path):
        return [to_continue(tokenizer, prompt) for prompt in prompts]


def checked(
    prompts: Sequence[Sequence[int]], vocab_size: int | None = None
) -> Sequence[Sequence[int]]:
    """Return the prompts, each as token ids. `DataError`: there is none, one has no tokens, or one
    has a token outside the vocabulary of `vocab_size` tokens; None: not checked."""
    if not prompts:
        raise DataError("there is no prompt", where="generate", how="give one text or several")
    if empty := [str(number) for number, prompt in enumerate(prompts, 1) if not len(prompt)]:
        what = "a prompt has no tokens"
        raise DataError(
            what, where=f"prompt {', '.join(empty)}", how="give a prompt of at least one character"
        )
    for number, prompt in enumerate(prompts, 1):
        check_ids(Row({}, "prompt", number), {"the prompt": prompt}, vocab_size)
    return prompts


def _until(row: list[int], stop_tokens: frozenset[int]) -> Generated:
    """Return the tokens as far as the first that ends a text."""
    length = next((number for number, token in enumerate(row, 1) if token in stop_tokens), 0)
    return Generated(tuple(row[:length]), "stop") if length else Generated(tuple(row), "length")


def _asked(
    generation_config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> tuple[GenerationConfig, dict[str, Any], list[str]]:
    """Return the model's own settings with those that this call asks for, the options that are no
    settings, and the strings that texts stop at."""
    settings = copy.deepcopy(generation_config or GenerationConfig())
    requested = {
        "do_sample": False,
        "use_cache": True,
        "max_new_tokens": max_new_tokens,
        "max_length": None,
        **options,
    }
    if not requested["do_sample"]:
        # Taken out, because `transformers` would warn of settings of sampling that came with the
        # model.
        requested = {name: None for name in SAMPLING if name not in options} | requested
    if settings.eos_token_id is None:
        requested.setdefault("eos_token_id", tokenizer.eos_token_id)
    extra_options = settings.update(**requested)
    if unknown := extra_options.keys() - signature(GenerationMixin.generate).parameters.keys():
        how = (
            "options are those of transformers' generate, such as do_sample, temperature and top_p"
        )
        raise ConfigError(
            f"unknown option of generation: {', '.join(sorted(unknown))}", where="generate", how=how
        )
    strings = (
        [settings.stop_strings]
        if isinstance(settings.stop_strings, str)
        else settings.stop_strings or []
    )
    if "" in strings:
        raise ConfigError(
            "every text contains the empty string", where="stop_strings", how="leave it out"
        )
    settings.stop_strings = None  # because `transformers` would look for them in prompts, too
    return settings, dict(extra_options), list(strings)


def _padding(
    settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> int:
    """Return the first token for padding, of those that the settings and the tokenizer name, that
    the model has a row of embeddings for; else 0. Padding is masked, so any token will do."""
    named = (settings.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next(
        (token for token in named if token is not None and 0 <= token < (vocab_size or token + 1)),
        0,
    )


def _padded(prompts: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` `[prompts, longest]`, padded on the left: what
    follows is appended.
    """
    width = max(map(len, prompts))
    rows = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
