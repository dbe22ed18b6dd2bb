"""Rotary embeddings of every kind, in evaluations, texts and trainers' calls, around lengths where they change."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from asloaded import ORIGINAL, ROPES, SEED, opened, roped, rows, step, whole, whole_step, write_model
from everytype import farthest
from parity import draw_b
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

import lema
from lema import LemaModel
from lema.engine.generation import streaming_forward

pytestmark = pytest.mark.filterwarnings("ignore")

Logits = list[Tensor]
NEW = 3  # tokens of each text
THRESHOLDS = (ORIGINAL, 4 * ORIGINAL)
# Below each threshold, at it, and above it, and then short again.
LENGTHS = [threshold + more for threshold in THRESHOLDS for more in (-1, 0, 1)]
ALTERNATING = [LENGTHS[at] for at in (2, 0, 1, 5, 0, 4, 2, 3, 1)]
# The first token after the prompt is at a threshold, or one of those that follow, or none.
PROMPTS = [ORIGINAL - 1, 4 * ORIGINAL - 2, 5, ORIGINAL + 1, 4 * ORIGINAL + 1, ORIGINAL]


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
    how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    how |= {"output_logits": True, "return_dict_in_generate": True, "use_cache": True}
    made = (model.generate(input_ids=rows(length)[0]["input_ids"], **how) for length in prompts)
    return [torch.stack(one.logits) for one in made]


def same(found: Logits, expected: Logits) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def uses(kind: str, directory: Path, lengths: Sequence[int], prompts: Sequence[int]) -> None:
    """Evaluate, make texts and train with one model, by turns, and hold every logit to those of the whole model."""
    model = write_model(roped(kind), directory)
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


@pytest.mark.parametrize("kind", ROPES)
def test_evaluations_and_texts_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    uses(kind, tmp_path / "model", [17, 15, 65, 64], [ORIGINAL - 1, 4 * ORIGINAL - 2, 5])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ROPES)
def test_so_are_those_around_every_threshold(kind: str, tmp_path: Path) -> None:
    uses(kind, tmp_path / "model", ALTERNATING, PROMPTS)


def both(kind: str, directory: Path, **settings: Any) -> tuple[Any, Any]:
    """Return a model that `lema.streamed` opens, and the same one whole."""
    model = write_model(roped(kind), directory)
    adapter = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(SEED)
    base = aligned(AutoModelForCausalLM.from_pretrained(model))
    expected = get_peft_model(base, adapter).train()
    found = lema.streamed(str(model), adapter, device="cpu", seed=SEED, **settings).train()
    for one in (expected, found):
        draw_b(one)
    return found, expected


def calls(kind: str, directory: Path, lengths: Sequence[int]) -> None:
    """Call a streamed model as a trainer does, with gradients and without by turns, and the whole model as well."""

    def call(one: Any) -> Logits:
        seen: Logits = []
        for number, length in enumerate(lengths):
            (batch,) = rows(length)
            with torch.set_grad_enabled(number % 3 != 1):
                out = one(**batch, use_cache=False)
            if out.loss.requires_grad:
                out.loss.backward()
            seen += [out.loss.detach(), out.logits.detach()]
        gradients = {name: parameter.grad for name, parameter in one.named_parameters() if parameter.requires_grad}
        return seen + [gradient for _, gradient in sorted(gradients.items()) if gradient is not None]

    found, expected = map(call, both(kind, directory))
    assert same(found, expected)


@pytest.mark.parametrize("kind", ROPES)
def test_calls_of_a_trainer_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    calls(kind, tmp_path / "model", [17, 15, 65, 16, 64, 20])


@pytest.mark.parametrize("kind", ROPES)
def test_a_short_row_of_a_wide_batch_goes_by_its_longest(kind: str, tmp_path: Path) -> None:
    found, expected = both(kind, tmp_path / "model", micro_batch_size=1)
    for lengths in ((70, 9, 20), (15, 9, 12), (20, 30, 9)):
        ids = torch.cat([pad(rows(length)[0]["input_ids"], (0, max(lengths) - length)) for length in lengths])
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        losses = [float(one(**batch, use_cache=False).loss) for one in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ROPES)
def test_so_are_calls_around_every_threshold(kind: str, tmp_path: Path) -> None:
    calls(kind, tmp_path / "model", [*ALTERNATING, *LENGTHS])
