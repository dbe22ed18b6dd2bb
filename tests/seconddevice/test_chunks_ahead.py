"""Rows in chunks on a device with memory of its own: copies of the next chunk are queued before the
compute of the present one, nothing is read before it is there, and only keys, values and their
gradients grow on the device with the length of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from seconddevice import SecondDevice
from seconddevice.backend import SecondBackend
from seconddevice.steps import WITHIN, by_turns, on_both, opened, take
from smallrun import write_model
from tiny import Checkpoint, micro_batches
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lema.backend import DeviceSlots, Download, SlotLayout, Upload
from lema.model import Split
from lema.model.sequence import chunks

CheckpointOf = Callable[..., Checkpoint]

WAYS: dict[str, dict[str, Any]] = {
    "host": {"boundary_activations": "host"},
    "disk": {"boundary_activations": "disk"},
    "disk, padding": {"boundary_activations": "disk"},
    "host, padding": {"boundary_activations": "host"},
    "host, a prompt that rows share": {"boundary_activations": "host"},
    "disk, a prompt that rows share": {"boundary_activations": "disk"},
}


@pytest.mark.parametrize(("name", "seed"), by_turns(WAYS))
def test_rows_in_chunks_are_the_cpus(
    checkpoint_of: CheckpointOf, second: SecondDevice, tmp_path: Path, name: str, seed: int | None
) -> None:
    settings = {"offload_dir": str(tmp_path), "sequence_chunk": 4, **WAYS[name]}
    batches = micro_batches(3, padding="padding" in name)
    if "prompt" in name:
        for batch in batches:
            batch["input_ids"][:, :6] = batch["input_ids"][0, :6]
            batch["input_ids"][:, 6] = torch.arange(3, 3 + len(batch["input_ids"]))
            batch["labels"] = batch["input_ids"].clone()
    with second.course(seed):
        on_device, on_cpu = on_both(checkpoint_of("llama").streamed, batches, steps=2, **settings)
    assert on_device.distance(on_cpu) < WITHIN


class Watching(SecondBackend):
    """Notes what is queued: copies of chunks to the device and from there."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return _WatchedSlots(self.events, super().device_slots(nbytes, count), nbytes)

    def download(self, source: Tensor, target: Tensor) -> Download:
        self.events.append("download")
        return super().download(source, target)


class _WatchedSlots:
    def __init__(self, events: list[str], slots: DeviceSlots, nbytes: int) -> None:
        self.events = events
        self.slots = slots
        self.nbytes = nbytes

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        if self.nbytes == CHUNK_BYTES:
            self.events.append("upload")
        return self.slots.upload(source, layout)


COMPUTED = ("compute", "differentiate")
HIDDEN, CHUNK, LAYERS = 128, 32, 3
CHUNK_BYTES = CHUNK * HIDDEN * 4
HEADS, HEAD_SIZE = 2, 16


def row_of(length: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 290, (1, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "head_dim": HEAD_SIZE}
    sizes |= {"num_key_value_heads": HEADS, "hidden_size": HIDDEN, "intermediate_size": 256}
    directory = tmp_path / "model"
    write_model(directory, "llama", dtype=torch.float32, max_position_embeddings=4096, **sizes)
    return directory


def settings_of(tier: str, directory: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"sequence_chunk": CHUNK, "boundary_activations": tier}
    options |= {"loss_chunk_tokens": CHUNK, "max_length": 4096}
    return options | {"offload_dir": str(directory)}


def test_copies_are_queued_before_the_compute_beside_which_they_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way up a copy of the next chunk; on the way down of inputs, and of gradients."""
    events = list[str]()
    run_layer = Split.run_layer

    def noted(split: Split, *args: Any, **options: Any) -> Tensor:
        events.append("differentiate" if torch.is_grad_enabled() else "compute")
        return run_layer(split, *args, **options)

    backend = Watching(events)
    with opened(model, "second", backend, **settings_of("host", tmp_path)) as streamed:
        take(streamed, row_of(8 * CHUNK))
        monkeypatch.setattr(Split, "run_layer", noted)
        events.clear()
        streamed.adapter.loss(row_of(8 * CHUNK)).backward()
    # queued before each computation since the layer began: its own chunk, and the next one
    first_layer = _queued_before(events[: _place(events, 8)])
    assert list(accumulate(first_layer)) == [2, 3, 4, 5, 6, 7, 8, 8]
    # the input is two chunks ahead then, and the gradient one
    last_layer = _queued_before(events[_place(events, -8) :])
    assert last_layer == [last_layer[0], 2, 2, 2, 2, 2, 1, 0]
    assert last_layer[0] >= 2


def _place(events: list[str], count: int) -> int:
    """Return where what comes after so many computations begins; negative: counted from behind."""
    computed = [number for number, event in enumerate(events) if event in COMPUTED]
    return computed[count - 1] + 1


def _queued_before(events: list[str]) -> list[int]:
    """Return how many uploads are queued before each computation since the one before."""
    counts = [0]
    for event in events:
        if event in COMPUTED:
            counts.append(0)
        counts[-1] += event == "upload"
    return counts[:-1]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_only_keys_values_and_their_gradients_grow_on_the_device(
    model: Path, second: SecondDevice, tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MOST_IN_HOST", 0)
    peaks = []
    with (
        opened(model, "second", **settings_of(tier, tmp_path)) as streamed,
        sdpa_kernel(SDPBackend.MATH),
    ):
        for length in (512, 1024):
            take(streamed, row_of(length))
            before = second.used
            second.reset_peak()
            take(streamed, row_of(length))
            peaks.append(second.peak - before)
    ids_and_labels = 2 * 8
    per_token = 2 * HEADS * HEAD_SIZE * (4 + 4) + ids_and_labels
    assert (peaks[1] - peaks[0]) / 512 == pytest.approx(per_token, rel=0.05)
