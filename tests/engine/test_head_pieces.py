"""The head's weight streams in pieces of the vocabulary: the whole model's numbers, and bytes as
announced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from everytype import STREAMED, compare
from parity import (
    all_gradients,
    assert_same,
    draw_b,
    layers_of,
    relative_difference,
    streamed_model,
    streamed_step,
    whole_model,
    whole_step,
)
from tiny import (
    ARCHITECTURES,
    NUM_LAYERS,
    Architecture,
    Checkpoint,
    micro_batches,
    write_checkpoint,
)
from torch import Tensor, nn
from transformers import CohereConfig, GraniteConfig, LlamaForCausalLM

from lema import LemaConfig, LemaModel
from lema.engine.head import cut
from lema.engine.head.cut import HeadCut
from lema.errors import ConfigError
from lema.plan.planner import machine_state_of, planner_of
from lema.plan.work import workload
from lema.stream.schedule import fetched_per_step
from lema.train.health.nonfinite import first_non_finite

CLOSE = 1e-6  # sums over the vocabulary are added in another order
SPANS = ((0, 40), (40, 80), (80, 96))
SCALED = {
    "cohere": tiny._config(CohereConfig, logit_scale=0.25),
    "granite": tiny._config(GraniteConfig, logits_scaling=4.0),
}


@pytest.fixture
def three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut heads of 96 words in three, though one slot would hold them."""
    monkeypatch.setattr(HeadCut, "spans", lambda *_: SPANS)


@pytest.fixture
def many_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checkpoint:
    """A model whose head is several times its largest layer."""
    monkeypatch.setattr(tiny, "VOCABULARY", 3000)
    monkeypatch.setitem(ARCHITECTURES, "wide", Architecture(tiny._config(tiny.LlamaConfig)))
    return write_checkpoint("wide", tmp_path)


def checkpoint(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Checkpoint:
    if name in SCALED:
        monkeypatch.setitem(ARCHITECTURES, name, Architecture(SCALED[name]))
    return write_checkpoint(name, directory, **options)


def close(found: Tensor, expected: Tensor) -> bool:
    return relative_difference(found, expected) < CLOSE


@pytest.mark.covered(3)
@pytest.mark.parametrize(
    ("name", "tied", "settings"),
    [
        ("llama", False, {"gradient_checkpointing": True}),
        ("llama", True, {"loss_chunk_tokens": 5}),
        ("gemma2", True, {"gradient_checkpointing": True, "prefetch_depth": 1}),  # soft-capped
        ("cohere", True, {"gradient_checkpointing": True}),
        ("granite", False, {"boundary_activations": "host", "gradient_checkpointing": True}),
        ("gpt2", True, {"activation_offloading": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:activation_offloading saves no memory")
def test_loss_and_gradients_are_those_of_the_whole_model(
    name: str,
    tied: bool,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    three_pieces: None,
) -> None:
    stored = checkpoint(name, tmp_path, monkeypatch, tied=tied)
    batches = micro_batches(3, padding=True)
    whole = whole_model(stored)
    draw_b(whole)
    expected = whole_step(whole, batches)
    with streamed_model(stored, head="stream", **settings) as model:
        draw_b(model.lora_manager)
        head = model.skeleton.get_output_embeddings().weight
        for _ in range(2):
            found = streamed_step(model, batches)
            assert len(model.memory.layers) == NUM_LAYERS + len(SPANS)
            assert close(found.loss, expected.loss)
            assert found.gradients.keys() == expected.gradients.keys()
            assert close(all_gradients(found), all_gradients(expected))
            assert torch.equal(found.generator, expected.generator)
            assert head.is_meta
        # a tied table is looked up by row
        assert model.split.tables.names == model.outer.head.names - {"lm_head.weight"}
        assert first_non_finite(model.adapter, batches) is None
        loss, tokens = model.adapter.evaluate(batches)
    with streamed_model(stored, head="device") as model:
        draw_b(model.lora_manager)
        also, same_tokens = model.adapter.evaluate(batches)
    assert close(loss, also)
    assert tokens == same_tokens


def test_dropout_draws_as_the_whole_model(tmp_path: Path, three_pieces: None) -> None:
    stored = write_checkpoint("llama", tmp_path, dropout=0.1)
    batches = micro_batches(2, padding=True)
    whole = whole_model(stored, dropout=0.1)
    draw_b(whole)
    expected = whole_step(whole, batches, layer_major=layers_of(whole, stored))
    with streamed_model(
        stored, head="stream", lora_dropout=0.1, gradient_checkpointing=True
    ) as model:
        draw_b(model.lora_manager)
        found = streamed_step(model, batches)
    assert close(all_gradients(found), all_gradients(expected))
    assert torch.equal(found.generator, expected.generator)


def test_layers_round_as_below_a_whole_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one piece the head's gradient differs by rounding alone; given the same one, the
    layers' do not differ.
    """
    stored = write_checkpoint("llama", tmp_path)
    batches = micro_batches(2)
    seen: dict[str, list[Tensor]] = {}
    steps = {}
    for head in ("device", "stream"):
        with streamed_model(stored, head=head, gradient_checkpointing=True) as model:
            draw_b(model.lora_manager)
            if head == "stream":

                def given(*_: Any, **__: Any) -> tuple[list[Tensor], list[Tensor]]:
                    return [steps["device"].loss], [one.clone() for one in seen["device"]]

                monkeypatch.setattr("lema.engine.layers.top.piece_passes", given)
            seen[head] = []

            def look(layer: int, gradients: Any, head: str = head) -> None:
                if layer == NUM_LAYERS:
                    seen[head].extend(gradients)

            with model.adapter.engine.observing(look):
                steps[head] = streamed_step(model, batches)
    assert_same(steps["stream"], steps["device"])


def test_half_precision_differs_by_its_rounding(tmp_path: Path, three_pieces: None) -> None:
    stored = write_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    batches = micro_batches(2)
    steps = []
    for head in ("device", "stream"):
        with streamed_model(stored, head=head, gradient_checkpointing=True) as model:
            draw_b(model.lora_manager)
            steps.append(streamed_step(model, batches))
    assert relative_difference(steps[1].loss, steps[0].loss) < 1e-5  # of the same logits
    assert relative_difference(all_gradients(steps[1]), all_gradients(steps[0])) < 2e-2


def test_a_caller_gets_the_logits(tmp_path: Path, three_pieces: None) -> None:
    stored, (batch, *_) = write_checkpoint("gemma2", tmp_path), micro_batches(1)
    found = []
    for head in ("device", "stream"):
        logits: list[Tensor] = []
        with streamed_model(stored, head=head) as model:
            draw_b(model.lora_manager)
            model.adapter.loss([batch], logits=logits).backward()
        found += logits
    assert found[0].shape == found[1].shape
    assert close(found[1], found[0])


def generated(stored: Checkpoint, head: str) -> tuple[Tensor, list[int]]:
    from lema.engine.generation import streaming_forward

    leased: list[int] = []
    with streamed_model(stored, head=head, prefetch_depth=1) as model:
        draw_b(model.lora_manager)
        memory = model.memory
        pieces = model.outer.head.pieced(model.split, model.backend, model._opened.layers())
        ids = torch.arange(3, 9)[None]
        counting = memory.calling(lambda: leased.append(0))
        with torch.no_grad(), counting, streaming_forward(model.split, memory, head=pieces):
            tokens = model.eval_model().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    return tokens, leased


def test_text_is_generated_over_the_pieces(
    tmp_path: Path, three_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LemaModel, "eval_model", lambda self: self.skeleton.eval(), raising=False)
    stored = write_checkpoint("llama", tmp_path)
    (one, device), (other, stream) = generated(stored, "device"), generated(stored, "stream")
    assert torch.equal(one, other)
    tokens = one.shape[1] - 6
    assert len(device) == tokens * NUM_LAYERS
    assert len(stream) == tokens * (NUM_LAYERS + len(SPANS))  # each piece once for a token


@pytest.mark.parametrize("slots", [1, 3])
def test_the_head_moves_twice_less_one_piece_and_the_plan_says_so(
    many_words: Checkpoint, slots: int
) -> None:
    settings = {"head": "stream", "gradient_checkpointing": True, "batch_size": 2, "max_length": 12}
    batches = micro_batches(2, lengths=(12, 12))
    with streamed_model(many_words, spent={"slots": slots}, **settings) as model:
        stream = model.memory
        count = len(model.memory.layers)
        streamed_step(model, batches)
        before = stream.counters
        streamed_step(model, batches)
        moved = stream.counters.bytes_uploaded - before.bytes_uploaded
        read = stream.counters.bytes_read
        pieces = stream.layers[NUM_LAYERS:]
        assert len(pieces) > 3
        assert stream.slot_bytes == max(layer.nbytes for layer in stream.layers[:NUM_LAYERS])
        assert sum(piece.read_bytes for piece in pieces) == 3000 * 32 * 4
        fetched = fetched_per_step(count, slots)
        assert moved == sum(stream.layers[index].upload_bytes for index in fetched)
        assert read - before.bytes_read == sum(stream.layers[index].read_bytes for index in fetched)
        if slots == 1:
            of_head = sum(
                stream.layers[index].read_bytes for index in fetched if index >= NUM_LAYERS
            )
            assert of_head == 2 * 3000 * 32 * 4 - pieces[-1].read_bytes
            return
        config = model.config
        planner = planner_of(config, machine_state=machine_state_of(config))
        needs = planner.needs()
        assert needs.allocation == model.allocation
        assert needs.device["slots"] == stream.num_slots * stream.slot_bytes
        assert needs.device["outside"] == planner.blueprint.outside_bytes == model.outer.nbytes
        assert needs.traffic(
            2
        ).read == needs.demand.outside_bytes + read - before.bytes_read + _first(stream, slots)
    assert any("pass through the slots in" in note for note in planner.blueprint.notes)


def _first(stream: Any, slots: int) -> int:
    """Return the bytes of layers that a first step reads."""
    from lema.stream.schedule import fetched, training_order

    order = training_order(len(stream.layers))
    return sum(stream.layers[index].read_bytes for index in fetched(order, slots))


def test_a_head_that_fits_is_not_looked_at_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LemaConfig(
        str(write_checkpoint("llama", tmp_path).streamed), device="cpu", batch_size=2, max_length=12
    )
    monkeypatch.setattr(cut, "LEAST_BYTES", 0)
    monkeypatch.setattr(workload, "_pieces_work", lambda *_: pytest.fail("the head fits whole"))
    assert not planner_of(config, machine_state=machine_state_of(config)).needs().allocation.pieces


@pytest.mark.exhaustive  # the plan tries many pieces
def test_it_is_cut_unasked_only_where_the_limit_does_not_hold_it(
    many_words: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "LEAST_BYTES", 0)
    settings = {
        "gradient_checkpointing": True,
        "batch_size": 2,
        "max_length": 12,
        "boundary_activations": "device",
    }
    # else these give way first
    settings |= {
        "micro_batch_size": 2,
        "prefetch_depth": 2,
        "loss_chunk_tokens": 1024,
    }
    base = {
        "device": "cpu",
        "lora_rank": 4,
        "lora_alpha": 8,
        "seed": 7,
        "save_steps": 0,
        **settings,
    }

    def needed(head: str) -> int:
        config = LemaConfig(str(many_words.streamed), head=head, **base)
        return sum(
            planner_of(config, machine_state=machine_state_of(config)).needs().device.values()
        )

    whole = needed("device")
    least = needed("stream")
    assert least < whole - 2500 * 32 * 4
    (batch,) = micro_batches(1, lengths=(12,))
    with streamed_model(many_words, **settings) as model:
        draw_b(model.lora_manager)
        expected = streamed_step(model, [batch])
    for limit, pieces in ((whole, False), (whole - 4 * 4096, True), (least, True)):
        with streamed_model(many_words, poison=False, device_memory=limit, **settings) as model:
            draw_b(model.lora_manager)
            assert bool(model.allocation.pieces) == pieces
            found = streamed_step(model, [batch])
            planner = planner_of(model.config, machine_state=machine_state_of(model.config))
            assert bool(planner.needs().allocation.pieces) == pieces
        if pieces:
            assert close(all_gradients(found), all_gradients(expected))
        else:
            assert_same(found, expected)


@pytest.mark.covered(2)
@pytest.mark.parametrize(
    "adapter",
    [
        {"lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_modules_to_save": ["lm_head"]},
        {"lora_modules_to_save": ["norm"]},
        {"lora_trainable_token_indices": [3, 4]},
        {"lora_target_modules": ["q_proj", "embed_tokens"]},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_that_trains_is_whole(
    adapter: dict[str, Any], tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "LEAST_BYTES", 0)
    stored = write_checkpoint("llama", tmp_path, tied=tied)
    batches = micro_batches(1)
    with (
        pytest.raises(ConfigError, match="the head cannot stream in pieces"),
        opened(stored, head="stream", **adapter),
    ):
        pass
    with opened(stored, **adapter) as model:
        expected = streamed_step(model, batches)
    # it may be cut as far as is known when it is opened
    with opened(stored, device_memory=10**9, **adapter) as model:
        found = streamed_step(model, batches)
        assert torch.equal(found.loss, expected.loss)
        assert all(
            torch.equal(found.gradients[name], one) for name, one in expected.gradients.items()
        )
        config = model.config
    notes = planner_of(config, machine_state=machine_state_of(config)).blueprint.notes
    assert any("stays whole on the device" in note for note in notes)


@contextmanager
def opened(stored: Checkpoint, **settings: Any) -> Iterator[LemaModel]:
    with streamed_model(stored, **settings) as model:
        draw_b(model.lora_manager)
        yield model


# Whole, and why.
WHOLE = {
    "chameleon": "index_put_ to all logits",  # codes of images are no words
    "gemma4": "does not run on part of its vocabulary",  # it computes with a row of its table
    "nemotron_h_omni": "the model's head is not a plain linear module",
    "rwkv": "does not run on part of its vocabulary",
}
SOME = ("gemma3_text", "inkling2", "mamba", "gpt_neox", *WHOLE)
OTHERS = (pytest.mark.slow, pytest.mark.covered(6))


@pytest.mark.parametrize(
    "kind", [*SOME, *(pytest.param(kind, marks=OTHERS) for kind in STREAMED if kind not in SOME)]
)
@pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules")
@pytest.mark.filterwarnings("ignore:.* compares a position with its own label")
def test_a_head_of_any_type_streams_or_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thirds(head: HeadCut, _: Any) -> tuple[tuple[int, int], ...]:
        size = head._stored.records[head.name].shape[0]
        each = -(-size // 3)
        return tuple((first, min(first + each, size)) for first in range(0, size, each))

    monkeypatch.setattr(HeadCut, "spans", thirds)
    if kind in WHOLE:
        with pytest.raises(ConfigError, match=WHOLE[kind]):
            compare(kind, tmp_path, head="stream")
        return
    found = compare(kind, tmp_path, head="stream")
    assert max(found.loss, found.logits) < CLOSE
    # Of each adapter by itself, some of which have gradients that are nearly nothing.
    assert found.worst < 1e-4


def masked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    made = forward(self, *args, **kwargs)
    made.logits[..., 5] = -1e9
    return made


def normed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    made = forward(self, *args, **kwargs)
    made.logits = made.logits.log_softmax(-1)
    return made


forward = LlamaForCausalLM.forward


@pytest.mark.parametrize("other", [masked, normed])
def test_a_head_whose_logits_need_each_other_is_whole(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_checkpoint("llama", tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "forward", other)
    with (
        pytest.raises(ConfigError, match="in pieces: the model does"),
        opened(stored, head="stream"),
    ):
        pass


def test_a_logit_that_is_not_finite_is_the_heads(tmp_path: Path, three_pieces: None) -> None:
    stored = write_checkpoint("llama", tmp_path)
    batches = micro_batches(2)
    with opened(stored, head="stream", check_base_weights=False) as model:
        stored_pieces = model.memory.host_cached
        assert not stored_pieces
        whole = model.outer.head.pieced

        def infinite(*args: Any) -> Any:
            head = whole(*args)
            assert head is not None
            product = head.product
            head.product = lambda given, weight, span: (
                product(given, weight, span) * (torch.inf if span[0] else 1)
            )
            return head

        model.outer.head.pieced = infinite  # type: ignore[method-assign]
        assert first_non_finite(model.adapter, batches) == "the head"
