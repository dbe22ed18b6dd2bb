"""A device whose memory cannot be pointed at: what changes there changes no number."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import adapter_of, batch, opened, settings, write_model
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from lema import LemaConfig
from lema.backend.registry import has_addresses
from lema.engine.optim import make_optimizer
from lema.model import Split
from lema.model.capture import has_values, values_unread
from lema.stream import Lease
from lema.stream.counters import StreamCounters


def trained(model: Path, out: Path) -> tuple[dict[str, Tensor], float, StreamCounters]:
    config = settings(model, out, gradient_checkpointing=True, prefetch_depth=1, save_steps=0)
    with opened(config) as found:
        _, loss = found.get_trainer().train_step(batch(1))
        return adapter_of(found.skeleton), loss, found.memory.counters


def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU have no addresses; masks are made as they are, whose values change how
    attention rounds.
    """
    for module in (
        "stream.layouts",
        "activations.boundaries",
        "model.split",
        "engine.optim",
        "model.outer_weights",
        "model.row_tables",
    ):
        monkeypatch.setattr(f"lema.{module}.has_addresses", lambda device: False)
    monkeypatch.setattr("lema.model.split.values_unread", nullcontext)
    monkeypatch.setattr(Lease, "has_address", False)
    monkeypatch.setattr(Lease, "refer", lambda lease, tensor: None)


def test_a_step_is_the_same_without_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    expected, expected_loss, _ = trained(model, tmp_path / "with")
    lazy(monkeypatch)
    found, loss, counters = trained(model, tmp_path / "without")
    assert loss == expected_loss
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # what tensors have, and not the page they begin in
    assert counters.bytes_uploaded < counters.bytes_read


def test_what_layers_return_is_learnt_from_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(monkeypatch)
    ids = {"input_ids": torch.ones(2, 12, dtype=torch.long)}
    with opened(settings(write_model(tmp_path / "model"), tmp_path / "out", save_steps=0)) as model:
        tensors = {
            name: id(one)
            for name, one in (*model.skeleton.named_parameters(), *model.skeleton.named_buffers())
        }
        expected = Split(model.skeleton, model.backend)
        expected.lazy = False
        assert not expected.has_learned(ids)
        computed: list[Tensor] = []
        with monkeypatch.context() as watched:
            watched.setattr(Split, "_learn", noting(Split._learn, computed))
            for training in (True, False):
                model.skeleton.train(training)
                assert model.split.has_learned(ids)
        assert len(computed) == 6 and not any(map(has_values, computed))
        again = {
            name: id(one)
            for name, one in (*model.skeleton.named_parameters(), *model.skeleton.named_buffers())
        }
        assert again == tensors  # each is where it was


def noting(learn: Callable[..., None], computed: list[Tensor]) -> Callable[..., None]:
    """Note what a model is given, and has, while it is learnt."""

    def noted(split: Split, few: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        computed.extend(
            [
                few["input_ids"],
                next(iter(weights.values())),
                split.model.get_input_embeddings().weight,
            ]
        )
        learn(split, few, weights)

    return noted


def test_a_model_that_looks_at_values_is_learnt_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(monkeypatch)
    config = settings(write_model(tmp_path / "model"), tmp_path / "out", save_steps=0)
    with opened(config) as model:
        forward = type(model.skeleton).forward

        def looks(self: Any, input_ids: Tensor, **more: Any) -> Any:
            assert int(input_ids.max()) >= 0
            return forward(self, input_ids, **more)

        monkeypatch.setattr(type(model.skeleton), "forward", looks)
        assert not model.split.has_learned({"input_ids": torch.ones(2, 12, dtype=torch.long)})
        assert model.get_trainer().train_step(batch(1))[1] > 0


def test_a_mask_is_made_whatever_its_values() -> None:
    config = LlamaConfig(attn_implementation="sdpa")
    states = torch.zeros(1, 4, 8)
    given: dict[str, Any] = {"config": config, "inputs_embeds": states, "cache": None}
    given["attention_mask"] = torch.ones(1, 4, dtype=torch.long)
    assert create_causal_mask(**given) is None
    with values_unread():
        made = create_causal_mask(**given)
    assert made is not None and torch.equal(made[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert create_causal_mask(**given) is None


def test_layers_are_recomputed_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy(monkeypatch)
    config = settings(
        write_model(tmp_path / "model"),
        tmp_path / "out",
        save_steps=0,
        gradient_checkpointing=False,
    )
    with (
        opened(config) as model,
        pytest.warns(UserWarning, match="gradient_checkpointing: false does nothing"),
    ):
        assert model.adapter.activations.recompute and not model.adapter.activations.saved


def test_the_first_update_is_that_of_a_state_made_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stepped() -> tuple[Tensor, int]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = make_optimizer([parameter], LemaConfig("model", weight_decay=0.1))
        known = len(optimizer.state)
        for _ in range(2):
            parameter.grad = torch.linspace(1, 2, 7)
            optimizer.step()
        return parameter.detach(), known

    expected, none = stepped()
    monkeypatch.setattr("lema.engine.optim.has_addresses", lambda device: False)
    found, one = stepped()
    assert torch.equal(found, expected) and (none, one) == (0, 1)


def test_who_has_addresses() -> None:
    assert has_addresses(torch.device("cpu")) and has_addresses(torch.device("meta"))
    slot = torch.zeros(8, dtype=torch.uint8)
    assert Lease(0, slot, {}).has_address and Lease(0, slot.to("meta"), {}).has_address
