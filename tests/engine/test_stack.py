"""The stack of layers in the model's own forward: whoever calls the model gets the bits of the
whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from everytype import difference, opened, write_model
from parity import (
    DRAWS,
    accumulate,
    assert_same,
    draw_b,
    streamed_model,
    streamed_step,
    trained,
    whole_model,
)
from parity import Outcome as Step
from peft import get_peft_model
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from lema import LemaModel
from lema.engine.stack import LayerStack
from lema.errors import ConfigError
from lema.stream.schedule import fetched_per_step

CheckpointOf = Callable[..., Checkpoint]


@contextmanager
def stacked(
    checkpoint: Checkpoint,
    *,
    rows: int | None = None,
    room: Callable[[], int] | None = None,
    **options: Any,
) -> Iterator[tuple[LemaModel, Any]]:
    """Yield a model whose slots are poisoned when they are given back, and its PEFT model with a
    stack in it.
    """
    with streamed_model(checkpoint, **{"gradient_checkpointing": True, **options}) as model:
        stack = LayerStack(model.adapter, rows, room)
        draw_b(model.lora_manager)
        yield model, model.lora_manager
        stack.take_out()


def whole(checkpoint: Checkpoint, **options: Any) -> Any:
    model = whole_model(checkpoint, **options)
    draw_b(model)
    return model


def step_of(
    model: Any, batch: dict[str, Tensor], autocast: torch.dtype | None = None
) -> tuple[Step, Tensor]:
    """Take a step as a user would, and return what it leaves behind, and the logits."""
    torch.manual_seed(DRAWS)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        out = model(**batch)
    out.loss.backward()
    return Step.of(model, out.loss), out.logits.detach()


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.covered(8)
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": False},
        {"boundary_activations": "disk"},
        {"embeddings": "disk"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "phi3"])
def test_a_step_is_that_of_the_whole_model(
    checkpoint_of: CheckpointOf, name: str, dropout: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint, (batch,) = checkpoint_of(name, dropout=dropout), micro_batches(1, padding=True)
    expected, logits = step_of(whole(checkpoint, dropout=dropout), batch)
    settings = {"lora_dropout": dropout, "offload_dir": str(tmp_path), **settings}
    with stacked(checkpoint, **settings) as (_, model):
        for _ in range(2):
            found, made = step_of(model, batch)
            assert_same(found, expected)
            assert torch.equal(made, logits)


@pytest.mark.parametrize("model_type", ["zaya", "gemma3n_text"])
@pytest.mark.filterwarnings("ignore")
def test_values_between_layers_go_along(model_type: str, tmp_path: Path) -> None:
    directory = write_model(tiny_config(model_type), tmp_path / "published")
    batch = {"input_ids": torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))}
    batch["labels"] = batch["input_ids"]
    with opened(directory) as model:
        stack = LayerStack(model.adapter)
        draw_b(model.lora_manager)
        found, logits = step_of(model.lora_manager, batch)
        adapter = model.lora_manager.peft_config["default"]
        stack.take_out()
    base = aligned(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    base.config.use_cache = False
    reference = get_peft_model(base, adapter).train()
    draw_b(reference)
    for one, other in zip(
        trained(reference).values(), trained(model.lora_manager).values(), strict=True
    ):
        one.data.copy_(other.data)
    expected, other_logits = step_of(reference, batch)
    assert all(
        difference(found.gradients[name], one) == 0 for name, one in expected.gradients.items()
    )
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(logits, other_logits)


@pytest.mark.covered(2)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("room", "kept"), [(1 << 30, 4), (1, 1), (0, 0)])
def test_the_top_layer_is_computed_again_only_where_there_is_no_room(
    checkpoint_of: CheckpointOf, room: int, kept: int, dropout: float
) -> None:
    checkpoint = checkpoint_of("llama", dropout=dropout)
    batch = joined(micro_batches(4, lengths=(9, 9, 9, 9)))
    outcomes = []
    for given in (None, lambda: room):
        with stacked(checkpoint, rows=2, room=given, lora_dropout=dropout) as (model, peft_model):
            step_of(peft_model, batch)  # in which nothing is kept
            runs = []
            model.split.layers[-1].mlp.register_forward_pre_hook(
                lambda *_, runs=runs: runs.append(1)
            )
            outcomes.append(step_of(peft_model, batch)[0])
    assert len(runs) == 2 * 4 - kept
    assert_same(*outcomes)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_are_cut_within_the_layers(checkpoint_of: CheckpointOf, rows: int) -> None:
    """Rounding apart the wide batch is the whole model's; and the layers' products are those of
    so many rows.
    """
    checkpoint = checkpoint_of("llama")
    batch = joined(micro_batches(4, padding=True, lengths=(9, 9, 9, 9)))
    expected, logits = step_of(whole(checkpoint), batch)
    seen = []
    with stacked(checkpoint, rows=rows) as (model, peft_model):
        mlp = model.split.layers[2].mlp
        mlp.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        found, made = step_of(peft_model, batch)
        leases = model.memory.counters.leases
    assert max(seen) == rows and sum(seen[: -(-8 // rows)]) == 8
    assert leases == 2 * NUM_LAYERS + 1  # up and down once, and one to learn what a layer returns
    attended = batch["attention_mask"].bool()
    torch.testing.assert_close(made[attended], logits[attended], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-3, atol=1e-6)


def ragged() -> dict[str, Tensor]:
    """Eight rows of eight lengths, in no order, one of which begins late."""
    lengths = (4, 11, 7, 3, 12, 5, 9, 6)
    ids = torch.randint(3, 60, (8, 14), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(14) < torch.tensor(lengths)[:, None]).long()
    mask[2, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_are_cut_by_length_and_come_back_in_their_order(
    checkpoint_of: CheckpointOf, name: str
) -> None:
    """Bitwise the same micro-batches through the whole model, and rounding apart the whole batch at
    once; the attention of no other columns is computed, and only what nothing attends to at the end
    of rows is left out."""
    batch, (long, short) = ragged(), ([4, 1, 6, 2], [7, 5, 0, 3])
    checkpoint = checkpoint_of(name)
    shapes = list[tuple[int, ...]]()
    reference = whole(checkpoint)
    base = reference.get_base_model()
    parts = []
    for rows, end in ((long, 12), (short, 6)):
        given = {name: batch[name][rows, :end] for name in ("input_ids", "attention_mask")}
        hidden = base.base_model(**given).last_hidden_state
        parts.append(torch.nn.functional.pad(hidden, (0, 0, 0, 14 - end)))
    order = sorted(range(8), key=[*long, *short].__getitem__)
    expected_logits = base.lm_head(torch.cat(parts)[order])
    loss = base.loss_function(
        logits=expected_logits, labels=batch["labels"], vocab_size=base.config.vocab_size
    )
    loss.backward()
    expected, (at_once, whole_logits) = Step.of(reference, loss), step_of(reference, batch)
    with stacked(checkpoint, rows=4) as (model, peft_model):
        model.split.layers[2].mlp.register_forward_pre_hook(
            lambda _, given: shapes.append(tuple(given[0].shape[:2]))
        )
        found, logits = step_of(peft_model, batch)
        with pytest.raises(
            ConfigError,
            match="the loss counts masked tokens at the beginning or the end of rows",
        ):
            step_of(peft_model, batch | {"labels": batch["input_ids"]})
        assert torch.equal(step_of(peft_model, batch)[0].loss, found.loss)
    assert shapes[:2] == [(4, 12), (4, 6)]
    attended = batch["attention_mask"].bool()
    assert torch.equal(found.loss, expected.loss) and torch.equal(
        logits[attended], expected_logits[attended]
    )
    assert all(torch.equal(found.gradients[name], one) for name, one in expected.gradients.items())
    torch.testing.assert_close(found.loss, at_once.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits[attended], whole_logits[attended], rtol=1e-4, atol=1e-5)


def test_wide_batches_read_what_lema_train_reads(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(4, lengths=(9, 9, 9, 9))
    read = []
    for foreign in (False, True):
        with stacked(checkpoint, rows=2) as (model, peft_model):
            steps = []
            for _ in range(3):
                before = model.memory.counters
                if foreign:
                    step_of(peft_model, joined(batches))
                else:
                    streamed_step(model, batches)
                    model.adapter.announce_step()  # as the trainer does
                model.memory.cancel()  # so that no read of the next step is counted here
                after = model.memory.counters
                steps.append(
                    (after.layers_read - before.layers_read, after.bytes_read - before.bytes_read)
                )
            read.append(steps[1:])
            slots = model.memory.num_slots
    assert read[0] == read[1]
    assert read[0][0][0] == len(fetched_per_step(NUM_LAYERS, slots)) == 2 * (NUM_LAYERS - slots)


def test_forwards_may_wait_for_their_backwards_in_any_order(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3, padding=True)
    reference = whole(checkpoint)
    for settings in ({}, {"boundary_activations": "disk", "offload_dir": str(tmp_path)}):
        with stacked(checkpoint, **settings) as (_, model):
            found = []
            for one in (reference, model):
                losses = []
                for batch in batches:
                    loss = one(**batch).loss
                    with torch.no_grad(), one.disable_adapter():
                        factor = one(**batch).loss
                    losses.append(loss * factor)
                abandoned = one(**batches[0]).loss
                (losses[2] + losses[0]).backward()
                del abandoned
                losses[1].backward()
                found.append(Step.of(one, sum(losses)))
            assert_same(found[1], found[0])


def test_a_forward_without_a_graph_between_two_passes_costs_one_pass(
    checkpoint_of: CheckpointOf,
) -> None:
    checkpoint, (batch,) = checkpoint_of("llama"), micro_batches(1)
    with stacked(checkpoint) as (model, peft_model):
        step_of(peft_model, batch)
        before = model.memory.counters
        loss = peft_model(**batch).loss
        with torch.no_grad():
            peft_model(**batch)
        loss.backward()
        after = model.memory.counters
        slots = model.memory.num_slots
    assert after.leases - before.leases == 3 * NUM_LAYERS
    # Less what the slots keep of the step before, and where the reference ends and the backward
    # begins.
    assert after.layers_read - before.layers_read <= 3 * NUM_LAYERS - slots + slots


def test_evaluations_keep_nothing_and_read_once(checkpoint_of: CheckpointOf) -> None:
    checkpoint, (batch,) = checkpoint_of("llama"), micro_batches(1, padding=True)
    reference = whole(checkpoint).eval()
    with stacked(checkpoint, rows=1) as (model, peft_model):
        peft_model.eval()
        with torch.no_grad():
            expected = reference(**batch).logits
            before = model.memory.counters.leases
            made = peft_model(**batch)
            assert model.memory.counters.leases - before == NUM_LAYERS + 1
            assert model.adapter.activations.arena.memory_bytes == 0
        assert not made.logits.requires_grad
        attended = batch["attention_mask"].bool()
        torch.testing.assert_close(made.logits[attended], expected[attended], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_have_the_dtype_of_the_callers_autocast(
    checkpoint_of: CheckpointOf, dtype: str
) -> None:
    """As accelerate has it around a forward: also where layers are recomputed, when the caller's
    context has ended.
    """
    checkpoint, (batch,) = checkpoint_of("llama", dtype=dtype), micro_batches(1, padding=True)
    reference = whole(checkpoint, dtype=getattr(torch, dtype))
    expected, logits = step_of(reference, batch, torch.bfloat16)
    with stacked(checkpoint) as (_, model):
        found, made = step_of(model, batch, torch.bfloat16)
        assert_same(found, expected)
        assert torch.equal(made, logits)


def test_the_engine_s_own_passes_go_by_the_stack(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2, padding=True)
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        alone = streamed_step(model, batches)
    with stacked(checkpoint) as (model, peft_model):
        for _ in range(2):
            step_of(peft_model, batches[0])
            assert_same(streamed_step(model, batches), alone)
            assert model.adapter.evaluate(batches)[0].isfinite()


def test_what_trains_outside_the_layers_trains(checkpoint_of: CheckpointOf) -> None:
    checkpoint, (batch,) = checkpoint_of("llama"), micro_batches(1, padding=True)
    targets = [*sorted(checkpoint.architecture.targets), "embed_tokens", "lm_head"]
    reference = whole(checkpoint, targets=targets)
    draw_rows(reference)
    expected, _ = step_of(reference, batch)
    with stacked(checkpoint, lora_target_modules=targets) as (_, model):
        draw_rows(model)
        for _ in range(2):
            assert_same(step_of(model, batch)[0], expected)
    assert any("embed_tokens" in name for name in expected.gradients)


def draw_rows(model: Any) -> None:
    """Give the embeddings' A, zero at first, random values."""
    generator = torch.Generator().manual_seed(5)
    for name, one in trained(model).items():
        if "lora_embedding_A" in name:
            one.data.normal_(generator=generator)


def test_a_gradient_reaches_embeddings_that_a_caller_gives(checkpoint_of: CheckpointOf) -> None:
    checkpoint, (batch,) = checkpoint_of("llama"), micro_batches(1)
    found = []
    with stacked(checkpoint) as (_, model):
        for one in (whole(checkpoint), model):
            table = one.get_input_embeddings()
            given = table(batch["input_ids"]).detach().requires_grad_()
            one(inputs_embeds=given * 2.0, labels=batch["labels"]).loss.backward()
            found.append(given.grad)
    assert torch.equal(found[0], found[1]) and found[0].any()


def test_accumulation_says_once_what_it_costs(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3)
    reference = whole(checkpoint)
    expected = accumulate(reference, batches)
    with stacked(checkpoint) as (model, peft_model):
        optimizer = torch.optim.SGD(trained(peft_model).values(), lr=0.0)
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        layers = fetched_per_step(NUM_LAYERS, model.memory.num_slots)
        kilobytes = sum(model.memory.layers[layer].nbytes for layer in layers) // 1000
        with pytest.warns(
            UserWarning, match=f"streams {kilobytes} kB of weights once more"
        ) as warned:
            total = sum(
                _backward(peft_model(**batch, num_items_in_batch=tokens).loss) for batch in batches
            )
        assert torch.equal(total, expected) and len(warned) == 1
        assert_same(Step.of(peft_model, total), Step.of(reference, expected))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in batches:  # steps of an optimizer are no accumulation
                _backward(peft_model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (
            lambda model: model.eval(),
            (
                "between a forward and its backward, the adapters or the training mode of the "
                "model changed"
            ),
        ),
        (
            lambda model: model.disable_adapter_layers(),
            (
                "between a forward and its backward, the adapters or the training mode of the "
                "model changed"
            ),
        ),
    ],
)
def test_a_backward_that_would_recompute_something_else_is_refused(
    checkpoint_of: CheckpointOf, change: Callable[[Any], Any], refusal: str
) -> None:
    (batch,) = micro_batches(1)
    with stacked(checkpoint_of("llama")) as (_, model):
        loss = model(**batch).loss
        change(model)
        with pytest.raises(ConfigError, match=refusal):
            loss.backward()


def test_what_layers_cannot_leave_behind_is_refused(checkpoint_of: CheckpointOf) -> None:
    (batch,) = micro_batches(1)
    with stacked(checkpoint_of("llama")) as (_, model):
        for asked in ({"output_hidden_states": True}, {"output_attentions": True}):
            with pytest.raises(ConfigError, match=f"{next(iter(asked))} is asked for"):
                model(**batch, **asked)
        with torch.no_grad():
            cache = model(**batch, use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="a cache of keys and values"):
            model(**batch, cache=cache)
        with (  # the name of before, which models of other code have
            pytest.raises(ConfigError, match="a cache of keys and values"),
            pytest.warns(FutureWarning, match="deprecated"),
        ):
            model(**batch, past_key_values=cache)


def test_an_input_that_cannot_be_cut_is_refused(checkpoint_of: CheckpointOf) -> None:
    batch = joined(micro_batches(2, lengths=(9, 9)))
    batch["attention_mask"] = torch.ones(3, 9, dtype=torch.long)
    with (
        stacked(checkpoint_of("llama"), rows=2) as (_, model),
        pytest.raises(ConfigError, match=r"\[3, 9\] has no row"),
    ):
        model(**batch)


def test_residents_are_never_announced_in_vain(checkpoint_of: CheckpointOf) -> None:
    (batch,) = micro_batches(1)
    checkpoint = checkpoint_of("llama")
    expected, _ = step_of(whole(checkpoint), batch)
    spent = {"residents": frozenset({0, 5, NUM_LAYERS - 1})}
    with stacked(checkpoint, spent=spent) as (model, peft_model):
        for _ in range(3):
            assert_same(step_of(peft_model, batch)[0], expected)
        counters = replace(model.memory.counters)
    layers = fetched_per_step(NUM_LAYERS, model.memory.num_slots, spent["residents"])
    assert counters.layers_read <= 3 * len(layers) + 2 * model.memory.num_slots + 3
