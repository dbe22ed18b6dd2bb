"""What a plan tells of keys and values that wait in host memory, and when it chooses that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hollowmodel import write_hollow
from meteredstep import device_bytes
from test_auto_chunk import planned
from test_chunk_work import CHUNK, LENGTH, config_of, demand_told, told_of
from transformers import LlamaConfig

from lema import LemaModel
from lema.errors import ConfigError, MemoryLimitError
from lema.model.sequence import host_keys

ROW = 16384
KEY_BYTES = 2 * 2 * 32 * 4  # of keys and values of a token, in fp32


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values are what a long row takes most of."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    shape = LlamaConfig(vocab_size=96, max_position_embeddings=ROW, **sizes | heads)
    shape.dtype = torch.bfloat16
    return write_hollow(tmp_path_factory.mktemp("hollow"), shape)


def test_a_step_takes_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keys, "PAGE_BYTES", 0)
    config = config_of(tmp_path, CHUNK).model_copy(
        update={"boundary_activations": "host", "keys_values": "host"}
    )
    told = told_of(config, "host")
    model = LemaModel(config)
    model.initialize_lora()
    model.skeleton.train()
    ids = torch.randint(1, 290, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    model.adapter.loss(batches).backward()
    taken = device_bytes(model, batches)
    keys = model.adapter.engine.host_keys
    assert keys is not None
    held = sum(len(page) for pages in keys.store._free.values() for page in pages)
    model.close()
    # On the CPU a page that comes is the host's own: of keys two come at a time, and of sums.
    pages = 4 * demand_told(config).paged_bytes // (2 * LENGTH // host_keys.KEYS)
    assert 0.95 * taken <= told <= 1.05 * taken + pages
    # all pages of keys, values and sums; a few of so short a row never leave the device
    assert held <= demand_told(config).paged_bytes == 2 * KEY_BYTES * LENGTH
    on_device = config.model_copy(update={"keys_values": "device"})
    assert told < told_of(on_device, "host")


def test_they_wait_in_host_memory_if_a_step_fits_only_so(hollow: Path) -> None:
    options: dict[str, Any] = {"sequence_chunk": 1024}
    _, planner = planned(hollow, "2GB", **options)
    assert not planner.shape.micro_batch.host_keys
    assert planner.chosen["keys_values"] == "device"
    bare, _ = planned(hollow, None, keys_values="device", **options)
    needed = sum(bare.memory.device.values())
    keys_bytes = 2 * 16 * 64 * (2 + 4) * ROW
    limit = f"{(needed - keys_bytes // 2) // 1000}KB"
    plan, planner = planned(hollow, limit, **options)
    assert planner.shape.micro_batch.host_keys
    assert planner.chosen["keys_values"] == "host"
    assert plan.memory.host["keys"] == keys_bytes
    said = "keys and values of a layer wait in host memory, block by block"
    assert any(said in note for note in plan.notes)
    with pytest.raises(MemoryLimitError, match="device memory"):
        planned(hollow, limit, keys_values="device", **options)


def test_a_smaller_chunk_is_chosen_before_that(hollow: Path) -> None:
    fits = planned(hollow, None, sequence_chunk=256, keys_values="device")[0]
    limit = f"{sum(fits.memory.device.values()) // 1000 + 1000}KB"
    plan, _ = planned(hollow, limit)
    assert plan.micro_batch.chunk == 256
    assert not plan.micro_batch.host_keys


def test_attention_that_is_not_in_blocks_is_refused_and_never_chosen(hollow: Path) -> None:
    options: dict[str, Any] = {"sequence_chunk": 1024, "attn_implementation": "eager"}
    with pytest.raises(ConfigError, match="keys and values cannot wait in host memory"):
        planned(hollow, None, keys_values="host", **options)
    with pytest.raises(MemoryLimitError, match="device memory"):
        planned(hollow, "150MB", **options)
