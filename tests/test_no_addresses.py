"""A device whose memory cannot be pointed at: what changes there changes no number."""

from pathlib import Path

import pytest
import torch
from smallrun import adapter_of, batch, opened, settings, write_model
from torch import Tensor

from lema.backend import has_addresses
from lema.stream.leased import Lease


def trained(model: Path, out: Path) -> tuple[dict[str, Tensor], float, int]:
    config = settings(model, out, gradient_checkpointing=True, prefetch_depth=1, save_steps=0)
    with opened(config) as found:
        _, loss = found.get_trainer().train_step(batch(1))
        return adapter_of(found.skeleton), loss, found.memory.counters.bytes_uploaded


def test_a_step_is_the_same_without_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    expected, expected_loss, whole = trained(model, tmp_path / "with")
    monkeypatch.setattr("lema.stream.lease.has_addresses", lambda device: False)
    monkeypatch.setattr("lema.boundaries.has_addresses", lambda device: False)
    monkeypatch.setattr(Lease, "has_address", False)
    monkeypatch.setattr(Lease, "refer", lambda lease, tensor: None)
    found, loss, uploaded = trained(model, tmp_path / "without")
    assert loss == expected_loss
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert uploaded < whole  # what tensors have, and not the page they begin in


def test_who_has_addresses() -> None:
    assert has_addresses(torch.device("cpu")) and has_addresses(torch.device("meta"))
    slot = torch.zeros(8, dtype=torch.uint8)
    assert Lease(0, slot, {}).has_address and Lease(0, slot.to("meta"), {}).has_address
