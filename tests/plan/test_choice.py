"""What the settings leave open is tried in one order, and what is chosen can be chosen otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hollowmodel import write_hollow
from transformers import LlamaConfig, MixtralConfig

from lema import LemaConfig
from lema.errors import ConfigError
from lema.plan.blueprint import draw_up
from lema.plan.choice import Choice, candidates, choice_of, cut
from lema.plan.machine import machine_state_of, profile
from lema.plan.needs import Planner
from lema.plan.work.step import step_shape

ROWS = 4
LENGTH = 512
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1 << 19,  # so many that a head is cut unasked
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def uncut(config: LemaConfig) -> Planner:
    """Return the planner of a model, for which nothing is chosen yet."""
    blueprint = draw_up(config, elsewhere=True)
    state = machine_state_of(config, profile("4090"))
    planner = Planner(config, blueprint, state, None, None, step_shape(config, LENGTH))
    return replace(planner, workload=planner.work(planner.shape.micro_batch))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(tmp_path_factory.mktemp("dense") / "model", LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = MixtralConfig(**SIZES | {"vocab_size": 96}, num_local_experts=4, num_experts_per_tok=2)
    return write_hollow(tmp_path_factory.mktemp("mixture") / "model", config)


def settings(directory: Path, **changes: Any) -> LemaConfig:
    shape = {"batch_size": ROWS, "max_length": LENGTH, "device_memory": "1GB", "lora_rank": 2}
    return LemaConfig(str(directory), device="cpu", **shape | changes)


def test_fewer_rows_come_before_fewer_logits_and_a_whole_head_before_pieces(dense: Path) -> None:
    whole = [
        Choice(4, None),
        Choice(2, None),
        Choice(1, None),
        *(Choice(rows, 256) for rows in (4, 2, 1)),
        *(Choice(rows, 64) for rows in (4, 2, 1)),
    ]
    tried = list(candidates(uncut(settings(dense))))
    assert tried[: len(whole)] == whole
    assert all(choice.head_in_pieces for choice in tried[len(whole) :])
    assert tried[len(whole)] == Choice(4, None, head_in_pieces=True)


def test_rows_of_fewer_tokens_than_are_enough_are_tried_last(dense: Path) -> None:
    tried = [
        (choice.rows, choice.chunk_tokens)
        for choice in candidates(uncut(settings(dense, max_length=256, head="device")))
    ]
    assert tried[:2] == [(4, None), (2, None)]
    assert tried.index((1, None)) > tried.index((2, 64))


def test_what_the_settings_say_is_not_chosen(dense: Path) -> None:
    said = {"micro_batch_size": 2, "loss_chunk_tokens": 128, "head": "stream"}
    planner = uncut(settings(dense, **said))
    assert list(candidates(planner)) == [Choice(2, 128, head_in_pieces=True)]


def test_groups_of_experts_come_last_and_the_largest_of_them_first(mixture: Path) -> None:
    config = settings(mixture, experts_per_slot="auto", micro_batch_size=1, loss_chunk_tokens=64)
    tried = [(choice.experts, choice.runs_again) for choice in candidates(uncut(config))]
    assert tried == [(0, False), (2, False), (1, False), (2, True), (1, True)]


def test_groups_that_nothing_else_goes_with_are_refused(mixture: Path) -> None:
    config = settings(mixture, experts_per_slot=2, objective="dpo")
    with pytest.raises(ConfigError, match="objective: dpo has other rows"):
        list(candidates(uncut(config)))


def test_rows_in_chunks_are_offered_groups_of_experts_last(mixture: Path) -> None:
    config = settings(mixture, experts_per_slot="auto", sequence_chunk=64, micro_batch_size=1)
    tried = list(candidates(uncut(config)))
    assert tried[0] == Choice(1, None, chunk=64)
    in_groups = [bool(choice.experts) for choice in tried]
    assert any(in_groups) and in_groups == sorted(in_groups)


def test_a_choice_can_be_taken_back(dense: Path) -> None:
    planner = uncut(settings(dense))
    whole = cut(planner, Choice(4, None))
    pieces = cut(whole, Choice(2, 64, head_in_pieces=True))
    head = planner.blueprint.head.nbytes
    assert whole.blueprint.outside_bytes == planner.blueprint.outside_bytes + head
    assert pieces.blueprint.outside_bytes == planner.blueprint.outside_bytes
    assert pieces.blueprint.pieces and choice_of(pieces) == Choice(2, 64, head_in_pieces=True)
    assert pieces.demand().working_bytes < whole.demand().working_bytes
    again = cut(pieces, Choice(4, None))
    assert again.demand() == whole.demand()
    assert choice_of(again) == Choice(4, None)
