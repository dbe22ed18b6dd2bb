"""Input embeddings in host memory: bitwise the same steps, with rows of the tokens that are there on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from smallrun import settings, write_model
from tiny import ARCHITECTURES, Checkpoint, micro_batches

from lema import LemaModel
from lema.errors import ConfigError
from lema.plan.blueprint import draw_up

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "shared"])
def test_a_step_is_that_of_the_whole_model(checkpoint_of: CheckpointOf, name: str, poison: bool) -> None:
    checkpoint, batches = checkpoint_of(name), micro_batches(3, padding=True)
    whole = whole_model(checkpoint)
    draw_b(whole)
    settings = {"host_embeddings": True, "gradient_checkpointing": True}
    with streamed_model(checkpoint, poison=poison, **settings) as model:
        draw_b(model.lora_manager)
        embeddings = model.skeleton.get_input_embeddings().weight
        for _ in range(2):
            assert_same(streamed_step(model, batches), whole_step(whole, batches))
            assert embeddings.is_meta  # and nothing was put in its place
            assert model.skeleton.get_input_embeddings().weight is embeddings
        found = model.adapter.evaluate(batches)[0]
    with streamed_model(checkpoint, poison=poison) as model:
        draw_b(model.lora_manager)
        assert torch.equal(model.adapter.evaluate(batches)[0], found)


@pytest.mark.slow
def test_the_device_holds_that_much_less_and_the_plan_says_so(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    sizes = {}
    for host in (True, False):
        config = settings(model, tmp_path, host_embeddings=host)
        opened = LemaModel(config)
        sizes[host] = opened.outside_bytes
        assert draw_up(config).outside_bytes == opened.outside_bytes
        if host:
            opened.initialize_lora()
            weight = opened.split.host_rows.nbytes
            assert opened.generate("the miller", max_new_tokens=4)
        opened.close()
    assert 0 <= sizes[False] - sizes[True] - weight < 4096
    assert weight == 300 * 32 * 4


def test_the_host_asks_no_device_for_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a micro-batch's tokens are is known on the host; those that only fill a place are not looked up at all."""
    looked_up: list[int] = []
    with streamed_small(tmp_path) as model:
        rows = model.split.host_rows
        batch = {name: torch.arange(2, 14).reshape(2, 6) for name in ("input_ids", "labels")}
        model.adapter.loss([batch]).backward()  # the first step learns how the model is made
        whole = rows._weight
        rows._weight = Watched(whole, looked_up)
        loss = model.adapter.loss([batch, batch])
        loss.backward()
    assert looked_up == [12, 12]


class Watched:
    """A weight that counts the rows taken of it."""

    def __init__(self, weight: torch.Tensor, taken: list[int]) -> None:
        self.weight, self.taken = weight, taken
        self.shape, self.dtype = weight.shape, weight.dtype

    def index_select(self, dim: int, rows: torch.Tensor) -> torch.Tensor:
        self.taken.append(len(rows))
        return self.weight.index_select(dim, rows)


def streamed_small(tmp_path: Path) -> Any:
    from smallrun import opened

    return opened(settings(write_model(tmp_path / "model"), tmp_path, host_embeddings=True))


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ({"tie_word_embeddings": True}, {}, "they are the head's weight as well"),
        ({}, {"lora_target_modules": ["embed_tokens", "q_proj"]}, "they are trained, or adapted"),
        ({}, {"lora_modules_to_save": ["embed_tokens"]}, "they are trained, or adapted"),
        ({}, {"lora_trainable_token_indices": [1, 2]}, "trains rows of the embeddings"),
    ],
    ids=str,
)
def test_where_they_cannot_it_is_said(tmp_path: Path, model: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    directory = write_model(tmp_path / "model", **model)
    with pytest.raises(ConfigError, match=why) as caught:
        LemaModel(settings(directory, tmp_path, host_embeddings=True, **changes)).initialize_lora()
    assert "host_embeddings" in str(caught.value)
