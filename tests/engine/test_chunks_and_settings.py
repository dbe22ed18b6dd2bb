"""Sequences in chunks together with what else changes how a step is computed: the loss and every
gradient are, to rounding, those of whole sequences with the same settings.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    Outcome,
    all_gradients,
    draw_b,
    relative_difference,
    streamed_model,
    streamed_step,
)
from smallrun import logged, opened, settings, token_rows
from tiny import NUM_LAYERS, Checkpoint, micro_batches

from lema.errors import ConfigError
from lema.train.model import LemaModel

CheckpointOf = Callable[..., Checkpoint]

CHUNK = 4
ROUNDING = 2e-6


def assert_close(found: Outcome, expected: Outcome) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(found.loss, expected.loss) < 1e-6
    assert relative_difference(all_gradients(found), all_gradients(expected)) < ROUNDING


def compared(
    checkpoint: Checkpoint,
    *,
    seen: Callable[[LemaModel], object] = lambda _: None,
    padding: bool = True,
    **changes: Any,
) -> tuple[Outcome, list[object]]:
    """Take a step without chunks and with them; return the second, and what was seen of each."""
    outcomes = list[Outcome]()
    looks = list[object]()
    for chunk in (None, CHUNK):
        options = {"gradient_checkpointing": True, "sequence_chunk": chunk, **changes}
        with streamed_model(checkpoint, **options) as model:
            model.get_trainer()
            draw_b(model.lora_manager)
            outcomes.append(streamed_step(model, micro_batches(4, padding=padding)))
            looks.append(seen(model))
    expected, found = outcomes
    assert_close(found, expected)
    return found, looks


# Routers

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("padding", [False, True])
def test_a_loss_of_routers(checkpoint_of: CheckpointOf, padding: bool) -> None:
    options: dict[str, Any] = {"lora_target_modules": ATTENTION, "padding": padding}

    def measured(model: LemaModel) -> float:
        total, count = model.adapter.measured["aux_loss"]
        return float(total) / count

    found, looks = compared(
        checkpoint_of("mixtral"), seen=measured, router_aux_loss_coef=0.3, **options
    )
    assert looks[0] == pytest.approx(looks[1], rel=1e-6)
    without, _ = compared(checkpoint_of("mixtral"), **options)
    assert relative_difference(all_gradients(found), all_gradients(without)) > 1e-2


def test_a_loss_of_routers_where_only_upper_layers_train(checkpoint_of: CheckpointOf) -> None:
    compared(
        checkpoint_of("mixtral"),
        router_aux_loss_coef=0.3,
        lora_target_modules=ATTENTION,
        lora_layers_to_transform=[4, 9],
    )


def test_a_loss_of_routers_with_a_head_in_pieces(checkpoint_of: CheckpointOf) -> None:
    compared(
        checkpoint_of("mixtral"),
        router_aux_loss_coef=0.3,
        lora_target_modules=ATTENTION,
        head="stream",
    )


# How a layer computes


def test_linears_that_share_an_input_multiply_together(checkpoint_of: CheckpointOf) -> None:
    def groups(model: LemaModel) -> list[list[int]]:
        return [
            sorted(len(group) for group in set((sharing._groups or {}).values()))
            for sharing in model.split.attached.sharing.values()
        ]

    _, looks = compared(checkpoint_of("llama"), seen=groups, arithmetic="fast")
    assert looks[0] == looks[1] == [[1, 1, 2, 3]] * NUM_LAYERS


def test_noise_goes_by_the_whole_sequence(checkpoint_of: CheckpointOf) -> None:
    found, _ = compared(checkpoint_of("llama"), neftune_noise_alpha=5.0)
    without, _ = compared(checkpoint_of("llama"))
    assert relative_difference(found.loss, without.loss) > 1e-3


@pytest.mark.parametrize(
    "more",
    [{}, {"activation_offloading": True}, {"lora_dropout": 0.0, "head": "stream"}],
    ids=["kept", "offloaded", "head"],
)
def test_layers_are_recomputed_although_they_are_to_keep_their_graphs(
    checkpoint_of: CheckpointOf, more: dict[str, Any]
) -> None:
    def leases(model: LemaModel) -> int:
        return model.memory.counters.leases

    _, looks = compared(
        checkpoint_of("llama"), seen=leases, gradient_checkpointing=False, padding=True, **more
    )
    assert looks[0] == looks[1]


def test_where_no_row_is_longer_than_a_chunk_graphs_are_kept(checkpoint_of: CheckpointOf) -> None:
    outcomes = []
    for chunk in (None, 14):
        with streamed_model(
            checkpoint_of("llama"),
            gradient_checkpointing=False,
            sequence_chunk=chunk,
            max_length=14,
        ) as model:
            draw_b(model.lora_manager)
            assert not model.adapter.activations.recompute
            outcomes.append(streamed_step(model, micro_batches(4)))
    expected, found = outcomes
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(all_gradients(found), all_gradients(expected))


# The prefix that is frozen


def test_later_epochs_leave_frozen_layers_out(llama: Path, tmp_path: Path) -> None:
    rows = token_rows(8)
    logs = []
    leases = []
    for name, chunk, cached in (("whole", None, True), ("all", 4, False), ("cached", 4, True)):
        config = settings(
            llama,
            tmp_path / name,
            lora_layers_to_transform=[5, 6, 7],
            num_train_epochs=3,
            max_steps=None,
            batch_size=4,
            sequence_chunk=chunk,
            cache_frozen_prefix=cached,
            shuffle=False,
        )
        with opened(config) as model:
            model.get_trainer().fit(rows)
            leases.append(model.memory.counters.leases)
        logs.append([*logged(config, "loss").values()])
    whole, every, cached_losses = logs
    assert cached_losses == every
    assert cached_losses == pytest.approx(whole, rel=1e-5)
    assert leases[2] == leases[0] < leases[1]


def test_what_is_refused_says_why(checkpoint_of: CheckpointOf) -> None:
    refused = pytest.raises(ConfigError, match="torch_compile")
    with refused, streamed_model(checkpoint_of("llama"), sequence_chunk=CHUNK, torch_compile=True):
        pass
