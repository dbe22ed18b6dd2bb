"""Texts for any number of prompts, in batches of about equal lengths; a batch reads the weights once per token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lema.engine import complete
from lema.engine.generation import Finish, KeyValues, checked, encoded
from lema.errors import ConfigError, ModelError
from lema.plan import Allocation
from lema.plan.inference.room import RowPlan, TextPlan, plan_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lema.train.model import LemaModel

__all__ = ["Completion", "batches_of", "completions", "plan_of", "planned", "texts_of"]

Planned = TypeVar("Planned", TextPlan, RowPlan)
MOST_AT_ONCE = 64  # texts of a batch that nobody has asked for a size of: results come as batches end


@dataclass(frozen=True)
class Completion:
    """What a model has made of one prompt."""

    index: int  # of the prompt, and among several of one prompt their number beside it
    text: str  # without the string it stopped at, and without special tokens
    finish: Finish
    prompt_tokens: int
    tokens: tuple[int, ...]  # that were made


def plan_of(
    model: LemaModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None,
    keys_values: KeyValues = "device",
    *,
    choose: bool = False,
) -> TextPlan | None:
    """Return what the batches of these prompts take, the widest of them counted; None: it cannot be told.

    Args:
        batch_size: prompts at once; None: as many as there is room for, 64 at most.
        choose: spend the limits of memory on these texts, and not on a step of training.

    Raises:
        MemoryLimitError: a batch does not fit; it names the one that does.
    """
    host = keys_values == "host"
    if host and model.backend.memory().shared:
        warnings.warn("keys and values on the host save nothing on a device that computes in its memory", stacklevel=3)
    longest, most = max(map(len, prompts)), min(len(prompts), MOST_AT_ONCE)
    rows = None if batch_size is None else min(batch_size, len(prompts))

    def plan(held: Allocation | None) -> TextPlan:
        return plan_texts(model.opened, longest, max_new_tokens, rows=rows, most=most, host=host, held=held)

    return planned(model, plan, "them", choose=choose)


def planned(model: LemaModel, plan: Callable[[Allocation | None], Planned], of: str, *, choose: bool) -> Planned | None:
    """Plan with what memory is spent on already, or `choose` that too; None, with a warning: it cannot be told."""
    if choose:
        model.spend_anew()
    try:
        made = plan(None if choose else model.allocation)
    except ModelError as error:
        warnings.warn(f"{error.what}: no memory is set aside for {of}", stacklevel=4)
        return None
    if choose:
        model.allocation = made.allocation
    return made


def texts_of(
    model: LemaModel,
    prompt: str | Sequence[str],
    max_new_tokens: int,
    batch_size: int | None,
    keys_values: KeyValues,
    options: Mapping[str, Any],
) -> list[str]:
    """Return the text that follows each prompt; `batch_size` None: all at once. Errors: of `plan_of`, `completions`."""
    ids = checked(encoded(model.tokenizer, [prompt] if isinstance(prompt, str) else prompt))
    size = batch_size or len(ids)
    plan_of(model, ids, max_new_tokens, size, keys_values)
    batches = completions(model, ids, max_new_tokens, size, options, keys_values=keys_values)
    return [one.text for one in sorted((one for batch in batches for one in batch), key=lambda one: one.index)]


def batches_of(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Return the numbers of the prompts of each batch: the longest together and first, so that little is padding and
    what does not fit shows at once; those of a batch in their own order, in which `transformers` draws for them."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    return [sorted(order[first : first + batch_size]) for first in range(0, len(order), batch_size)]


def completions(
    model: LemaModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    options: Mapping[str, Any],
    *,
    keys_values: KeyValues = "device",
    seed: int | None = None,
    done: Collection[int] = (),
    told: Callable[[int], object] = lambda _: None,
) -> Iterator[list[Completion]]:
    """Yield the texts of each batch as it ends, in the order of `batches_of`.

    Args:
        options: of `transformers`' `generate`, and `stop_strings`.
        seed: each batch begins with this number and its own; None: random numbers go on where they are.
        done: prompts that need no text; a batch of such alone is left out, and no other batch changes by it.
        told: called after each token with how many texts got one.

    Raises:
        DataError: there is no prompt, or one has no tokens.
        ConfigError: an option is unknown, or processes that hold the model together divide the tokens of a row.
    """
    _same_generators(model)
    several = int(options.get("num_return_sequences") or 1)
    strings = options.get("stop_strings") or ()
    for number, rows in enumerate(batches_of(prompts, batch_size)):
        if all(index in done for index in rows):
            continue
        if seed is not None:
            torch.manual_seed(seed + number)
        ids = [prompts[index] for index in rows]
        made = complete(
            model.split,
            model.memory,
            model.directory,
            model.tokenizer,
            ids,
            max_new_tokens,
            options,
            keys_values=keys_values,
            told=told,
            head=model.head_in_pieces(),
        )
        yield [
            Completion(
                rows[place // several] * several + place % several,
                _text(model.tokenizer, one.tokens, [strings] if isinstance(strings, str) else strings),
                one.finish,
                len(ids[place // several]),
                one.tokens,
            )
            for place, one in enumerate(made)
            if rows[place // several] not in done
        ]


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], strings: Sequence[str]) -> str:
    """Return the text of some tokens as far as the first string that it was to stop at."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    return text[: min((place for one in strings if (place := text.find(one)) >= 0), default=len(text))]


def _same_generators(model: LemaModel) -> None:
    """Let processes that hold a model together draw the same tokens."""
    parallel, backend = model.backend.parallel, model.backend
    if parallel.size == 1:
        return
    if model.config.sequence_parallel:
        raise ConfigError(
            f"text is made one token at a time, and {parallel.size} processes cannot have equal parts of one",
            where="sequence_parallel",
            how="generate with --set sequence_parallel=false: the adapter and the numbers are the same",
        )
    state = backend.rng_state()  # the same for all: each draws every token
    backend.set_rng_state(parallel.gather(state.to(backend.device))[0].to(state.device))
