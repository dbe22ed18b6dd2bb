"""Rows of a micro-batch that begin with the same prompt, as pairs of answers do and the completions
of a group: in chunks the prompt is computed once, and the loss and every gradient are, to rounding,
those of rows that are computed whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from parity import Outcome, relative_difference
from test_streamed_chunks import CHUNK, assert_close, opened, stepped
from tiny import ARCHITECTURES, NUM_LAYERS, VOCABULARY, Checkpoint
from tinyconfig import tiny_config
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

CheckpointOf = Callable[..., Checkpoint]

PROMPT = 9
LENGTH = 16


def rows(num_rows: int = 3, *, left: int = 0, masked: bool = True) -> dict[str, Tensor]:
    """Return rows with one prompt, behind so much padding, and answers of different lengths."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (num_rows, left + LENGTH), generator=generator)
    ids[:, : left + PROMPT] = ids[0, : left + PROMPT]
    # where they begin to differ is known
    ids[:, left + PROMPT] = torch.arange(3, 3 + num_rows)
    labels = ids.clone()
    labels[:, : left + PROMPT] = -100
    if not masked:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[:, :left] = 0
    mask[-1, -3:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def computed(model: Any, inputs: dict[str, Tensor], patch: pytest.MonkeyPatch) -> int:
    """Return how many tokens the first layer is given in a step."""
    split = model.opened.split
    seen = list[int]()
    run_layer = split.run_layer

    def counted(index: int, weights: Any, call: Any, hidden: Tensor, **options: Any) -> Tensor:
        if index == 0:
            seen.append(hidden.shape[0] * hidden.shape[1])
        output: Tensor = run_layer(index, weights, call, hidden, **options)
        return output

    with patch.context() as context:
        context.setattr(split, "run_layer", counted)
        stepped(model, inputs)
    return sum(seen)


def compared(checkpoint: Checkpoint, inputs: dict[str, Tensor], **settings: Any) -> list[Outcome]:
    outcomes = []
    for chunk in (None, CHUNK):
        with opened(checkpoint, chunk, **settings) as model:
            outcomes.append(stepped(model, inputs))
    expected, found = outcomes
    assert_close(found, expected)
    return outcomes


def test_a_prompt_is_computed_once(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = rows(masked=False)
    with opened(checkpoint_of("llama"), CHUNK) as model:
        stepped(model, inputs)
        shared = computed(model, inputs, monkeypatch)
        # a token at the beginning of one row is another
        inputs["input_ids"][1, 0] += 1
        apart = computed(model, inputs, monkeypatch)
    # chunks of 4 and 5 tokens of the prompt, of 4 and 3 behind it: forward, all but the last for
    # keys and values, backward; without sharing 4 of 4
    answers = 3 * (LENGTH - PROMPT)
    assert shared == 2 * (PROMPT + answers) + PROMPT + 3 * 4
    assert apart == 3 * (2 * LENGTH + LENGTH - 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral", "sdpa"),
        ("gpt2", "eager"),
        ("gemma2", "eager"),
        ("mixtral", "sdpa"),
    ],
)
def test_loss_and_gradients_are_those_of_whole_rows(
    checkpoint_of: CheckpointOf, name: str, attention: str, left: int
) -> None:
    compared(checkpoint_of(name), rows(left=left), attn_implementation=attention)


def test_without_a_mask(checkpoint_of: CheckpointOf) -> None:
    compared(checkpoint_of("llama"), rows(2, masked=False))


@pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "gpt_oss"])
def test_layers_that_keep_a_state_or_have_sinks(model_type: str, tmp_path: Path) -> None:
    directory = write_model(tiny_config(model_type), tmp_path)
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    targets = r".*\.(q_proj|in_proj|in_proj_qkvz)"
    for left in (0, 2):
        outcomes = []
        for chunk in (None, CHUNK):
            with opened(checkpoint, chunk, targets=targets) as model:
                outcomes.append(stepped(model, rows(left=left)))
        expected, found = outcomes
        assert relative_difference(found.loss, expected.loss) < 1e-6
        for name, gradient in found.gradients.items():
            assert relative_difference(gradient, expected.gradients[name]) < 2e-5, name


@pytest.mark.parametrize("groups", [None, 2])
def test_experts_and_the_loss_of_their_routers(
    checkpoint_of: CheckpointOf, groups: int | None
) -> None:
    compared(
        checkpoint_of("mixtral"),
        rows(),
        experts_per_slot=groups,
        router_aux_loss_coef=0.3,
        targets=["q_proj", "o_proj"],
    )


def test_embeddings_that_train_have_the_gradients_of_all_rows(
    checkpoint_of: CheckpointOf,
) -> None:
    outcomes = compared(
        checkpoint_of("llama"), rows(), targets=["q_proj", "embed_tokens"], dropout=0.0
    )
    assert any("embed_tokens" in name for name in outcomes[0].gradients)


def test_rows_that_draw_for_themselves_share_nothing(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, and noise on embeddings, is another in each row."""
    inputs = rows(masked=False)
    apart = 3 * (2 * LENGTH + LENGTH - 4)
    with opened(checkpoint_of("llama"), CHUNK, dropout=0.1) as model:
        stepped(model, inputs)
        assert computed(model, inputs, monkeypatch) == apart
    with opened(checkpoint_of("llama"), CHUNK) as model:
        stepped(model, inputs)
        assert computed(model, inputs, monkeypatch) < apart
        activate_neftune(model, 5.0)
        assert computed(model, inputs, monkeypatch) == apart


def test_weights_are_read_as_often(checkpoint_of: CheckpointOf) -> None:
    with opened(checkpoint_of("llama"), CHUNK) as model:
        stepped(model, rows())
        before = model.opened.memory.counters.leases
        stepped(model, rows())
        assert model.opened.memory.counters.leases - before == 2 * NUM_LAYERS
