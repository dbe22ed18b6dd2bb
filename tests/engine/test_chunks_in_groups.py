"""Sequences that go in chunks through layers whose experts are leased in groups: the numbers are
those of whole sequences to rounding, and each group is leased as often.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import opened, write_model
from parity import Outcome, all_gradients, draw_b, relative_difference, streamed_step
from test_expert_groups import ADAPTED, CONFIGS
from tiny import micro_batches
from tinyconfig import tiny_config

from lema import LemaModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:PEFT does not adapt these linear modules",
    "ignore:.*_pattern keys",
)

CHUNK = 4
ROUNDING = 2e-6


def assert_close(found: Outcome, expected: Outcome, within: float = ROUNDING) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(found.loss, expected.loss) < 1e-6
    assert relative_difference(all_gradients(found), all_gradients(expected)) < within


def counted(model: LemaModel, run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return what `run` returns the second time, and what it cost: leases, and bytes."""
    run()
    before = model.memory.counters
    result = run()
    after = model.memory.counters
    names = ("leases", "layers_read", "bytes_read", "bytes_uploaded")
    return result, [getattr(after, name) - getattr(before, name) for name in names]


def compared(
    directory: Path, *, within: float = ROUNDING, padding: bool = True, **settings: Any
) -> list[int]:
    """Take a step on whole sequences and in chunks; return what the second cost."""
    outcomes = []
    costs = []
    for chunk in (None, CHUNK):
        options = {"experts_per_slot": 3, **ADAPTED, **settings}
        with opened(directory, sequence_chunk=chunk, **options) as model:
            model.get_trainer()
            draw_b(model.lora_manager)
            assert model.memory.groups
            batches = micro_batches(3, padding=padding)
            outcome, cost = counted(model, partial(streamed_step, model, batches))
            outcomes.append(outcome)
            costs.append(cost)
    expected, found = outcomes
    assert_close(found, expected, within)
    assert costs[0] == costs[1]
    return costs[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_that_of_whole_sequences_and_leases_as_often(
    kind: str, padding: bool, tmp_path: Path
) -> None:
    directory = write_model(CONFIGS[kind], tmp_path)
    leases, *_ = compared(directory, padding=padding)
    config = CONFIGS[kind]
    num_layers = config.num_hidden_layers
    num_groups = 3 * (num_layers - getattr(config, "first_k_dense_replace", 0))  # 8 experts by 3
    # the top layer is leased once, its groups on the way up and on the way down
    assert leases == 2 * (num_layers + num_groups) - 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next", "granitemoehybrid", "flex_olmo"])
def test_types_whose_layers_differ(model_type: str, tmp_path: Path) -> None:
    """Sinks and windows; states and a shared expert; both kinds of layers; and a layer whose
    backward looks at what its experts have made."""
    config = tiny_config(model_type)
    if model_type == "granitemoehybrid":
        config.layer_types = ["linear_attention", "full_attention"] * (
            config.num_hidden_layers // 2
        )
    # what a delta net rounds has most weight
    compared(write_model(config, tmp_path), within=10 * ROUNDING, experts_per_slot=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"router_aux_loss_coef": 0.3},
        {"boundary_activations": "disk"},
        {"head": "stream"},
        {"lora_layers_to_transform": [5, 6]},
        {"lora_modules_to_save": ["embed_tokens"]},
        {"gradient_checkpointing": True, "arithmetic": "fast"},
    ],
    ids=lambda one: "-".join(one),
)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    compared(write_model(CONFIGS["qwen3_moe"], tmp_path), **settings)


def test_an_evaluation(tmp_path: Path) -> None:
    directory = write_model(CONFIGS["deepseek_v3"], tmp_path)
    losses = []
    for chunk in (None, CHUNK):
        with opened(directory, sequence_chunk=chunk, experts_per_slot=3, **ADAPTED) as model:
            draw_b(model.lora_manager)
            with torch.no_grad():
                loss, _ = model.adapter.evaluate(micro_batches(3, padding=True))
            losses.append(loss)
    assert relative_difference(losses[1], losses[0]) < 1e-6


def test_dropout_is_drawn_again(tmp_path: Path) -> None:
    """The gradient is that of the loss under the same draws, which a step along it shows."""
    directory = write_model(CONFIGS["qwen3_moe"], tmp_path)
    step = 2e-3
    dropout = {"lora_dropout": 0.3}  # of what is no expert
    with opened(directory, sequence_chunk=CHUNK, experts_per_slot=3, **dropout) as model:
        draw_b(model.lora_manager)
        parameters = {n: p for n, p in model.lora_manager.named_parameters() if p.requires_grad}
        outcome = streamed_step(model, micro_batches(1))
        length = all_gradients(outcome).norm()
        losses = []
        for sign in (1, -2):
            with torch.no_grad():
                for name, gradient in outcome.gradients.items():
                    assert gradient is not None
                    parameters[name].add_(gradient, alpha=float(sign * step / length))
            losses.append(float(streamed_step(model, micro_batches(1)).loss))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(length), rel=0.02)
