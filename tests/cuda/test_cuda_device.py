"""The CUDA backend on a CUDA device. Deselected unless asked for: `pytest -m cuda
tests/cuda/test_cuda_device.py`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from parity import (
    ALPHA,
    RANK,
    SEED,
    Outcome,
    all_gradients,
    relative_difference,
    streamed_step,
    trained,
    whole_model,
)
from tiny import Checkpoint, micro_batches
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from lema import LemaConfig, LemaModel
from lema.backend import Backend, BackendOptions
from lema.backend.hostmemory import anonymous
from lema.testing import BackendContract
from lema_cuda import CudaBackend

pytestmark = pytest.mark.cuda

CheckpointOf = Callable[..., Checkpoint]
COUNT = 4  # micro-batches
BUSY = 50_000_000  # cycles of the device, about 30 ms
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TestCuda(BackendContract):
    tolerance: ClassVar[float] = 1e-5
    busy_matmuls: ClassVar[int] = 20

    def keep_busy(self) -> None:
        torch.cuda._sleep(BUSY)

    def backend(self) -> Backend:
        return CudaBackend()

    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=8,
        )


class TestCudaPageable(TestCuda):
    def backend(self) -> Backend:
        return CudaBackend(options=BackendOptions(page_locked=False))


@contextmanager
def model_on_device(
    checkpoint: Checkpoint, directory: Path, **settings: Any
) -> Iterator[LemaModel]:
    settings = {
        "device": "cuda",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "seed": SEED,
        "save_steps": 0,
        **settings,
    }
    settings.update(gradient_checkpointing=True, offload_dir=directory)
    with closing(LemaModel(LemaConfig(str(checkpoint.streamed), **settings))) as model:
        model.initialize_lora()
        model.lora_manager.train()
        draw_on_host(model.lora_manager)
        yield model


def draw_on_host(model: torch.nn.Module) -> None:
    """Give the adapter the values that it has on every device: those drawn by the host's
    generator.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)


def whole_outcome(checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> Outcome:
    """Take a step of the whole model with `transformers` and `peft` alone."""
    model = whole_model(checkpoint, dtype=dtype).to(device)
    draw_on_host(model)
    batches = micro_batches(COUNT, padding=True)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros((), device=device)
    for batch in batches:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(**on(device, batch), num_items_in_batch=tokens).loss
        loss.backward()
        total += loss.detach()
    return Outcome.of(model, total)


def on(device: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def distance(one: Outcome, other: Outcome) -> float:
    """Return how far gradients are apart, or losses, if those are further."""
    loss = abs(float(one.loss) - float(other.loss)) / abs(float(other.loss))
    return max(loss, relative_difference(all_gradients(one).cpu(), all_gradients(other).cpu()))


Measured = Callable[[str, float], None]


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Leave a figure, before anything is asserted of it, in pytest's report (`-rP`) and in its
    XML (`--junitxml`).
    """

    def leave(name: str, value: float) -> None:
        record_property(name, value)
        sys.stdout.write(f"measured: {name} {value:.3e}\n")

    return leave


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("depth", [1, 3])
def test_fp32_is_that_of_the_cpu(
    checkpoint_of: CheckpointOf, tmp_path: Path, measured: Measured, tier: str, depth: int
) -> None:
    expected = whole_outcome(checkpoint_of("llama"), "cpu", torch.float32)
    options: dict[str, Any] = {
        "boundary_activations": tier,
        "prefetch_depth": depth,
        "dtype": "float32",
    }
    with model_on_device(checkpoint_of("llama"), tmp_path, **options) as model:
        for step in range(3):
            difference = distance(
                streamed_step(model, micro_batches(COUNT, padding=True)), expected
            )
            measured(f"fp32 from the CPU's, step {step + 1}", difference)
            assert difference < 1e-5, f"loss or gradients differ by {difference:.3e} of their size"


def test_bf16_is_within_the_spread_of_peft_itself(
    checkpoint_of: CheckpointOf, tmp_path: Path, measured: Measured
) -> None:
    checkpoint = checkpoint_of("llama")
    on_host, on_device = (
        whole_outcome(checkpoint, device, torch.bfloat16) for device in ("cpu", "cuda")
    )
    spread = distance(on_device, on_host)
    measured("bf16 of PEFT on the device from PEFT's on the CPU", spread)
    with model_on_device(checkpoint, tmp_path, dtype="bfloat16") as model:
        difference = distance(streamed_step(model, micro_batches(COUNT, padding=True)), on_device)
        measured("bf16 from PEFT's on the device", difference)
        assert difference <= spread, f"loss or gradients differ by {difference:.3e} of their size"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_in_a_step_the_host_never_waits_for_the_device(
    checkpoint_of: CheckpointOf, tmp_path: Path, tier: str
) -> None:
    with model_on_device(checkpoint_of("llama"), tmp_path, boundary_activations=tier) as model:
        batches = micro_batches(COUNT)
        for _ in range(2):  # what is learnt in the first step is looked at
            streamed_step(model, batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                model.adapter.loss(batches).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_host_buffers_are_locked_and_of_exact_size() -> None:
    with closing(CudaBackend(options=BackendOptions(page_locked=True))) as backend:
        for nbytes in (1, 4096, (5 << 20) + 3):
            buffer = backend.host_buffer(nbytes)
            assert buffer.is_pinned() and buffer[-1:].is_pinned()
            assert len(buffer) == nbytes
        memory = anonymous(8192)
        assert not memory.is_pinned()
        buffer = backend.host_buffer(8192, memory)
        assert memory.is_pinned()
        del buffer
        assert not memory.is_pinned()
        assert float(torch.ones(1, device=backend.device)) == 1


def test_without_locking_host_buffers_are_pageable() -> None:
    with closing(CudaBackend(options=BackendOptions(page_locked=False))) as backend:
        assert not backend.host_buffer(4096).is_pinned()


def test_memory_counts_tensors() -> None:
    with closing(CudaBackend()) as backend:
        before = backend.memory()
        held = [backend.device_slots(1 << 20, 3)]
        assert backend.memory().used == before.used + (3 << 20)
        held.clear()
        assert backend.memory().used == before.used
        assert backend.memory().peak >= before.used + (3 << 20)
        assert backend.memory().total > before.used


def test_slots_that_are_dropped_under_a_copy_do_not_spoil_their_memory() -> None:
    """The next tensor in that memory is written after the copy."""
    with closing(CudaBackend()) as backend:
        source = backend.host_buffer(64 << 20)
        source.fill_(9)
        kept: Sequence[Tensor] = []
        for _ in range(20):
            backend.device_slots(len(source), 1).upload(source)
            kept = [torch.zeros(len(source), dtype=torch.uint8, device=backend.device)]
            assert not bool(kept[0].any())
