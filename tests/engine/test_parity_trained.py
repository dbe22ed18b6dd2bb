"""What PEFT trains beside LoRA's matrices is trained under streaming: losses and gradients are
PEFT's, bit for bit.
"""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from parity import (
    all_gradients,
    assert_same,
    relative_difference,
    streamed_step,
    trained,
    whole_step,
)
from tiny import NUM_LAYERS, Architecture, Checkpoint, micro_batches, wide_batch
from tinyconfig import tiny_config
from torch.nn.utils import clip_grad_norm_
from trainedways import WAYS, assert_begins_as, disturb, options_of, streamed_model, whole_model

from lema import LemaConfig
from lema.engine.optim import make_optimizer
from lema.model import read_config
from lema.model.capture import tensors_in
from lema.stream.schedule import fetched_per_step

CheckpointOf = Callable[..., Checkpoint]

recomputed_or_not = pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])


def of_every_kind(ways: Iterable[str], quick: int) -> pytest.MarkDecorator:
    """Each way with each architecture, tied or not, recomputed or not; `quick` of its eight cases
    in a default run.

    Two such cases have nothing in common, and ways that follow each other have others.
    """
    kinds = list(product(["llama", "gpt2"], [False, True], [True, False]))
    cases = []
    for number, way in enumerate(ways):
        chosen = [number % len(kinds), -1 - number % len(kinds)][:quick]
        for kind in kinds:
            marks = () if kind in (kinds[index] for index in chosen) else pytest.mark.exhaustive
            name, tied, recompute = kind
            label = f"{way}-{name}-{'tied' if tied else 'untied'}-{'recomputed' if recompute else 'kept'}"
            cases.append(pytest.param(way, *kind, id=label, marks=marks))
    return pytest.mark.parametrize(("way", "name", "tied", "recompute"), cases)


@pytest.mark.sampled(5)
@of_every_kind(WAYS, quick=1)
def test_what_trains_beside_the_matrices(
    checkpoint_of: CheckpointOf, way: str, name: str, tied: bool, recompute: bool
) -> None:
    checkpoint = checkpoint_of(name, tied=tied)
    batches = micro_batches(4, padding=True)
    options = options_of(way, name, checkpoint)
    whole = whole_model(checkpoint, **options)
    with streamed_model(checkpoint, {"gradient_checkpointing": recompute}, **options) as model:
        assert_begins_as(model, whole)
        disturb(whole)
        disturb(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(1)
@recomputed_or_not
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
def test_tied_embeddings_that_train_as_one(
    checkpoint_of: CheckpointOf, modules: list[str], recompute: bool
) -> None:
    """One parameter, whose gradient of each micro-batch is the sum of those of both ends."""
    checkpoint = checkpoint_of("llama", tied=True)
    batches = micro_batches(4, padding=True)
    options: dict[str, Any] = {"modules_to_save": modules, "ensure_weight_tying": True}
    whole = whole_model(checkpoint, **{**options, "modules_to_save": list(modules)})
    with streamed_model(checkpoint, {"gradient_checkpointing": recompute}, **options) as model:
        assert_begins_as(model, whole)
        saved = [model.skeleton.get_input_embeddings(), model.skeleton.get_output_embeddings()]
        assert saved[0].weight is saved[1].weight
        disturb(whole)
        disturb(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


STEPS = {
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "norms": {"modules_to_save": ["norm"], "use_dora": True},
}


@pytest.mark.slow
@recomputed_or_not
@pytest.mark.parametrize("way", list(STEPS))
def test_optimizer_steps_of_several_passes_leave_what_a_plain_loop_leaves(
    checkpoint_of: CheckpointOf, tmp_path: Path, way: str, recompute: bool
) -> None:
    checkpoint = checkpoint_of("llama", tied=way == "tied")
    batches = micro_batches(4)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches[:2])
    whole = whole_model(checkpoint, **STEPS[way])
    optimizer = make_optimizer(
        trained(whole).values(), LemaConfig("m", learning_rate=1e-2, weight_decay=0.1), whole
    )
    for _ in range(3):
        for batch in batches:
            whole(**batch, num_items_in_batch=tokens).loss.backward()
        every = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        torch._foreach_mul_(
            [parameter.grad for parameter in trained(whole).values()], tokens / every
        )
        clip_grad_norm_(trained(whole).values(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    settings = {
        "gradient_checkpointing": recompute,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "output_dir": tmp_path,
    }
    with streamed_model(checkpoint, settings, **STEPS[way]) as model:
        trainer = model.get_trainer()
        for _ in range(3):
            trainer.accumulate(batches[:2], 2, more=True)
            trainer.accumulate(batches[2:], 2)
        found = trained(model.lora_manager)
        expected = trained(whole)
        assert found.keys() == expected.keys()
        assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("way", ["both", "lora on both", "rows of the embeddings", "everything"])
def test_a_loss_in_chunks_agrees_to_rounding(
    checkpoint_of: CheckpointOf, way: str, tied: bool
) -> None:
    checkpoint = checkpoint_of("llama", tied=tied)
    batches = [wide_batch(), *micro_batches(2)]
    options = options_of(way, "llama", checkpoint)
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    expected = whole_step(whole, batches)
    with streamed_model(checkpoint, {"loss_chunk_tokens": 5}, **options) as model:
        disturb(model.lora_manager)
        found = streamed_step(model, batches)
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(found.loss, expected.loss) < 1e-6
    assert relative_difference(all_gradients(found), all_gradients(expected)) < 1e-6
    for name, gradient in found.gradients.items():
        assert relative_difference(gradient, expected.gradients[name]) < 1e-5, name


@of_every_kind(["both", "lora on both", "magnitudes of both", "rows of the embeddings"], quick=1)
def test_dropout_is_drawn_as_the_whole_model_draws_it(
    checkpoint_of: CheckpointOf, name: str, way: str, tied: bool, recompute: bool
) -> None:
    checkpoint = checkpoint_of(name, tied=tied, dropout=0.1)
    batches = micro_batches(1, padding=True)
    options = {**options_of(way, name, checkpoint), "lora_dropout": 0.1}
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    with streamed_model(checkpoint, {"gradient_checkpointing": recompute}, **options) as model:
        disturb(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(2)
@of_every_kind(
    ["both", "lora on both", "all biases", "magnitudes of both", "rows of the embeddings"], quick=1
)
def test_bfloat16_weights(
    checkpoint_of: CheckpointOf, name: str, way: str, tied: bool, recompute: bool
) -> None:
    """Copies of modules and biases have the dtype of the weights, as in PEFT; matrices and
    magnitudes are float32.
    """
    checkpoint = checkpoint_of(name, tied=tied)
    batches = micro_batches(2, padding=True)
    options = options_of(way, name, checkpoint)
    whole = whole_model(checkpoint, dtype=torch.bfloat16, **options)
    with streamed_model(
        checkpoint, {"gradient_checkpointing": recompute, "dtype": "bfloat16"}, **options
    ) as model:
        assert_begins_as(model, whole)
        disturb(whole)
        disturb(model.lora_manager)
        found = streamed_step(model, batches)
        expected = whole_step(whole, batches, autocast=torch.bfloat16)
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    differing = [
        name
        for name, one in found.gradients.items()
        if not torch.equal(one, expected.gradients[name])
    ]
    assert not differing


def test_a_forward_without_its_backward_leaves_no_trace(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama", tied=True)
    batches = micro_batches(2)
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    with streamed_model(checkpoint, **options) as model:
        disturb(model.lora_manager)
        model.adapter.loss(micro_batches(1))
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "lowest"),
    [
        ({"target_modules": ["lm_head"]}, NUM_LAYERS - 1),
        ({"target_modules": r".*\.layers\.5\.mlp\.up_proj", "modules_to_save": ["lm_head"]}, 5),
        (
            {"target_modules": r".*\.layers\.5\.mlp\.up_proj", "modules_to_save": ["embed_tokens"]},
            0,
        ),
        ({"target_modules": ["embed_tokens"]}, 0),
    ],
)
def test_layers_are_visited_as_far_down_as_gradients_reach(
    checkpoint_of: CheckpointOf, options: dict[str, Any], lowest: int
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    expected = whole_step(whole, batches)
    with streamed_model(checkpoint, **options) as model:
        disturb(model.lora_manager)
        assert_same(streamed_step(model, batches), expected)
        before = model.memory.counters
        assert_same(streamed_step(model, batches), expected)
        assert model.memory.counters.leases - before.leases == 2 * NUM_LAYERS - 1 - lowest
        # Where the backward does not come near the bottom, the order of visits is not known far
        # enough ahead for more.
        fetched = fetched_per_step(NUM_LAYERS, model.memory.num_slots, lowest_trained=lowest)
        assert model.memory.counters.layers_read - before.layers_read <= len(fetched)


def test_a_router_that_trains_whole(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("mixtral")
    batches = micro_batches(3)
    whole = whole_model(checkpoint, modules_to_save=["mlp.gate"])
    disturb(whole)
    with streamed_model(checkpoint, modules_to_save=["mlp.gate"]) as model:
        disturb(model.lora_manager)
        outcome = streamed_step(model, batches)
        assert sum("gate.modules_to_save" in name for name in outcome.gradients) == NUM_LAYERS
        assert_same(outcome, whole_step(whole, batches))


@pytest.mark.sampled(1)
@recomputed_or_not
@pytest.mark.parametrize(
    ("model_type", "linear"), [("gemma4_text", "q_proj"), ("zamba", "in_proj")]
)
def test_embeddings_that_layers_are_given_beside_the_hidden_state(
    tmp_path: Path, model_type: str, linear: str, recompute: bool
) -> None:
    """Their gradients come from every layer that is given them, and from the way through the
    layers.
    """
    published = write_model(tiny_config(model_type), tmp_path / "published")
    streamed = published
    architecture = Architecture(lambda: read_config(published), targets=frozenset({linear}))
    checkpoint = Checkpoint(architecture, published, streamed)
    batches = micro_batches(3)
    options = {"modules_to_save": ["embed_tokens"]}
    whole = whole_model(checkpoint, **options)
    disturb(whole)
    with streamed_model(checkpoint, {"gradient_checkpointing": recompute}, **options) as model:
        disturb(model.lora_manager)
        with model.memory.lease(0) as first:
            _, calls = model.adapter.prelude(batches, first, differentiate=True)
        given = [list(tensors_in((call.args, call.kwargs))) for layer in calls for call in layer]
        assert any(tensor.requires_grad for tensors in given for tensor in tensors)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))
