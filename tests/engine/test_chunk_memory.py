"""What a long row takes on the device: weights, one chunk, and the keys, values and their gradients
of one layer. Hidden states and gradients of the row lie in host memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from meteredstep import device_bytes
from smallrun import settings, write_model
from torch import Tensor

from lema import LemaModel
from lema.activations.boundaries import NUM_BUFFERS
from lema.model.sequence import chunks, host_keys
from lema.storage.spillfile import whole_blocks
from lema_cpu import CpuBackend

HEADS, HEAD_SIZE, HIDDEN, LAYERS = 2, 16, 128, 3
CHUNK = 64


def row_of(length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 290, (1, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def opened_model(tmp_path: Path, chunk: int | None, tier: str, **more: Any) -> LemaModel:
    directory = tmp_path / "model"
    if not directory.exists():
        sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "head_dim": HEAD_SIZE}
        sizes |= {"num_key_value_heads": HEADS, "hidden_size": HIDDEN, "intermediate_size": 256}
        write_model(directory, "llama", dtype=torch.float32, max_position_embeddings=4096, **sizes)
    options: dict[str, Any] = {"sequence_chunk": chunk, "boundary_activations": tier}
    options |= {"loss_chunk_tokens": CHUNK, "max_length": 4096, "gradient_checkpointing": True}
    # whose slots are memory of their own, as a device's are
    backend = CpuBackend(poison=True) if "keys_values" in more else None
    model = LemaModel(settings(directory, tmp_path, **options, **more), backend=backend)
    model.initialize_lora()
    model.skeleton.train()
    model.adapter.loss([row_of(2 * CHUNK)]).backward()
    return model


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_only_keys_values_and_their_gradients_grow_with_a_row(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of which 4 MiB are kept, which is all of rows like these
    monkeypatch.setattr(chunks, "MOST_IN_HOST", 0)
    model = opened_model(tmp_path, CHUNK, tier)
    taken = []
    for length in (512, 1536):
        taken.append(device_bytes(model, [row_of(length)]))
        if tier == "disk":
            # on the way to the disk and back, whatever the length
            on_the_way = NUM_BUFFERS * whole_blocks(CHUNK * HIDDEN * 4)
            assert model.adapter.activations.arena.memory_bytes == on_the_way
    model.close()
    short, long = taken
    per_token = 2 * HEADS * HEAD_SIZE * (4 + 4)
    assert (long - short) / 1024 == pytest.approx(per_token, rel=0.05)


def test_nothing_grows_where_keys_and_values_wait_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 256 tokens, of which a few are there."""
    monkeypatch.setattr(chunks, "MOST_IN_HOST", 0)
    monkeypatch.setattr(host_keys, "PAGE_BYTES", 0)
    model = opened_model(tmp_path, CHUNK, "host", keys_values="host")
    short, long = (device_bytes(model, [row_of(length)]) for length in (1024, 2048))
    keys = model.adapter.engine.host_keys
    assert keys is not None
    held = sum(len(page) for pages in keys.store._free.values() for page in pages)
    model.close()
    per_token = 2 * HEADS * HEAD_SIZE * (4 + 4)
    # ids, labels and what is made of them: five integers
    assert (long - short) / 1024 <= 5 * 8
    assert held == 2048 * per_token


def test_a_long_row_takes_an_eighth_of_what_it_takes_at_once(tmp_path: Path) -> None:
    taken = []
    for chunk in (None, CHUNK):
        model = opened_model(tmp_path, chunk, "host")
        taken.append(device_bytes(model, [row_of(2048)]))
        model.close()
    at_once, in_chunks = taken
    assert 8 * in_chunks < at_once


def test_the_room_of_a_step_is_that_of_the_next(tmp_path: Path) -> None:
    model = opened_model(tmp_path, CHUNK, "host")
    pool = model.adapter.activations.pool
    addresses = []
    for _ in range(2):
        model.adapter.loss([row_of(512)]).backward()
        addresses.append({memory.data_ptr() for memory in pool._free})
    model.close()
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 2  # the input and the output of a layer
