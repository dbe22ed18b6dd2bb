"""A model of `lema.streamed` whose rows go through each layer in chunks: for any caller of it the
loss, the logits and every gradient are, to rounding, those of whole sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity import Outcome, all_gradients, draw_b, relative_difference
from peft import LoraConfig
from tiny import NUM_LAYERS, VOCABULARY, Checkpoint
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

import lema
from lema.errors import ConfigError

CheckpointOf = Callable[..., Checkpoint]

LENGTH = 14
CHUNK = 4
ROUNDING = 2e-6


@contextmanager
def opened(checkpoint: Checkpoint, chunk: int | None, **settings: Any) -> Iterator[Any]:
    config = LoraConfig(
        r=4,
        target_modules=settings.pop("targets", "all-linear"),
        lora_dropout=settings.pop("dropout", 0.0),
        task_type="CAUSAL_LM",
    )
    model = lema.streamed(
        checkpoint.streamed, config, device="cpu", seed=1, sequence_chunk=chunk, **settings
    )
    try:
        draw_b(model)
        model.train()
        yield model
    finally:
        model.close()


def tokens(num_rows: int = 3, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (num_rows, length), generator=generator)


def masked(*, left: tuple[int, ...] = (), right: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Return rows with so much padding at their beginnings and ends."""
    ids = tokens()
    mask = torch.ones_like(ids)
    for row, (before, after) in enumerate(zip(left or (0, 0, 0), right or (0, 0, 0), strict=True)):
        mask[row, :before] = 0
        mask[row, LENGTH - after :] = 0
    ids[mask == 0] = 0
    # a token after padding is predicted by padding
    trained = mask * torch.cat([mask[:, :1], mask[:, :-1]], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(trained == 0, -100),
    }


def stepped(model: Any, inputs: dict[str, Tensor]) -> Outcome:
    model.zero_grad()
    torch.manual_seed(3)
    outputs = model(**inputs)
    outputs.loss.backward()
    return Outcome.of(model, outputs.loss)


def assert_close(found: Outcome, expected: Outcome) -> None:
    assert relative_difference(found.loss, expected.loss) < 1e-6
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(all_gradients(found), all_gradients(expected)) < ROUNDING


def compared(
    checkpoint: Checkpoint, inputs: dict[str, Tensor], chunk: int = CHUNK, **settings: Any
) -> None:
    outcomes = []
    for size in (None, chunk):
        with opened(checkpoint, size, **settings) as model:
            outcomes.append(stepped(model, inputs))
    expected, found = outcomes
    assert_close(found, expected)


BATCHES = {
    "plain": {"input_ids": tokens(), "labels": tokens()},
    "right": masked(right=(0, 3, 7)),
    "left": masked(left=(2, 0, 6)),
    "both": masked(left=(5, 9, 6), right=(2, 3, 1)),
    "all right": masked(right=(6, 7, 9)),
    "two tokens": masked(left=(12, 12, 12)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_loss_and_gradients_are_those_of_whole_sequences(
    checkpoint_of: CheckpointOf, batch: str, rows: int | None
) -> None:
    compared(checkpoint_of("llama"), BATCHES[batch], micro_batch_size=rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *itertools.product(["gpt2", "mistral", "qwen3"], ["eager", "sdpa"]),
        ("gemma2", "eager"),  # whose soft cap transformers computes in eager attention alone
    ],
)
def test_padding_is_seen_by_no_token(
    checkpoint_of: CheckpointOf, name: str, attention: str
) -> None:
    compared(checkpoint_of(name), BATCHES["both"], 3, attn_implementation=attention)


def test_rows_of_a_pack_do_not_see_each_other(checkpoint_of: CheckpointOf) -> None:
    ids = tokens(1)
    positions = torch.tensor([[*range(8), *range(6)]])
    packed = {"input_ids": ids, "labels": ids, "position_ids": positions}
    compared(checkpoint_of("llama"), packed)
    with opened(checkpoint_of("llama"), CHUNK) as model:
        within = stepped(model, packed)
        across = stepped(model, {"input_ids": ids, "labels": ids})
    with pytest.raises(AssertionError):
        assert_close(across, within)


def test_rows_that_the_caller_has_looked_up_have_gradients(checkpoint_of: CheckpointOf) -> None:
    gradients = []
    for chunk in (None, CHUNK):
        with opened(checkpoint_of("llama"), chunk) as model:
            embeddings = model.get_input_embeddings()(tokens()).detach().requires_grad_()
            model(inputs_embeds=embeddings, labels=tokens()).loss.backward()
            gradients.append(embeddings.grad)
    assert relative_difference(gradients[1], gradients[0]) < ROUNDING


@pytest.mark.parametrize("rows", [None, 1])
def test_the_loss_of_routers(checkpoint_of: CheckpointOf, rows: int | None) -> None:
    outcomes = []
    for chunk in (None, CHUNK):
        with opened(
            checkpoint_of("mixtral"),
            chunk,
            micro_batch_size=rows,
            router_aux_loss_coef=0.3,
            targets=["q_proj", "o_proj"],
        ) as model:
            outcomes.append(stepped(model, BATCHES["both"]))
    expected, found = outcomes
    assert_close(found, expected)


def test_experts_that_a_server_chose(checkpoint_of: CheckpointOf) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(3, LENGTH, NUM_LAYERS, 4, generator=generator)
    choices = drawn.topk(2, dim=-1).indices
    outcomes = []
    for chunk in (None, CHUNK):
        with opened(
            checkpoint_of("mixtral"), chunk, micro_batch_size=2, targets=["q_proj", "o_proj"]
        ) as model:
            with model.replaying(choices):
                loss = model(**BATCHES["both"]).loss
            loss.backward()
            outcomes.append(Outcome.of(model, loss))
            free = stepped(model, BATCHES["both"])
    expected, found = outcomes
    assert_close(found, expected)
    assert relative_difference(free.loss, found.loss) > 1e-4


def test_noise_on_the_embeddings_goes_by_the_whole_sequence(checkpoint_of: CheckpointOf) -> None:
    outcomes = []
    for chunk in (None, CHUNK):
        with opened(checkpoint_of("llama"), chunk) as model:
            activate_neftune(model, 5.0)
            outcomes.append(stepped(model, BATCHES["right"]))
    expected, found = outcomes
    assert_close(found, expected)
    with opened(checkpoint_of("llama"), CHUNK) as model:
        silent = stepped(model, BATCHES["right"])
    assert relative_difference(silent.loss, found.loss) > 1e-3


@pytest.mark.parametrize("batch", ["plain", "right", "left"])
def test_logits_and_values_without_gradients(checkpoint_of: CheckpointOf, batch: str) -> None:
    inputs = BATCHES[batch]
    results = []
    for chunk in (None, CHUNK):
        with opened(checkpoint_of("mistral"), chunk) as model, torch.no_grad():
            model.eval()
            outputs = model(**inputs, use_cache=False)
            results.append((outputs.loss, outputs.logits[inputs["labels"] != -100]))
    for expected, found in zip(*results, strict=True):
        assert relative_difference(found, expected) < ROUNDING


def test_what_dropout_draws_is_drawn_again_when_a_chunk_is_recomputed(
    checkpoint_of: CheckpointOf,
) -> None:
    """The gradient is that of the loss under the same draws, which a step along it shows."""
    step = 2e-3
    with opened(checkpoint_of("llama"), CHUNK, dropout=0.3) as model:
        outcome = stepped(model, BATCHES["right"])
        length = all_gradients(outcome).norm()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses = []
        for sign in (1, -2):
            with torch.no_grad():
                for name, gradient in outcome.gradients.items():
                    parameters[name].add_(gradient, alpha=float(sign * step / length))
            losses.append(float(stepped(model, BATCHES["right"]).loss))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(length), rel=0.02)


def test_products_of_the_caller_in_half_precision(checkpoint_of: CheckpointOf) -> None:
    """Calls are made again in the backward, where no autocast is set any more."""
    outcomes = []
    for chunk in (None, CHUNK):
        with opened(checkpoint_of("llama"), chunk) as model:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**BATCHES["right"]).loss
            loss.backward()
            outcomes.append(Outcome.of(model, loss))
    expected, found = outcomes
    difference = relative_difference(all_gradients(found), all_gradients(expected))
    assert 0 < difference < 0.05


# What it costs


def test_layers_are_leased_twice_and_padding_is_in_no_chunk(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(checkpoint_of("llama"), CHUNK) as model:
        stepped(model, BATCHES["both"])
        counters = model.opened.memory.counters
        seen = list[int]()
        split = model.opened.split
        run_layer = split.run_layer

        def counted(index: int, weights: Any, call: Any, hidden: Tensor, **options: Any) -> Tensor:
            seen.append(hidden.shape[1])
            output: Tensor = run_layer(index, weights, call, hidden, **options)
            return output

        monkeypatch.setattr(split, "run_layer", counted)
        stepped(model, BATCHES["both"])
        assert model.opened.memory.counters.leases - counters.leases == 2 * NUM_LAYERS
    # 8 tokens between the padding of all rows, once forward and once backward; and once more all
    # but the last chunk, for keys and values
    assert sum(seen) == NUM_LAYERS * (8 + 8 + 4)


# What is refused


def test_a_loss_of_padding_that_was_not_computed_is_refused(checkpoint_of: CheckpointOf) -> None:
    for batch in ("left", "right"):
        inputs = masked(**{batch: (3, 3, 5)}) | {"labels": tokens()}
        with opened(checkpoint_of("llama"), CHUNK) as model:
            loss = model(**inputs).loss
            with pytest.raises(ConfigError, match="counts masked tokens"):
                loss.backward()


@pytest.mark.parametrize("where", ["model.layers.3", "model.layers.3.mlp", "model.norm"])
def test_hooks_that_would_see_chunks_are_refused(checkpoint_of: CheckpointOf, where: str) -> None:
    with opened(checkpoint_of("llama"), CHUNK) as model:
        module = model.get_base_model().get_submodule(where)
        module.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="hooks on layers"):
            model(**BATCHES["plain"])


def test_a_mask_of_pairs_of_tokens_is_cut(checkpoint_of: CheckpointOf) -> None:
    near = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    of_chunks, at_once = (_logits(checkpoint_of("llama"), chunk, near) for chunk in (CHUNK, None))
    torch.testing.assert_close(of_chunks, at_once, rtol=1e-5, atol=1e-5)
    causal = _logits(checkpoint_of("llama"), CHUNK, None)
    assert not torch.allclose(causal, at_once, rtol=1e-3, atol=1e-3)


def _logits(checkpoint: Checkpoint, chunk: int | None, mask: torch.Tensor | None) -> torch.Tensor:
    with opened(checkpoint, chunk) as model:
        logits: torch.Tensor = model(input_ids=tokens(), attention_mask=mask).logits.detach()
    return logits


def test_inputs_that_may_belong_to_the_whole_sequence_are_refused(
    checkpoint_of: CheckpointOf,
) -> None:
    refusal = pytest.raises(ConfigError, match=r"cu_seq_lens_q \[2\], which may belong")
    with opened(checkpoint_of("llama"), CHUNK) as model, refusal:
        model(input_ids=tokens(), cu_seq_lens_q=torch.tensor([0, 42]))
