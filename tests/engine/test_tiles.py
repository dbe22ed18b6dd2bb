"""MLPs and experts that run in tiles of tokens: the loss and every gradient are, to rounding, those
of all tokens at once, whatever else changes how a step is computed.

A product of fewer rows may round otherwise, and gradients of adapters are summed over tiles.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from fulltraining import everything
from parity import (
    Outcome,
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
from torch import Tensor, nn
from trainedways import bare_model

from lema import LemaConfig, LemaModel
from lema.engine.trained_weights import TrainedWeights
from lema.errors import ConfigError

CheckpointOf = Callable[..., Checkpoint]

TILE = 5  # no divisor of the tokens of micro-batches: 24, 18, 28, 14
ROUNDING = 1e-6  # of all gradients together, and of the loss
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]

PARTLY_ADAPTED = pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")


def assert_close(found: Outcome, expected: Outcome, within: float = ROUNDING) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(found.loss, expected.loss) < within
    assert relative_difference(*map(all_formed, (found, expected))) < within
    assert torch.equal(found.generator, expected.generator)


def all_formed(outcome: Outcome) -> Tensor:
    """Return all gradients in one vector, but for those that nothing reaches."""
    formed = [gradient for _, gradient in sorted(outcome.gradients.items()) if gradient is not None]
    return torch.cat([gradient.flatten() for gradient in formed])


def tiled_step(
    checkpoint: Checkpoint,
    batches: list[dict[str, Tensor]],
    *,
    parts: list[str] | None = None,
    seen: Callable[[LemaModel], object] = lambda _: None,
    tile: int | None = TILE,
    **settings: Any,
) -> Outcome:
    """Take a step in tiles. `parts`: what runs in them, of each layer; `seen`: looks at the model
    after it."""
    with streamed_model(checkpoint, mlp_tile_tokens=tile, **settings) as model:
        model.get_trainer()  # which adds the loss of routers, if that is asked for
        draw_b(model.lora_manager)
        outcome = streamed_step(model, batches)
        if parts is not None:
            assert [*model.split.tiles.names().values()] == [parts] * NUM_LAYERS
        seen(model)
    return outcome


# Numbers


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_all_tokens_at_once(
    checkpoint_of: CheckpointOf, name: str, recompute: bool
) -> None:
    checkpoint = checkpoint_of(name)
    batches = micro_batches(4, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    parts = ["mlp.experts" if name == "mixtral" else "mlp"]
    found = tiled_step(checkpoint, batches, parts=parts, gradient_checkpointing=recompute)
    assert_close(found, whole_step(whole, batches))


@PARTLY_ADAPTED
@pytest.mark.parametrize(
    ("model_type", "within"),
    [("gemma3_text", 1), ("qwen3_moe", 1), ("jamba", 1), ("qwen3_next", 2), ("gemma3n_text", 5)],
)
def test_types_whose_layers_differ(model_type: str, within: float, tmp_path: Path) -> None:
    """Norms after the MLP, experts, Mamba 1 and layers that hand on more than the hidden state,
    which sequences in chunks do not take; the last two round more without tiles as well."""
    directory = write_model(tiny_config(model_type), tmp_path)
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    batches = micro_batches(2, padding=True)
    options = {"gradient_checkpointing": True, "lora_target_modules": None}
    expected, found = (
        tiled_step(checkpoint, batches, tile=tile, **options) for tile in (None, TILE)
    )
    assert_close(found, expected, within * ROUNDING)


@pytest.mark.parametrize("tile", [28, 1000])
def test_where_there_are_no_more_tokens_than_a_tile_has_no_bit_changes(
    checkpoint_of: CheckpointOf, tile: int
) -> None:
    checkpoint = checkpoint_of("qwen3")
    batches = micro_batches(4, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    found = tiled_step(checkpoint, batches, tile=tile, parts=None, gradient_checkpointing=True)
    assert_same(found, whole_step(whole, batches))


def test_rows_of_a_pack(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    (batch,) = micro_batches(1)
    batch["position_ids"] = torch.tensor([[*range(7), *range(5)], [*range(4), *range(8)]])
    whole = whole_model(checkpoint)
    draw_b(whole)
    assert_close(tiled_step(checkpoint, [batch], parts=["mlp"]), whole_step(whole, [batch]))


def tile_by_tile(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a module's forward in tiles, written out with autograd's own means."""
    forward = module.forward

    def run(hidden: Tensor) -> Tensor:
        tiles = hidden.flatten(0, 1).split(TILE)
        return torch.cat([forward(tile.unsqueeze(0))[0] for tile in tiles]).view_as(hidden)

    return run


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_dropout_is_that_of_a_model_which_drops_tile_by_tile(
    checkpoint_of: CheckpointOf, recompute: bool
) -> None:
    checkpoint = checkpoint_of("phi3", dropout=0.1)
    (batch,) = micro_batches(1)
    whole = whole_model(checkpoint, dropout=0.2)
    draw_b(whole)
    for layer in whole.get_base_model().get_submodule("model.layers"):
        layer.mlp.forward = tile_by_tile(layer.mlp)
    found = tiled_step(
        checkpoint, [batch], parts=["mlp"], lora_dropout=0.2, gradient_checkpointing=recompute
    )
    assert_close(found, whole_step(whole, [batch]))


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        {"arithmetic": "fast"},
        {"activation_offloading": True, "gradient_checkpointing": False},
        {"boundary_activations": "disk", "head": "stream", "gradient_checkpointing": True},
        {"lora_layers_to_transform": [3, 7], "gradient_checkpointing": True},
        {"lora_target_modules": ["q_proj"], "gradient_checkpointing": True},
        {"sequence_chunk": 6, "gradient_checkpointing": True},
        {"lora_use_dora": True, "gradient_checkpointing": True},
        {"neftune_noise_alpha": 5.0, "strategy": "resident"},
    ],
    ids=lambda settings: "-".join(sorted(settings)),
)
def test_what_else_changes_how_a_step_is_computed(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2, padding=True)
    expected = tiled_step(checkpoint, batches, tile=None, **settings)
    assert_close(tiled_step(checkpoint, batches, parts=["mlp"], **settings), expected)


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_products_in_half_precision(checkpoint_of: CheckpointOf, recompute: bool) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    options = {"gradient_checkpointing": recompute, "autocast": "bfloat16"}
    expected = tiled_step(checkpoint, batches, tile=None, **options)
    found = tiled_step(checkpoint, batches, parts=["mlp"], **options)
    exact = tiled_step(checkpoint, batches, tile=None)
    apart = relative_difference(all_formed(expected), all_formed(exact))
    # Adapters' gradients are summed in single precision, so tiles are as far from it.
    assert relative_difference(all_formed(found), all_formed(exact)) < 1.25 * apart


@pytest.mark.parametrize("targets", [ATTENTION, [*ATTENTION, "experts"]])
def test_a_loss_of_routers(checkpoint_of: CheckpointOf, targets: list[str]) -> None:
    checkpoint = checkpoint_of("mixtral")
    options: dict[str, Any] = {
        "lora_target_modules": ATTENTION,
        "lora_target_parameters": None if "experts" in targets else [],
        "gradient_checkpointing": True,
    }
    batches = micro_batches(4, padding=True)
    seen = list[float]()
    outcomes = []
    for tile in (None, TILE):

        def look(model: LemaModel) -> None:
            seen.append(float(model.adapter.measured["aux_loss"][0]))

        outcomes.append(
            tiled_step(
                checkpoint, batches, tile=tile, router_aux_loss_coef=0.3, seen=look, **options
            )
        )
    expected, found = outcomes
    assert_close(found, expected)
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)


def test_experts_in_groups_run_without_tiles(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("mixtral")
    batches = micro_batches(2)
    options = {
        "lora_target_modules": ATTENTION,
        "experts_per_slot": 2,
        "gradient_checkpointing": True,
    }
    expected, found = (
        tiled_step(checkpoint, batches, tile=tile, **options) for tile in (None, TILE)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_rows_of_a_reference(checkpoint_of: CheckpointOf, objective: str) -> None:
    checkpoint = checkpoint_of("llama")
    batches = parts_of(batch_of(examples(labelled=objective == "kto")), 5, 3)
    options = {"objective": objective, "gradient_checkpointing": True}
    expected = tiled_step(checkpoint, batches, tile=None, **options)
    assert_close(tiled_step(checkpoint, batches, parts=["mlp"], **options), expected)


def test_weights_of_layers_that_train_themselves(checkpoint_of: CheckpointOf) -> None:
    outcomes = []
    for tile in (None, TILE):
        gradients: dict[str, Tensor | None] = {}
        settings: dict[str, object] = {"gradient_checkpointing": True, "mlp_tile_tokens": tile}
        with bare_model(checkpoint_of("qwen3"), settings) as model:
            model.skeleton.train()
            inside = {
                number: [name for name, _ in layer.named_parameters() if everything(name)]
                for number, layer in enumerate(model.split.layers)
            }
            model.skeleton.requires_grad_(False)

            def done(
                layer: int,
                formed: dict[str, Tensor],
                gradients: dict[str, Tensor | None] = gradients,
            ) -> None:
                gradients |= {f"{layer}.{name}": gradient for name, gradient in formed.items()}

            model.adapter.train_weights(TrainedWeights(inside, done))
            loss = model.adapter.loss(micro_batches(2))
            loss.backward()
        outcomes.append(Outcome(loss.detach(), gradients, torch.get_rng_state()))
    expected, found = outcomes
    assert_close(found, expected)


def test_an_evaluation_and_hidden_states(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("mistral")
    batches = micro_batches(2, padding=True)
    results = []
    for tile in (None, TILE):
        with streamed_model(checkpoint, mlp_tile_tokens=tile) as model, torch.no_grad():
            draw_b(model.lora_manager)
            loss, _ = model.adapter.evaluate(batches)
            results.append((loss, *(states[1] for states in model.adapter.hidden_states(batches))))
    for expected, found in zip(*results, strict=True):
        assert relative_difference(found, expected) < ROUNDING


def test_an_adapter_that_comes_later_is_looked_at_anew(checkpoint_of: CheckpointOf) -> None:
    """What works token by token is asked of layers as they are, adapters included."""
    with streamed_model(checkpoint_of("llama"), mlp_tile_tokens=TILE) as model:
        streamed_step(model, micro_batches(1))
        before = model.split.tiles
        model.split.adapters_changed()
        assert model.split.tiles is not before
        assert model.split.tiles.size == TILE
        assert not model.split.tiles.names()
        assert trained(model.lora_manager)


# What is refused


@PARTLY_ADAPTED
def test_a_model_of_which_nothing_works_token_by_token_is_refused(tmp_path: Path) -> None:
    directory = write_model(tiny_config("falcon_mamba"), tmp_path)
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    with pytest.raises(ConfigError, match="works token by token") as refused:
        tiled_step(checkpoint, micro_batches(1), lora_target_modules=None)
    assert refused.value.where == "mlp_tile_tokens"


def test_hooks_that_would_see_tiles_are_refused(checkpoint_of: CheckpointOf) -> None:
    with streamed_model(checkpoint_of("llama"), mlp_tile_tokens=TILE) as model:
        model.split.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp runs in tiles"):
            streamed_step(model, micro_batches(1))


@pytest.mark.parametrize("setting", ["torch_compile", "sequence_parallel"])
def test_settings_that_tiles_have_not_been_tested_with(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"tiles with {setting}"):
        LemaConfig("model", mlp_tile_tokens=TILE, tensor_parallel_size=2, **{setting: True})
