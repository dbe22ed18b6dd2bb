"""Keys and values that wait in host memory between the chunks of a row: every bit of a step is that
of the same chunks with keys on the device.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from parity import Outcome, assert_same, draw_b, streamed_model, streamed_step
from tiny import ARCHITECTURES, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch import Tensor

from lema.model.sequence import attention, host_keys

CheckpointOf = Callable[..., Checkpoint]

CHUNK = 5


@pytest.fixture(autouse=True, params=[1, 2], ids=["one-block", "two-blocks"])
def small_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of a few tokens have several blocks of keys, and pages of so many blocks."""
    monkeypatch.setattr(attention, "KEYS", 4)
    monkeypatch.setattr(host_keys, "KEYS", 4)
    blocks: int = request.param
    form = host_keys.PageForm
    monkeypatch.setattr(host_keys._HostStates, "_form", lambda self, keys, values: form(
        4 * blocks, tuple((part.shape[1], part.shape[-1], part.dtype) for part in (keys, values))
    ))


def step(checkpoint: Checkpoint, keys_values: str, batches: list[dict[str, Tensor]], **settings: Any) -> Outcome:
    options = {"gradient_checkpointing": True, "sequence_chunk": CHUNK, "keys_values": keys_values}
    with streamed_model(checkpoint, **(options | settings)) as model:
        draw_b(model.lora_manager)
        streamed_step(model, batches)
        return streamed_step(model, batches)


def assert_bitwise(checkpoint: Checkpoint, batches: list[dict[str, Tensor]], **settings: Any) -> None:
    on_device, in_host = (step(checkpoint, place, batches, **settings) for place in ("device", "host"))
    assert_same(in_host, on_device)


@pytest.mark.parametrize("padding", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_no_bit_of_a_step_changes(checkpoint_of: CheckpointOf, name: str, padding: bool) -> None:
    assert_bitwise(checkpoint_of(name), micro_batches(4, padding=padding))
