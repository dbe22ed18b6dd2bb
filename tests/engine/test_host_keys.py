"""Keys and values that wait in host memory between the chunks of a row: every bit of a step is that
of the same chunks with keys on the device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from parity import Outcome, assert_same, draw_b, streamed_model, streamed_step
from preferences import batch_of, examples, parts_of
from tiny import ARCHITECTURES, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch import Tensor

from lema.errors import ConfigError
from lema.model.sequence import attention, host_keys
from lema.model.sequence.host_keys import HostKeys

CheckpointOf = Callable[..., Checkpoint]
Batches = list[dict[str, Tensor]]

BLOCK = 4  # keys; rows of a dozen tokens have several blocks then
CHUNK = 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEYS", BLOCK)
    monkeypatch.setattr(host_keys, "KEYS", BLOCK)
    monkeypatch.setattr(host_keys, "PAGE_BYTES", 0)  # a block is the least


def step(checkpoint: Checkpoint, place: str, batches: Batches, **settings: Any) -> Outcome:
    options = {"gradient_checkpointing": True, "sequence_chunk": CHUNK, "keys_values": place}
    with streamed_model(checkpoint, **(options | settings)) as model:
        draw_b(model.lora_manager)
        if place == "host":
            keys = model.adapter.engine.host_keys
            assert keys is not None
            streamed_step(model, batches)
            assert keys.store.bytes_up and keys.store.bytes_down
            poison(keys)
        return streamed_step(model, batches)


def poison(keys: HostKeys) -> None:
    """Let what a step has left in host memory be found by nobody."""
    free = [page for pages in keys.store._free.values() for page in pages]
    assert free
    for page in free:
        page.fill_(0xFF)


def assert_bitwise(checkpoint: Checkpoint, batches: Batches, **settings: Any) -> None:
    on_device, in_host = (
        step(checkpoint, place, batches, **settings) for place in ("device", "host")
    )
    assert_same(in_host, on_device)


@pytest.mark.parametrize(
    ("name", "padding"), [("llama", True), ("qwen3", False), ("mistral", False), ("mistral", True)]
)
def test_no_bit_of_a_step_changes(checkpoint_of: CheckpointOf, name: str, padding: bool) -> None:
    assert_bitwise(checkpoint_of(name), micro_batches(3, padding=padding))


@pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")
@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "qwen3_next", "phi3"])
def test_nor_with_other_types_of_layers(model_type: str, tmp_path: Path) -> None:
    directory = write_model(tiny_config(model_type), tmp_path)
    assert_bitwise(Checkpoint(ARCHITECTURES["llama"], directory, directory), micro_batches(2))


def test_pages_of_several_blocks(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = host_keys.HostStates._form
    forms = set[int]()

    def noted(*args: Any) -> Any:
        forms.add(form(*args).tokens)
        return form(*args)

    monkeypatch.setattr(host_keys, "PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(host_keys.HostStates, "_form", noted)
    assert_bitwise(checkpoint_of("mistral"), micro_batches(2), sequence_chunk=3)
    assert forms == {2 * BLOCK}


def test_packed_rows(checkpoint_of: CheckpointOf) -> None:
    (batch,) = micro_batches(1)
    batch["position_ids"] = torch.tensor([[*range(7), *range(5)], [*range(4), *range(8)]])
    assert_bitwise(checkpoint_of("qwen3"), [batch])


def test_a_prompt_that_rows_share(checkpoint_of: CheckpointOf) -> None:
    """One row's keys are those of all; the page at its end has some of both."""
    batches = micro_batches(2)
    for batch in batches:
        batch["input_ids"][:, :6] = batch["input_ids"][0, :6]
        batch["input_ids"][:, 6] = torch.arange(3, 3 + len(batch["input_ids"]))
        batch["labels"] = batch["input_ids"].clone()
    for name in ("llama", "mistral"):
        assert_bitwise(checkpoint_of(name), batches, sequence_chunk=3)


def test_rows_of_a_reference(checkpoint_of: CheckpointOf) -> None:
    parts = parts_of(batch_of(examples()), 2, 2, 2, 2)
    assert_bitwise(checkpoint_of("llama"), parts, objective="dpo")


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.2},
        {"boundary_activations": "disk"},
        {"lora_target_modules": ["v_proj"]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_with_other_settings(checkpoint_of: CheckpointOf, settings: dict[str, Any]) -> None:
    assert_bitwise(checkpoint_of("llama"), micro_batches(2), **settings)


def test_an_evaluation(checkpoint_of: CheckpointOf) -> None:
    losses = []
    for place in ("device", "host"):
        options = {"gradient_checkpointing": True, "sequence_chunk": CHUNK, "keys_values": place}
        with streamed_model(checkpoint_of("llama"), **options) as model, torch.no_grad():
            losses.append(model.adapter.evaluate(micro_batches(2))[0])
    assert torch.equal(*losses)


@pytest.mark.parametrize("settings", [{"attn_implementation": "eager"}], ids=["eager"])
def test_what_cannot_go_is_refused_with_a_sentence(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="keys and values cannot wait in host memory") as error:
        step(checkpoint_of("llama"), "host", micro_batches(1), **settings)
    assert error.value.where == "keys_values"
