"""What `context_parallel_size` is not combined with is refused before anything is opened."""

from typing import Any

import pytest

from lema import LemaConfig
from lema.errors import ConfigError


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "dpo"},
        {"gradient_checkpointing": False},
        {"torch_compile": True},
        {"arithmetic": "fast"},
        {"tensor_parallel_size": 2},
        {"experts_per_slot": 2},
        {"cache_frozen_prefix": True, "shuffle": False},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_needs_whole_rows_or_has_not_been_tested(settings: dict[str, Any]) -> None:
    (name, *_) = settings
    with pytest.raises(ConfigError, match=f"are not divided over processes with {name}"):
        LemaConfig("model", context_parallel_size=2, **settings)


def test_one_process_is_no_division() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size"):
        LemaConfig("model", context_parallel_size=1)


def test_it_goes_with_chunks_and_shared_weights() -> None:
    LemaConfig("model", context_parallel_size=2, sequence_chunk=64, shard_weights=True)
