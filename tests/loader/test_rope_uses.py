"""Rotary embeddings of every kind, in evaluations, texts and trainers' calls, around lengths
where they change.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from asloaded import ORIGINAL, ROPES, SEED, roped, rows, write_model
from parity import draw_b
from peft import LoraConfig, get_peft_model
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from uses import Logits, by_turns, same

import lema

pytestmark = pytest.mark.filterwarnings("ignore")

THRESHOLDS = (ORIGINAL, 4 * ORIGINAL)
# Below each threshold, at it, and above it, and then short again.
LENGTHS = [threshold + more for threshold in THRESHOLDS for more in (-1, 0, 1)]
ALTERNATING = [LENGTHS[at] for at in (2, 0, 1, 5, 0, 4, 2, 3, 1)]
# The first token after the prompt is at a threshold, or one of those that follow, or none.
PROMPTS = [ORIGINAL - 1, 4 * ORIGINAL - 2, 5, ORIGINAL + 1, 4 * ORIGINAL + 1, ORIGINAL]


@pytest.mark.parametrize("kind", ROPES)
def test_evaluations_and_texts_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    by_turns(
        write_model(roped(kind), tmp_path / "model"),
        [17, 15, 65, 64],
        [ORIGINAL - 1, 4 * ORIGINAL - 2, 5],
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ROPES)
def test_so_are_those_around_every_threshold(kind: str, tmp_path: Path) -> None:
    by_turns(write_model(roped(kind), tmp_path / "model"), ALTERNATING, PROMPTS)


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
    """Call a streamed model as a trainer does, with gradients and without by turns, and the
    whole model as well.
    """

    def call(one: Any) -> Logits:
        seen: Logits = []
        for number, length in enumerate(lengths):
            (batch,) = rows(length)
            with torch.set_grad_enabled(number % 3 != 1):
                out = one(**batch, use_cache=False)
            if out.loss.requires_grad:
                out.loss.backward()
            seen += [out.loss.detach(), out.logits.detach()]
        gradients = {
            name: parameter.grad
            for name, parameter in one.named_parameters()
            if parameter.requires_grad
        }
        return seen + [
            gradient for _, gradient in sorted(gradients.items()) if gradient is not None
        ]

    found, expected = map(call, both(kind, directory))
    assert same(found, expected)


@pytest.mark.parametrize("kind", ROPES)
def test_calls_of_a_trainer_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    calls(kind, tmp_path / "model", [17, 15, 65, 16, 64, 20])


@pytest.mark.parametrize("kind", ROPES)
def test_a_short_row_of_a_wide_batch_goes_by_its_longest(kind: str, tmp_path: Path) -> None:
    found, expected = both(kind, tmp_path / "model", micro_batch_size=1)
    for lengths in ((70, 9, 20), (15, 9, 12), (20, 30, 9)):
        ids = torch.cat(
            [pad(rows(length)[0]["input_ids"], (0, max(lengths) - length)) for length in lengths]
        )
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "labels": ids.masked_fill(~mask, -100),
        }
        losses = [float(one(**batch, use_cache=False).loss) for one in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ROPES)
def test_so_are_calls_around_every_threshold(kind: str, tmp_path: Path) -> None:
    calls(kind, tmp_path / "model", [*ALTERNATING, *LENGTHS])
