"""What sequences in chunks are not combined with is said before anything is opened."""

from typing import Any

import pytest

from lema.config import LemaConfig
from lema.errors import ConfigError


@pytest.mark.parametrize(
    "settings",
    [
        {"torch_compile": True},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda one: "-".join(one),
)
def test_a_setting_that_chunks_were_not_tested_with_is_named(settings: dict[str, Any]) -> None:
    LemaConfig("model", **settings)
    with pytest.raises(ConfigError, match="sequences do not go through layers in chunks") as error:
        LemaConfig("model", sequence_chunk=256, **settings)
    assert next(iter(settings)) in str(error.value)


@pytest.mark.parametrize("chunk", [1, 0, -4, "all"])
def test_a_chunk_has_two_tokens_or_more(chunk: object) -> None:
    with pytest.raises(ConfigError):
        LemaConfig("model", sequence_chunk=chunk)


def test_layers_are_recomputed() -> None:
    LemaConfig("model", sequence_chunk=256, boundary_activations="disk")
    LemaConfig("model", sequence_chunk=2, gradient_checkpointing=True)


@pytest.mark.parametrize("other", [{}, {"sequence_chunk": 64, "context_parallel_size": 2}])
def test_keys_and_values_wait_in_host_memory_between_chunks_alone(other: dict[str, Any]) -> None:
    LemaConfig("model", sequence_chunk=64, keys_values="host")
    LemaConfig("model", sequence_chunk="auto", keys_values="host")
    with pytest.raises(ConfigError, match="keys_values"):
        LemaConfig("model", keys_values="host", **other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", float("nan")),
        ("factor", float("inf")),
        ("factor", True),
        ("original_max_position_embeddings", 0),
        ("rope_theta", "x"),
        ("partial_rotary_factor", 7),
        ("mscale", float("nan")),
    ],
)
def test_a_rotary_number_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"number.* as {key}, not"):
        LemaConfig("model", rope_parameters={"rope_type": "yarn", "factor": 4.0, key: value})
