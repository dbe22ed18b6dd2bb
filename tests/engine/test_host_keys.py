"""Keys and values that wait in host memory between the chunks of a row: every bit of a step is that
of the same chunks with keys on the device.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from everytype import write_model
from latedevice import LateDevice
from parity import Outcome, assert_same, draw_b, streamed_model, streamed_step
from preferences import batch_of, examples, parts_of
from smallblocks import BLOCK, use_small_blocks
from tiny import ARCHITECTURES, Checkpoint, micro_batches
from tinyconfig import tiny_config
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.model.sequence import host_keys
from lema.model.sequence.host_keys import HostKeys
from lema.model.sequence.pages import PageStore

CheckpointOf = Callable[..., Checkpoint]
Batches = list[dict[str, Tensor]]

CHUNK = 5  # of blocks of four keys


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


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
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next", "phi3"])
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


@pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_latent_attention_and_sinks_are_refused_with_a_sentence(
    model_type: str, tmp_path: Path
) -> None:
    directory = write_model(tiny_config(model_type), tmp_path)
    checkpoint = Checkpoint(ARCHITECTURES["llama"], directory, directory)
    with pytest.raises(ConfigError, match="keys and values cannot wait in host memory") as error:
        step(checkpoint, "host", micro_batches(1))
    assert error.value.where == "keys_values"


@pytest.mark.parametrize("kind", ["eager", "dropout"])
def test_attention_that_is_not_in_blocks_is_refused(checkpoint_of: CheckpointOf, kind: str) -> None:
    checkpoint = checkpoint_of("llama", dropout=0.1 if kind == "dropout" else 0.0)
    options = {"attn_implementation": "eager"} if kind == "eager" else {}
    with pytest.raises(ConfigError, match="set it to device"):
        step(checkpoint, "host", micro_batches(1), **options)


def late_step(model: Path, seed: int | None, place: str) -> Outcome:
    """Take a step on a device whose copies come late, as late as can be without a seed."""
    options: dict[str, Any] = {"sequence_chunk": CHUNK, "keys_values": place, "save_steps": 0}
    options |= {"gradient_checkpointing": True, "device_memory": None, "lora_rank": 2, "seed": 7}
    config = LemaConfig(str(model), device="cpu", **options)
    with closing(LemaModel(config, backend=LateDevice(seed))) as opened:
        opened.initialize_lora()
        opened.lora_manager.train()
        draw_b(opened.lora_manager)
        return streamed_step(opened, micro_batches(2))


@pytest.mark.parametrize("seed", [None, 3])
def test_no_page_is_read_before_its_copy_has_ended(
    checkpoint_of: CheckpointOf, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint_of("mistral").streamed
    expected = late_step(model, seed, "device")
    assert_same(late_step(model, seed, "host"), expected)
    if seed is not None:
        return
    upload = PageStore.upload
    held = list[Any]()  # because dropping it waits as well

    def impatient(store: PageStore, page: Tensor) -> Any:
        begun: Any = upload(store, page)
        held.append(begun)
        return SimpleNamespace(wait=lambda: begun._slot.memory)

    monkeypatch.setattr(PageStore, "upload", impatient)
    with pytest.raises(AssertionError):
        assert_same(late_step(model, seed, "host"), expected)
