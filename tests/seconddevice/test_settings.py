"""Every way to spend memory, and every way to train, gives the CPU's numbers on a device with
memory of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressedforms
import fulltraining
import packedforms
import pytest
import torch
from compressedforms import write_compressed
from everytype import write_model
from packedforms import write_packed
from phaseruns import SOURCES, two
from phaseruns import weights as weights_of
from preferences import batch_of, examples, parts_of
from quantized import KINDS, prepared, published
from seconddevice import SecondDevice
from seconddevice.backend import SecondBackend
from seconddevice.steps import WITHIN, Step, by_turns, on_both, opened, take
from smallblocks import use_small_blocks
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3MoeConfig

from lema import LemaConfig, LemaModel
from lema.train import train
from lema.train.phases.run import run_phases

CheckpointOf = Callable[..., Checkpoint]

MEMORY: dict[str, dict[str, Any]] = {
    "one slot ahead": {"prefetch_depth": 1},
    "four slots ahead": {"prefetch_depth": 4},
    "layers in host memory": {"strategy": "resident"},
    "some layers in host memory": {"host_memory": "200KB"},
    "half of the layers on the device": {"device_memory": "1.2MB"},
    "boundaries on the device": {"boundary_activations": "device"},
    "boundaries in host memory": {"boundary_activations": "host"},
    "boundaries on the disk": {"boundary_activations": "disk"},
    "embeddings in host memory": {"embeddings": "host"},
    "embeddings on the disk": {"embeddings": "disk"},
    "the head is leased": {"head": "stream"},
    "the head and embeddings are leased": {
        "head": "stream",
        "embeddings": "host",
        "boundary_activations": "host",
    },
    "activations are kept": {"gradient_checkpointing": False},
    "activations are offloaded": {"gradient_checkpointing": False, "activation_offloading": True},
    "activations are offloaded to the disk": {
        "gradient_checkpointing": False,
        "activation_offloading": "disk",
    },
    "memory that is not locked": {"page_locked": False},
    "loss in pieces": {"loss_chunk_tokens": 7},
    "dora": {"lora_use_dora": True},
    "embeddings that train": {"lora_target_modules": ["q_proj", "embed_tokens"]},
    "single tokens that train": {"lora_trainable_token_indices": [1, 2]},
}


@pytest.mark.parametrize(("name", "seed"), by_turns(MEMORY))
def test_memory_is_spent_in_any_way(
    checkpoint_of: CheckpointOf, second: SecondDevice, tmp_path: Path, name: str, seed: int | None
) -> None:
    assert NUM_LAYERS >= 8
    settings = {"offload_dir": str(tmp_path), **MEMORY[name]}
    if (architecture := "gemma2" if "embeddings" in settings else "llama") == "gemma2":
        settings["attn_implementation"] = "eager"
    model = checkpoint_of(architecture).streamed
    with second.course(seed):
        on_device, on_cpu = on_both(model, micro_batches(4, padding=True), steps=2, **settings)
    assert on_device.distance(on_cpu) < WITHIN * (10 if "pieces" in name else 1)


@pytest.mark.parametrize("seed", [None, 5], ids=["late", "by-chance"])
def test_keys_and_values_wait_in_host_memory_between_chunks(
    checkpoint_of: CheckpointOf,
    second: SecondDevice,
    monkeypatch: pytest.MonkeyPatch,
    seed: int | None,
) -> None:
    """Bit for bit as on the device: pages come when they are read, and leave when they were
    written."""
    use_small_blocks(monkeypatch)
    model = checkpoint_of("mistral").streamed
    taken = []
    with second.course(seed):
        for place in ("device", "host"):
            settings = {"sequence_chunk": 5, "keys_values": place, "boundary_activations": "host"}
            with opened(model, "second", **settings) as streamed:
                take(streamed, micro_batches(2, padding=True))
                taken.append(take(streamed, micro_batches(2, padding=True)))
    assert taken[1].distance(taken[0]) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_experts_are_leased_in_groups(tmp_path: Path, size: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = write_model(config, tmp_path / "model")
    settings = {"experts_per_slot": size, "lora_target_parameters": ["gate_up_proj", "down_proj"]}
    on_device, on_cpu = on_both(model, micro_batches(2), **settings)
    assert on_device.distance(on_cpu) < WITHIN


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_expanded_there(tmp_path: Path, kind: str) -> None:
    model = prepared(published(tmp_path / "published"), kind).path
    on_device, on_cpu = on_both(model, micro_batches(2))
    assert on_device.distance(on_cpu) < WITHIN


@pytest.mark.parametrize("form", ["gptq, groups of 32, desc_act", "awq, groups of 32"])
def test_packed_weights_are_expanded_there(tmp_path: Path, form: str) -> None:
    model = write_packed(packedforms.FORMS[form], tmp_path, num_hidden_layers=4).streamed
    on_device, on_cpu = on_both(model, micro_batches(2), dtype="float32")
    assert on_device.distance(on_cpu) < WITHIN


@pytest.mark.parametrize("form", ["int4, groups", "int8, channels", "int4, numbered groups"])
def test_compressed_integers_are_expanded_there(tmp_path: Path, form: str) -> None:
    model = write_compressed(compressedforms.FORMS[form], tmp_path, num_layers=4).streamed
    on_device, on_cpu = on_both(model, micro_batches(2), dtype="float32")
    assert on_device.distance(on_cpu) < WITHIN


def test_fast_arithmetic_is_the_cpus_to_rounding(checkpoint_of: CheckpointOf) -> None:
    on_device, on_cpu = on_both(
        checkpoint_of("llama").streamed, micro_batches(2), arithmetic="fast"
    )
    assert on_device.distance(on_cpu) < 1e-5


def test_a_preference_loss_compares_with_the_adapter_of_the_start(
    checkpoint_of: CheckpointOf,
) -> None:
    batch = batch_of(examples())
    settings = {
        "objective": "dpo",
        "reference": "adapter",
        "lora_use_dora": True,
        "lora_modules_to_save": ["lm_head"],
    }
    on_device, on_cpu = on_both(
        checkpoint_of("llama").streamed, parts_of(batch, 3, 5), steps=2, **settings
    )
    assert on_device.distance(on_cpu) < WITHIN * 10
    assert abs(float(on_cpu.loss) - math.log(2)) > 1e-4  # what trains was moved since


def test_dropout_is_drawn_again_in_the_backward(checkpoint_of: CheckpointOf) -> None:
    """Layers that are recomputed, and layers whose activations are kept, take the same step."""
    model = checkpoint_of("llama", dropout=0.1).streamed
    taken = []
    for recomputed in (True, False):
        with opened(
            model, "second", lora_dropout=0.1, gradient_checkpointing=recomputed
        ) as streamed:
            taken.append(take(streamed, micro_batches(2)))
    assert taken[0].distance(taken[1]) < WITHIN


def test_all_weights_train(checkpoint_of: CheckpointOf) -> None:
    # a smooth update
    config = fulltraining.config_of(checkpoint_of("llama"), adam_epsilon=1.0, learning_rate=1.0)
    with sdpa_kernel(SDPBackend.MATH):
        ends = [
            fulltraining.streamed(config, fulltraining.everything, 2, backend, steps=3)
            for backend in (SecondBackend(), None)
        ]
    assert torch.allclose(torch.stack(ends[0][0]), torch.stack(ends[1][0]), rtol=1e-6)
    for name, weight in ends[1][1].items():
        assert torch.allclose(ends[0][1][name].cpu(), weight, rtol=1e-4, atol=1e-6), name


def test_weights_then_adapters_train_in_phases(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    ends = []
    for device in ("second", "cpu"):
        directory = tmp_path / device
        settings: dict[str, Any] = {
            "device": device,
            "gradient_checkpointing": True,
            "output_dir": str(directory),
        }
        config = LemaConfig(
            str(checkpoint_of("llama").streamed), save_steps=0, adam_epsilon=1.0, **settings
        )
        with sdpa_kernel(SDPBackend.MATH):
            run_phases(config, two(), SOURCES)
        ends.append(weights_of(directory))
    assert ends[0].keys() == ends[1].keys() and ends[1]
    assert all(
        torch.allclose(ends[0][name], one, rtol=1e-4, atol=1e-6) for name, one in ends[1].items()
    )


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_run_of_lema_train_is_the_cpus(llama: Path, tmp_path: Path, objective: str) -> None:
    """Data, evaluation, a checkpoint and the reference's rows among them."""
    rows: list[dict[str, Any]] = [
        {"prompt": "the miller of", "chosen": f" mill {n}", "rejected": " corn" * (1 + n % 3)}
        for n in range(8)
    ]
    if objective == "sft":
        rows = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    losses = []
    for device in ("second", "cpu"):
        config = LemaConfig(
            str(llama),
            device=device,
            output_dir=str(tmp_path / device),
            train_data=_written(tmp_path / f"{objective}.jsonl", rows),
            eval_split=2,
            objective=objective,
            optim="sgd",
            learning_rate=0.1,
            max_steps=3,
            save_steps=2,
            batch_size=4,
            micro_batch_size=2,
            gradient_checkpointing=True,
        )
        with sdpa_kernel(SDPBackend.MATH):
            result = train(config)
        losses.append((result["train_loss"], result["eval_loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _written(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_text_is_generated_and_scored(llama: Path) -> None:
    """With a cache, whose keys and values are on the device."""
    texts = []
    for device in ("second", "cpu"):
        with opened(llama, device) as model, sdpa_kernel(SDPBackend.MATH):
            model.lora_manager.eval()
            texts.append(model.generate("the miller of mill 3", max_new_tokens=6))
    assert texts[0] == texts[1] and texts[0][0]


def test_memory_runs_out_at_the_devices_limit_and_the_step_is_taken_all_the_same(
    checkpoint_of: CheckpointOf, second: SecondDevice
) -> None:
    """With smaller micro-batches, as on a real device."""
    model = checkpoint_of("llama").streamed
    batches = micro_batches(2)
    with sdpa_kernel(SDPBackend.MATH):
        with opened(model, "cpu") as streamed:
            expected = take(streamed, batches)
        with opened(model, "second") as streamed:
            take(streamed, batches)
            second.reset_peak()
            before = second.used
            take(streamed, batches)
            needed = second.peak - before
            with (
                second.limited(before + needed * 3 // 4),
                pytest.warns(UserWarning, match="device memory ran out"),
            ):
                step = take_with_retries(streamed, batches)
    assert step.distance(expected) < WITHIN


def take_with_retries(model: LemaModel, batches: Any) -> Step:
    """Take the step as a run does: what runs out of memory is tried again in smaller pieces."""
    trainer = model.get_trainer(torch.optim.SGD(model.get_trainable_parameters(), lr=0.0))
    torch.manual_seed(11)
    parameters = [p for p in model.lora_manager.parameters() if p.requires_grad]
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss = trainer.update.accumulate(parameters, batches, tokens)
    trained = {
        name: one for name, one in model.lora_manager.named_parameters() if one.requires_grad
    }
    gradients = {name: one.grad.cpu() for name, one in trained.items() if one.grad is not None}
    return Step(loss.cpu(), gradients)
