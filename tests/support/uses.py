"""Evaluations, texts and steps of one model by turns, streamed and whole, which must be the same
bits.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from asloaded import opened, rows, step, whole, whole_step
from everytype import farthest
from torch import Tensor

from lema import LemaModel
from lema.engine.generation import streaming_forward

__all__ = ["Logits", "by_turns", "same"]

Logits = list[Tensor]
NEW = 3  # tokens of each text


def evaluated(streamed: LemaModel, lengths: Sequence[int]) -> Logits:
    """Return the logits of evaluations of rows, several of them in one pass."""
    found: Logits = []
    for batches in [*map(rows, lengths), rows(*lengths)]:
        logits: Logits = []
        streamed.adapter.evaluate(batches, logits)
        found += logits
    return found


@torch.no_grad()
def whole_evaluated(model: Any, lengths: Sequence[int]) -> Logits:
    batches = [batch for length in lengths for batch in rows(length)] + rows(*lengths)
    return [model(input_ids=batch["input_ids"], use_cache=False).logits for batch in batches]


def texts(model: Any, prompts: Sequence[int]) -> Logits:
    """Return the logits of the tokens that follow prompts of these lengths."""
    how: dict[str, Any] = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 0,
    }
    how |= {"output_logits": True, "return_dict_in_generate": True, "use_cache": True}
    made = (model.generate(input_ids=rows(length)[0]["input_ids"], **how) for length in prompts)
    return [torch.stack(one.logits) for one in made]


def same(found: Logits, expected: Logits) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def by_turns(model: Path, lengths: Sequence[int], prompts: Sequence[int]) -> None:
    """Evaluate, make texts and train with one model, by turns, and hold every logit to those of the
    whole model.

    Rows have these `lengths`, one after the other; prompts have those of `prompts`.
    """
    with opened(model) as streamed:
        peft = whole(model, streamed)

        def made() -> Logits:
            with streaming_forward(streamed.split, streamed.memory):
                return texts(streamed.lora_manager, prompts)

        turns: list[tuple[Callable[[], Logits], Callable[[], Logits]]] = [
            (lambda: evaluated(streamed, lengths), lambda: whole_evaluated(peft, lengths)),
            (made, lambda: texts(peft, prompts)),
        ]
        for number, (mine, theirs) in enumerate(turns * 2):
            assert same(mine(), theirs()), number
            batches = rows(*lengths[number:])  # whose tables the next use finds
            assert farthest(step(streamed, batches), whole_step(peft, batches)) == 0
