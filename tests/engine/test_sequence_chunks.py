"""Sequences that go through each layer in chunks: the loss and every gradient are, to rounding,
those of whole sequences, and no weight is read more often.

A chunk's products have other shapes, and gradients are summed over chunks, so the last bits differ.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import compare, write_model
from fulltraining import everything, one_in_the_middle
from parity import (
    Outcome,
    all_gradients,
    assert_same,
    draw_b,
    relative_difference,
    streamed_model,
    streamed_step,
    trained,
    whole_model,
    whole_step,
)
from preferences import batch_of, examples, parts_of
from tiny import ARCHITECTURES, NUM_LAYERS, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch import Tensor
from trainedways import bare_model
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig

from lema import LemaModel
from lema.engine.trained_weights import TrainedWeights
from lema.errors import ConfigError
from lema.model.sequence.chunks import ChunkedRows
from lema.plan.work.meter import Tally

CheckpointOf = Callable[..., Checkpoint]

CHUNK = 4  # no divisor of most of the lengths: 12, 9, 14, 7
ROUNDING = 2e-6  # of all gradients together; of one matrix ten times that

PARTLY_ADAPTED = pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")


def assert_close(chunked: Outcome, expected: Outcome) -> None:
    assert chunked.gradients.keys() == expected.gradients.keys()
    assert relative_difference(chunked.loss, expected.loss) < 1e-6
    assert relative_difference(all_gradients(chunked), all_gradients(expected)) < ROUNDING
    for name, gradient in chunked.gradients.items():
        other = expected.gradients[name]
        assert gradient is not None
        assert other is not None
        assert relative_difference(gradient, other) < 10 * ROUNDING, name
    assert torch.equal(chunked.generator, expected.generator)


def chunked_step(
    checkpoint: Checkpoint, batches: list[dict[str, Tensor]], chunk: int = CHUNK, **settings: Any
) -> Outcome:
    with streamed_model_in_chunks(checkpoint, sequence_chunk=chunk, **settings) as model:
        draw_b(model.lora_manager)
        return streamed_step(model, batches)


def streamed_model_in_chunks(
    checkpoint: Checkpoint, **settings: Any
) -> AbstractContextManager[LemaModel]:
    options = {"gradient_checkpointing": True, "sequence_chunk": CHUNK} | settings
    return streamed_model(checkpoint, **options)


# Numbers


@pytest.mark.sampled(8)
@pytest.mark.parametrize("padding", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("chunk", [2, 4, 5])
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, kind) for name, each in ARCHITECTURES.items() for kind in each.attentions],
)
def test_loss_and_gradients_are_those_of_whole_sequences(
    checkpoint_of: CheckpointOf, name: str, attention: str, chunk: int, padding: bool
) -> None:
    checkpoint = checkpoint_of(name)
    batches = micro_batches(4, padding=padding)
    whole = whole_model(checkpoint, attn_implementation=attention)
    draw_b(whole)
    found = chunked_step(checkpoint, batches, chunk, attn_implementation=attention)
    assert_close(found, whole_step(whole, batches))


@pytest.mark.parametrize("chunk", [14, 1000])
def test_where_no_row_is_longer_than_a_chunk_no_bit_changes(
    checkpoint_of: CheckpointOf, chunk: int
) -> None:
    checkpoint = checkpoint_of("qwen3")
    batches = micro_batches(4, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    found = chunked_step(checkpoint, batches, chunk)
    assert_same(found, whole_step(whole, batches))


def test_short_and_long_rows_in_one_step(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(4)
    whole = whole_model(checkpoint)
    draw_b(whole)
    found = chunked_step(checkpoint, batches, 9)
    assert_close(found, whole_step(whole, batches))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_a_pack_do_not_see_each_other(
    checkpoint_of: CheckpointOf, name: str, attention: str
) -> None:
    checkpoint = checkpoint_of(name)
    (batch,) = micro_batches(1)
    batch["position_ids"] = torch.tensor([[*range(7), *range(5)], [*range(4), *range(8)]])
    whole = whole_model(checkpoint, attn_implementation=attention)
    draw_b(whole)
    found = chunked_step(checkpoint, [batch], attn_implementation=attention)
    assert_close(found, whole_step(whole, [batch]))
    del batch["position_ids"]
    with pytest.raises(AssertionError):
        assert_close(chunked_step(checkpoint, [batch], attn_implementation=attention), found)


def test_a_model_that_knows_no_packs_has_none_in_chunks(tmp_path: Path) -> None:
    directory = write_model(tiny_config("gpt_oss"), tmp_path)
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    (batch,) = micro_batches(1)
    batch["position_ids"] = torch.tensor([[*range(7), *range(5)], [*range(4), *range(8)]])
    outcomes = []
    for chunk in (None, CHUNK):
        with streamed_model_in_chunks(checkpoint, sequence_chunk=chunk) as model:
            draw_b(model.lora_manager)
            outcomes.append(streamed_step(model, [batch]))
    expected, found = outcomes
    assert_close(found, expected)


SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.3, 2.6, 2.9]}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(LlamaConfig, "dynamic"), (LlamaConfig, "longrope"), (Phi3Config, "longrope")],
)
def test_a_rotary_table_is_that_of_the_whole_sequence(
    make: type[PreTrainedConfig], kind: str, tmp_path: Path
) -> None:
    """The first chunk alone is within the original length, which the sequence exceeds."""
    config = make(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8 if kind == "dynamic" else 32,
        original_max_position_embeddings=8,
        pad_token_id=0,
        rope_parameters=SCALED | {"rope_type": kind} | (LONG if kind == "longrope" else {}),
    )
    assert compare(config, tmp_path, sequence_chunk=3).worst < 10 * ROUNDING


@PARTLY_ADAPTED
@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3_text",
        "gpt_oss",
        "deepseek_v3",
        "llama4_text",
        "qwen3_moe",
        "bloom",
        "gpt_neo",
        "qwen3_next",
        "mamba2",
        "lfm2",
        "falcon_h1",
        "nemotron_h",
    ],
)
def test_types_whose_layers_differ(model_type: str, tmp_path: Path) -> None:
    """Windows in turns, sinks, experts, keys made of a latent, chunked attention, biases by
    distance; states of delta nets, of Mamba, of short convolutions, and of both in a layer.
    """
    assert compare(model_type, tmp_path, sequence_chunk=5).worst < 10 * ROUNDING


@PARTLY_ADAPTED
def test_a_hybrid_with_layers_of_attention_among_those_with_a_state(tmp_path: Path) -> None:
    """Granite's, whose tiny config has none."""
    config = tiny_config("granitemoehybrid")
    config.layer_types = ["linear_attention", "full_attention"] * (config.num_hidden_layers // 2)
    assert compare(config, tmp_path, sequence_chunk=5).worst < 10 * ROUNDING


@pytest.mark.parametrize(
    "settings",
    [
        {"boundary_activations": "host", "loss_chunk_tokens": 7},
        {"boundary_activations": "disk", "head": "stream"},
        {"lora_layers_to_transform": [3, 7]},
        {"embeddings": "host", "strategy": "resident"},
        {"lora_modules_to_save": ["lm_head"]},
        {"lora_modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda one: "-".join(sorted(one)),
)
def test_settings_of_memory_and_of_what_trains(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2, padding=True)
    alone = {key: settings[key] for key in settings if key.startswith("lora_")}
    with streamed_model(checkpoint, gradient_checkpointing=True, **alone) as model:
        draw_b(model.lora_manager)
        expected = streamed_step(model, batches)
    assert_close(chunked_step(checkpoint, batches, **settings), expected)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_that_rows_share_wherever_their_inputs_wait(
    checkpoint_of: CheckpointOf, name: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is computed for one row leaves the others no gradient of their own."""
    checkpoint = checkpoint_of(name)
    batches = micro_batches(2)
    for batch in batches:
        batch["input_ids"][:, :6] = batch["input_ids"][0, :6]
        batch["input_ids"][:, 6] = torch.arange(3, 3 + len(batch["input_ids"]))
        batch["labels"] = batch["input_ids"].clone()
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        expected = streamed_step(model, batches)
    computed = list[slice]()
    rows_of = ChunkedRows.rows_of

    def noted(rows: ChunkedRows, chunk: int) -> slice:
        computed.append(rows_of(rows, chunk))
        return computed[-1]

    monkeypatch.setattr(ChunkedRows, "rows_of", noted)
    with streamed_model_in_chunks(checkpoint, boundary_activations=tier) as model:
        draw_b(model.lora_manager)
        streamed_step(model, batches)
        # what the step before has left there is not what is found
        for memory in model.adapter.activations.pool._free:
            memory.fill_(0xFF)
        model.skeleton.zero_grad()
        found = streamed_step(model, batches)
        assert bool(model.adapter.activations.pool._free) == (tier != "device")
    assert slice(1) in computed
    assert slice(None) in computed
    assert_close(found, expected)


@pytest.mark.parametrize("chosen", [everything, one_in_the_middle])
def test_weights_of_layers_that_train_themselves(
    checkpoint_of: CheckpointOf, chosen: Callable[[str], bool]
) -> None:
    outcomes = []
    for chunk in (None, CHUNK):
        gradients: dict[str, Tensor | None] = {}
        settings: dict[str, object] = {"gradient_checkpointing": True, "sequence_chunk": chunk}
        with bare_model(checkpoint_of("qwen3"), settings) as model:
            model.skeleton.train()
            layers = f"{model.split.layers_name}."
            inside = {
                number: [
                    name
                    for name, _ in layer.named_parameters()
                    if chosen(f"{layers}{number}.{name}")
                ]
                for number, layer in enumerate(model.split.layers)
            }
            for name, parameter in model.skeleton.named_parameters():
                parameter.requires_grad_(not name.startswith(layers) and chosen(name))

            def done(
                layer: int,
                formed: dict[str, Tensor],
                gradients: dict[str, Tensor | None] = gradients,
            ) -> None:
                gradients |= {f"{layer}.{name}": gradient for name, gradient in formed.items()}

            model.adapter.train_weights(TrainedWeights(inside, done))
            loss = model.adapter.loss(micro_batches(2))
            loss.backward()
            gradients |= {
                name: parameter.grad
                for name, parameter in model.skeleton.named_parameters()
                if parameter.grad is not None
            }
        outcomes.append(Outcome(loss.detach(), gradients, torch.get_rng_state()))
    expected, found = outcomes
    assert_close(found, expected)


@pytest.mark.parametrize("parts", [(5, 3), (2, 2, 2, 2)], ids=["several", "pairs"])
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
def test_rows_of_a_reference_go_in_chunks_as_well(
    checkpoint_of: CheckpointOf, objective: str, parts: tuple[int, ...]
) -> None:
    """Of micro-batches that are a pair the prompt is computed once."""
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples(labelled=objective == "kto"))
    outcomes = []
    for chunk in (None, CHUNK):
        with streamed_model_in_chunks(
            checkpoint, sequence_chunk=chunk, objective=objective
        ) as model:
            draw_b(model.lora_manager)
            outcomes.append(streamed_step(model, parts_of(batch, *parts)))
    expected, found = outcomes
    assert_close(found, expected)


def test_an_evaluation_and_hidden_states(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("mistral")
    batches = micro_batches(2, padding=True)
    results = []
    for chunk in (None, CHUNK):
        with streamed_model_in_chunks(checkpoint, sequence_chunk=chunk) as model, torch.no_grad():
            draw_b(model.lora_manager)
            loss, _ = model.adapter.evaluate(batches)
            results.append((loss, *(states[1] for states in model.adapter.hidden_states(batches))))
    for expected, found in zip(*results, strict=True):
        assert relative_difference(found, expected) < ROUNDING


def test_a_recomputed_chunk_draws_what_it_drew_before(checkpoint_of: CheckpointOf) -> None:
    """The gradient is that of the loss under the same draws, which a step along it shows."""
    checkpoint = checkpoint_of("llama", dropout=0.3)
    (batch,) = micro_batches(1)
    step = 2e-3
    with streamed_model_in_chunks(checkpoint, lora_dropout=0.3) as model:
        draw_b(model.lora_manager)
        parameters = trained(model.lora_manager)
        outcome = streamed_step(model, [batch])
        length = all_gradients(outcome).norm()
        losses = []
        for sign in (1, -2):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.add_(outcome.gradients[name], alpha=float(sign * step / length))
            losses.append(float(streamed_step(model, [batch]).loss))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(length), rel=0.02)


# What it costs


def test_weights_are_read_twice_in_a_step_whatever_the_number_of_chunks(
    checkpoint_of: CheckpointOf,
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    costs = []
    for chunk in (None, CHUNK, 2):
        with streamed_model_in_chunks(checkpoint, sequence_chunk=chunk) as model:
            streamed_step(model, batches)
            before = model.memory.counters
            streamed_step(model, batches)
            after = model.memory.counters
        names = ("layers_read", "bytes_read", "bytes_uploaded", "leases")
        costs.append([getattr(after, name) - getattr(before, name) for name in names])
    assert costs[0] == costs[1] == costs[2]
    assert costs[0][-1] == 2 * NUM_LAYERS - 1


WIDE = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=8192,
    pad_token_id=0,
)
STATE = 128 * 4  # bytes of a token's hidden state
KEYS_VALUES = 2 * 32 * 4  # bytes of a token's keys and values


def held_in_backward(
    directory: Path, length: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return the most bytes that the backward of a middle layer holds more than there were before,
    for one row."""
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    ids = torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(2))
    peaks = []
    with (
        streamed_model_in_chunks(checkpoint, sequence_chunk=chunk, max_length=8192) as model,
        Tally() as tally,
        monkeypatch.context() as patch,
    ):
        tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
        layer = model.adapter.layers[1]
        backward = layer.backward

        def measured(*args: Any, **options: Any) -> Any:
            before = tally.restart_peak()
            gradients = backward(*args, **options)
            peaks.append(tally.peak - before)
            return gradients

        patch.setattr(layer, "backward", measured)
        model.adapter.loss([{"input_ids": ids, "labels": ids}]).backward()
    (peak,) = peaks
    return peak


def test_a_backward_holds_one_chunk_and_what_all_tokens_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(WIDE, tmp_path)
    at_once = held_in_backward(directory, 4096, None, monkeypatch)
    shorter = held_in_backward(directory, 2048, 256, monkeypatch)
    longer = held_in_backward(directory, 4096, 256, monkeypatch)
    assert longer < at_once / 4
    # Of a token that is not in the chunk: its keys and values, their gradients, and those of this
    # chunk; both repeated for each head by `transformers`; the input's gradient; a row of the mask.
    repeated = 2 * STATE
    share = 3 * KEYS_VALUES + 2 * repeated + STATE + 2 * 256
    assert (longer - shorter) / 2048 < share
    assert longer - share * 4096 < at_once * 256 / 4096 * 1.5


# What is refused


@PARTLY_ADAPTED
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("deepseek_v32", "transformers gives it a DynamicIndexedLayer"),
        ("gemma4_text", "its layers hand on more than the hidden state"),
        ("jamba", "layer 0 does not go on from the state that a chunk has left"),
        ("paligemma", "layer 0 makes something else of a sequence in chunks than at once"),
        ("openai-gpt", "layer 0 keeps nothing of its own in a cache"),
    ],
)
def test_a_model_whose_layers_cannot_be_cut_is_refused_with_a_sentence(
    model_type: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot go through this model's layers in chunks") as e:
        compare(model_type, tmp_path, sequence_chunk=5)
    assert why in str(e.value)


def test_a_model_of_unknown_inputs_is_refused(checkpoint_of: CheckpointOf) -> None:
    (batch,) = micro_batches(1)
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with (
        streamed_model_in_chunks(checkpoint_of("llama")) as model,
        pytest.raises(ConfigError, match="token_type_ids"),
    ):
        streamed_step(model, [batch])
