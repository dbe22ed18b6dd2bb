"""What plans know of MLPs in tiles: what a layer keeps, what tiles cost, and when they are chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hollowmodel import write_hollow
from transformers import FalconMambaConfig, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from lema import LemaConfig
from lema.errors import ConfigError, MemoryLimitError
from lema.plan import make_plan
from lema.plan.blueprint import draw_up
from lema.plan.machine import profile
from lema.plan.plan import Plan
from lema.plan.planner import Planner
from lema.plan.work.workload import LayerWork, MicroBatch, measure

TOKENS = 8192
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1}  # 8B
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def hollow(directory: Path, make: Callable[..., PreTrainedConfig], **sizes: Any) -> Path:
    config = make(vocab_size=96, max_position_embeddings=16384, **sizes)
    config.dtype = torch.bfloat16
    return write_hollow(directory / make.__name__, config)


def layers_of_8b(
    directory: Path, make: Callable[..., PreTrainedConfig]
) -> tuple[LayerWork, LayerWork]:
    """Return what a layer of an 8B model costs with all tokens at once, and in tiles of 1,024."""
    drawn = draw_up(LemaConfig(str(hollow(directory, make, **SIZES, **HEADS)), device="cpu"))
    batches = [MicroBatch(1, TOKENS), MicroBatch(1, TOKENS, tile=1024)]
    at_once, in_tiles = (
        measure(drawn.model, drawn.layers, batch, 256, split=drawn.split).of(0) for batch in batches
    )
    return at_once, in_tiles


def operations(work: LayerWork) -> int:
    return work.forward + work.recompute + work.backward


@pytest.mark.parametrize(
    ("make", "kept", "more"),
    [(LlamaConfig, (213.7, 98.7), 1.065), (Gemma3TextConfig, (267.1, 152.1), 1.185)],
)
def test_what_a_layer_of_8b_keeps_of_a_token_and_what_tiles_cost(
    tmp_path: Path,
    make: Callable[..., PreTrainedConfig],
    kept: tuple[float, float],
    more: float,
) -> None:
    """Gemma's norm after the MLP needs what that has made, so it runs once more."""
    at_once, in_tiles = layers_of_8b(tmp_path, make)
    kilobytes = [work.saved_bytes / TOKENS / 1000 for work in (at_once, in_tiles)]
    assert kilobytes == pytest.approx(kept, rel=0.001)
    assert operations(in_tiles) / operations(at_once) == pytest.approx(more, rel=0.002)


SMALL = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 4}


def planned(directory: Path, limit: str | None, **changes: Any) -> tuple[Plan, Planner]:
    options: dict[str, Any] = {"max_length": 4096, "micro_batch_size": 1, "batch_size": 1}
    options |= {"mlp_tile_tokens": "auto", "gradient_checkpointing": True, "device_memory": limit}
    config = LemaConfig(str(directory), device="cpu", **options | changes)
    return make_plan(config, profile("4090"))


def fits(directory: Path, limit: str, tile: int | None) -> bool:
    try:
        planned(directory, limit, mlp_tile_tokens=tile)
    except MemoryLimitError:
        return False
    return True


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return hollow(tmp_path_factory.mktemp("hollow"), LlamaConfig, **SMALL, **heads)


def test_there_are_no_tiles_where_a_step_fits_without(small: Path) -> None:
    plan, planner = planned(small, "auto")
    assert plan.micro_batch.tile is None
    assert planner.chosen["mlp_tile_tokens"] is None
    assert not any("mlp_tile_tokens" in note for note in plan.notes)


def test_tiles_are_the_largest_power_of_two_that_fits(small: Path) -> None:
    limit = "150MB"
    plan, planner = planned(small, limit)
    tile = plan.micro_batch.tile
    assert tile is not None
    assert tile & (tile - 1) == 0
    assert not fits(small, limit, None)
    assert fits(small, limit, tile)
    assert tile == 2048 or not fits(small, limit, 2 * tile)
    assert planner.chosen["mlp_tile_tokens"] == tile
    assert sum(plan.memory.device.values()) <= 150e6
    (note,) = (note for note in plan.notes if "mlp_tile_tokens" in note)
    assert f"{tile:,} at a time go through mlp of 4 layers" in note


def test_sequences_are_cut_only_where_tiles_are_not_enough(small: Path) -> None:
    options = {"sequence_chunk": "auto", "boundary_activations": "host"}
    plan, _ = planned(small, "150MB", **options)
    assert plan.micro_batch.tile is not None
    assert plan.micro_batch.chunk is None
    plan, planner = planned(small, "60MB", **options)
    assert plan.micro_batch.chunk is not None
    assert planner.chosen["mlp_tile_tokens"] is None


def test_of_a_model_without_such_modules_a_number_is_refused_and_auto_has_none(
    tmp_path: Path,
) -> None:
    directory = hollow(tmp_path, FalconMambaConfig, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="works token by token"):
        planned(directory, None, mlp_tile_tokens=16, max_length=32)
    with pytest.raises(MemoryLimitError):
        planned(directory, "1MB", max_length=260)
