# ruff: noqa: ARG002, T201 - transformers defines the parameters of a callback, used or not.
"""Texts for any number of prompts, in batches of about equal lengths; a batch reads the weights
once per token.

A run makes such texts of the same prompts after each evaluation, to be read by people.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from lema.backend import Backend
from lema.config import LemaConfig
from lema.data.files import Row
from lema.data.media.rows import RowMedia
from lema.data.prompts import fitting, prompt_ids, read_prompts, written
from lema.data.row_forms import PromptForm
from lema.engine import complete
from lema.engine.engine import Engine
from lema.engine.generation import Finish, KeyValues, Prefill, checked, encoded
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.chunked import check_cuts
from lema.errors import ConfigError, ModelError
from lema.model import Split
from lema.model.files import ModelFiles
from lema.plan import Allocation
from lema.plan.inference.capacity import RowPlan, TextPlan, plan_texts
from lema.plan.planner import Planner
from lema.storage.atomic import replace_file
from lema.storage.diskspace import disk_errors
from lema.storage.modelfiles import library_errors
from lema.storage.regular import append, read_regular
from lema.stream import LayerStream
from lema.train.inference.prompt_form import recorded_form
from lema.train.metrics import SAMPLES

__all__ = [
    "Completion",
    "Samples",
    "TextModel",
    "batches_of",
    "completions",
    "plan_of",
    "planned",
    "texts_of",
]

Planned = TypeVar("Planned", TextPlan, RowPlan)
WRONG_SETTINGS = "these settings of generation do not work", "correct the file or the options"
# of settings taken on trust
WRONG_VALUES = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
)
MOST_AT_ONCE = 64  # texts of a batch without a requested size: results come when batches end


class TextModel(Protocol):
    """What texts need of a model; `lema.train.model.LemaModel` says what each is."""

    config: LemaConfig

    @property
    def backend(self) -> Backend:
        """The device."""

    @property
    def directory(self) -> Path:
        """The model's directory."""

    @property
    def files(self) -> ModelFiles:
        """The files in it."""

    @property
    def skeleton(self) -> PreTrainedModel:
        """The model of transformers."""

    @property
    def split(self) -> Split:
        """The model in its parts."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model's directory."""

    @property
    def allocation(self) -> Allocation:
        """How memory is used within the limits."""

    @property
    def memory(self) -> LayerStream:
        """The stream of layers for `allocation`."""

    @property
    def opened(self) -> Planner:
        """The planner of the model, before anything is chosen."""

    def head_in_pieces(self) -> PiecedHead | None:
        """Return the head in pieces; None: it is on the device."""

    def respend(self) -> None:
        """Forget the use of memory, so that `allocation` is computed again, or set by `spend`."""

    def spend(self, allocation: Allocation) -> None:
        """Set the use of memory."""


@dataclass(frozen=True)
class Completion:
    """What a model has made of one prompt."""

    index: int  # of the prompt; `number` counts several texts of one prompt
    text: str  # without the string it stopped at, and without special tokens
    finish: Finish
    prompt_tokens: int
    tokens: tuple[int, ...]  # that were made


def plan_of(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None,
    keys_values: KeyValues = "device",
    *,
    choose: bool = False,
) -> TextPlan | None:
    """Return what the batches of these prompts take, the widest of them counted; None: it cannot be
    told. With `batch_size` None they are as many prompts as there is room for, 64 at most;
    `choose`: spend the limits of memory on these texts, and not on a step of training. Raises
    `MemoryLimitError`, which names a batch that fits."""
    host = keys_values == "host"
    if host and model.backend.memory().shared:
        warnings.warn(
            "--kv host saves nothing on a device that computes in host memory", stacklevel=3
        )
    longest = max(map(len, prompts))
    most = min(len(prompts), MOST_AT_ONCE)
    rows = None if batch_size is None else min(batch_size, len(prompts))

    def plan(current_allocation: Allocation | None) -> TextPlan:
        return plan_texts(
            model.opened,
            longest,
            max_new_tokens,
            rows=rows,
            most=most,
            host=host,
            current_allocation=current_allocation,
        )

    return planned(model, plan, "them", choose=choose)


def planned(
    model: TextModel, plan: Callable[[Allocation | None], Planned], of: str, *, choose: bool
) -> Planned | None:
    """Plan with what memory is spent on already, or `choose` that too; None, with a warning: it
    cannot be told.
    """
    if choose:
        model.respend()
    try:
        generation_plan = plan(None if choose else model.allocation)
    except ModelError as error:
        warnings.warn(f"{error.what}: no memory is reserved for {of}", stacklevel=4)
        return None
    if choose:
        model.spend(generation_plan.allocation)
    return generation_plan


def texts_of(
    model: TextModel,
    prompt: str | Sequence[str],
    max_new_tokens: int,
    batch_size: int | None,
    keys_values: KeyValues,
    options: Mapping[str, Any],
    form: PromptForm = "text",
) -> list[str]:
    """Return the text that follows each prompt, which is written in a form; `batch_size` None: all
    at once. Errors: of `prompt_ids`, `plan_of`, `completions`.
    """
    texts = [prompt] if isinstance(prompt, str) else prompt
    if form == "text":
        prompts = encoded(model.tokenizer, texts)
    else:
        rows = (Row({"prompt": text}, "prompt", number) for number, text in enumerate(texts, 1))
        prompts = [prompt_ids(row, model.tokenizer, form=form) for row in rows]
    ids = checked(prompts, getattr(model.skeleton.config.get_text_config(), "vocab_size", None))
    size = batch_size or len(ids)
    plan_of(model, ids, max_new_tokens, size, keys_values)
    batches = completions(model, ids, max_new_tokens, size, options, keys_values=keys_values)
    return [
        completion.text
        for completion in sorted(
            (completion for batch in batches for completion in batch),
            key=lambda completion: completion.index,
        )
    ]


def batches_of(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Return the numbers of the prompts of each batch: the longest together and first, so that
    little is padding and what does not fit shows at once; those of a batch in their own order, in
    which `transformers` draws for them."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    return [sorted(order[first : first + batch_size]) for first in range(0, len(order), batch_size)]


def completions(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    options: Mapping[str, Any],
    *,
    images: Sequence[RowMedia | None] | None = None,
    keys_values: KeyValues = "device",
    seed: int | None = None,
    done: Collection[int] = (),
    on_token: Callable[[int], object] = lambda _: None,
) -> Iterator[list[Completion]]:
    """Yield the texts of each batch as it ends, in the order of `batches_of`.

    The `options` are of `transformers`' `generate`, and `stop_strings`. Each batch begins with the
    `seed` and its own number; None: random numbers go on where they are. Prompts that are `done`
    need no text; a batch of such alone is left out, and no other batch changes by it. `images` are
    those of each prompt; they are decoded when their batch begins. `on_token` is called after each
    token with how many texts got one.

    Raises `DataError` of no prompt, or one without tokens; `ConfigError` of an option, or where
    rows are divided.
    """
    _same_generators(model)
    several = int(options.get("num_return_sequences") or 1)
    strings = options.get("stop_strings") or ()
    prefill = _prefill_of(model, keys_values)
    for number, rows in enumerate(batches_of(prompts, batch_size)):
        if all(index in done for index in rows):
            continue
        if seed is not None:
            torch.manual_seed(seed + number)
        ids = [prompts[index] for index in rows]
        of_rows = None if images is None else RowMedia.joined([images[index] for index in rows])
        more = None if of_rows is None else of_rows.before_answers(ids)
        arguments = (
            model.split,
            model.memory,
            model.files.generation_config(),
            model.tokenizer,
            ids,
            max_new_tokens,
            options,
        )
        with library_errors(
            model.directory / "generation_config.json", *WRONG_SETTINGS, WRONG_VALUES
        ):
            continuations = complete(
                *arguments,
                keys_values=keys_values,
                on_token=on_token,
                head=model.head_in_pieces(),
                prefill=prefill,
                more=more,
            )
        yield [
            Completion(
                rows[position // several] * several + position % several,
                _text(
                    model.tokenizer,
                    continuation.tokens,
                    [strings] if isinstance(strings, str) else strings,
                ),
                continuation.finish,
                len(ids[position // several]),
                continuation.tokens,
            )
            for position, continuation in enumerate(continuations)
            if rows[position // several] not in done
        ]


def _prefill_of(model: TextModel, keys_values: KeyValues) -> Prefill | None:
    """Return what takes long prompts through the layers in chunks; None: they go at once."""
    size = model.config.chunk_tokens
    if size is None:
        return None
    engine = Engine(model.split, model.memory, model.backend)
    check_cuts(engine)
    head = model.head_in_pieces()
    return Prefill(engine, size, offloads=keys_values == "host", head=head)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], strings: Sequence[str]) -> str:
    """Return the text of some tokens as far as the first string that it was to stop at."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    return text[
        : min(
            (offset for string in strings if (offset := text.find(string)) >= 0), default=len(text)
        )
    ]


def _same_generators(model: TextModel) -> None:
    """Let processes that hold a model together draw the same tokens."""
    parallel = model.backend.parallel
    backend = model.backend
    if parallel.size == 1:
        return
    if model.config.sequence_parallel:
        what = (
            f"generation makes one token at a time, and {parallel.size} processes cannot have "
            "equal parts of one"
        )
        how = "use --set sequence_parallel=false, which changes no number"
        raise ConfigError(what, where="sequence_parallel", how=how)
    state = backend.rng_state()  # the same for all: each draws every token
    backend.set_rng_state(parallel.gather(state.to(backend.device))[0].to(state.device))


MOST_SAMPLES = 2**30  # bytes of the texts that a run which goes on reads again


class Samples(TrainerCallback):
    """Continues `eval_prompts` after each evaluation, by the likeliest token, so that no number of
    the run is drawn. A text is written as the rows that are trained on are: as a message where they
    are chats. `DataError`: a prompt cannot be read, or is too long for the model."""

    def __init__(self, model: TextModel) -> None:
        prompts = model.config.eval_prompts
        self._new = model.config.eval_prompts_max_new_tokens
        texts = [
            Row({"prompt": text}, "eval_prompts", number)
            for number, text in enumerate(prompts or (), 1)
        ]
        self._rows = read_prompts(Path(prompts)) if isinstance(prompts, str) else texts
        self._model = model
        self._ids = self._written("text")
        self._file = Path(model.config.output_dir) / SAMPLES

    def _written(self, form: PromptForm) -> list[list[int]]:
        """Return the token ids of the prompts."""
        ids = [prompt_ids(row, self._model.tokenizer, form=form) for row in self._rows]
        model = self._model
        text = model.skeleton.config.get_text_config()
        fitting(self._rows, ids, self._new, text, model.config)
        return ids

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Write the prompts as the rows are written, which are known by now; make sure that there
        is room for the texts, and forget those of steps that are taken again.
        """
        self._ids = self._written(recorded_form(self._model.files, None))
        plan_of(self._model, self._ids, self._new, min(len(self._ids), MOST_AT_ONCE))
        if state.is_world_process_zero and self._file.exists():
            lines = (
                read_regular(self._file, MOST_SAMPLES, inside=True)
                .decode("utf-8")
                .splitlines(keepends=True)
            )
            past_lines = [
                line
                for line in lines
                if line.endswith("\n") and json.loads(line)["step"] <= state.global_step
            ]
            replace_file(self._file, "".join(past_lines).encode())

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Make the texts; print them, and write them with their step."""
        size = min(len(self._ids), MOST_AT_ONCE)
        options = {"do_sample": False}
        samples = [
            completion
            for batch in completions(self._model, self._ids, self._new, size, options)
            for completion in batch
        ]
        if not state.is_world_process_zero:
            return
        with disk_errors(self._file):
            for completion in sorted(samples, key=lambda completion: completion.index):
                row = {
                    "step": state.global_step,
                    **written(self._rows[completion.index]),
                    "completion": completion.text,
                }
                append(self._file, (json.dumps(row, ensure_ascii=False) + "\n").encode())
                print(
                    f"sample {completion.index + 1} at step {state.global_step}: "
                    f"{completion.text!r}"
                )
