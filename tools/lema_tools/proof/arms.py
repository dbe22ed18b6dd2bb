"""The two runs that are compared: the same steps streamed, and with `transformers` and PEFT on the
whole model.

Each is a process of its own where it is called by `run_in_subprocess`, so that its peak of memory
is its own; `python -m lema_tools.proof ARM CASE RESULT` is that process.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lema.backend import Backend
from lema.backend.host.limits import peak_memory
from lema.config import LemaConfig
from lema.config.types import dtype_name
from lema.engine.head.loss import split_batch
from lema.errors import LemaError, MemoryLimitError
from lema.model.partition import open_backend
from lema.model.sequence.rope import read_rope
from lema.plan.planner import machine_state_of, planner_of
from lema.train import LemaModel

__all__ = ["Case", "Outcome", "run_in_subprocess", "streamed", "whole_model"]

# glibc keeps what it likes of freed memory; with these it gives it back, so that peaks tell what
# was needed.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Case:
    """What both runs do; `scratch` is a folder that they share, and `tokens` are those of a row."""

    model: str
    scratch: str
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 5
    micro_batches: int = 4  # of one row, in each step
    tokens: int = 64
    rank: int = 16
    learning_rate: float = 1e-3
    seed: int = 42
    # settings of the streamed run: tokens that go through a layer at once; None: all of a row
    sequence_chunk: int | None = None
    rope_parameters: dict[str, Any] | None = None  # in the place of the model's; None: its own

    @property
    def is_cut(self) -> bool:
        """Whether rows go through the layers of the streamed run in chunks."""
        return self.sequence_chunk is not None and self.sequence_chunk < self.tokens

    @property
    def settings(self) -> LemaConfig:
        """What LEMA trains with: no layer stays on the device, though there may be room, and both
        of the adapter's matrices are drawn, because a gradient of A is zero while B is. Experts
        have no adapter, because products with adapted ones round otherwise than PEFT's
        (docs/internals/experts.md)."""
        return LemaConfig(
            self.model,
            device=self.device,
            dtype=self.dtype,
            device_memory=None,
            gradient_checkpointing=True,
            batch_size=self.micro_batches,
            micro_batch_size=1,
            max_length=self.tokens,
            lora_rank=self.rank,
            lora_alpha=2 * self.rank,
            lora_init=False,
            lora_target_parameters=[],
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=None,
            sequence_chunk=self.sequence_chunk,
            rope_parameters=self.rope_parameters,
            seed=self.seed,
            save_steps=0,
            output_dir=str(Path(self.scratch) / "output"),
        )

    def rows(self, vocabulary: int) -> Iterator[Tensor]:
        """Yield the token ids of each step, int64 `[micro_batches, tokens]`."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            yield torch.randint(
                0, vocabulary, (self.micro_batches, self.tokens), generator=generator
            )


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the loss of each step, and tensors by name."""

    losses: list[float]
    gradients: dict[str, Tensor] = field(repr=False)  # of the first step
    adapter: dict[str, Tensor] = field(repr=False)  # after the last
    # bytes: `before` the model was opened and at the `peak`, of the process or the device
    memory: dict[str, int]
    seconds: list[float]  # of each step
    details: dict[str, Any] = field(default_factory=dict)  # what else the streamed run knows


def streamed(case: Case) -> Outcome:
    """Train by streaming; the adapter as it was drawn is left in the folder `adapter` for the
    other run.
    """
    config = case.settings
    gradients = dict[str, Tensor]()
    planner = planner_of(config, machine_state=machine_state_of(config))
    needs = planner.needs()
    shared = planner.machine_state.machine.shared  # the ring of host buffers is the slots then
    parts = {
        f"host: {name}": size
        for name, size in needs.host.items()
        if size and not (shared and name == "ring")
    }
    parts |= {f"device: {name}": size for name, size in needs.device.items() if size}
    before = _begin_peak()
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        assert model.lora_manager is not None
        model.save_pretrained(Path(case.scratch) / "adapter")
        trainer = model.get_trainer()
        losses = list[float]()
        seconds = list[float]()
        adapter = model.lora_manager.train()

        def keep(event: str) -> None:
            if event == "on_pre_optimizer_step" and not gradients:
                gradients.update(_trained(adapter, lambda parameter: parameter.grad))

        words = model.skeleton.config.get_text_config().vocab_size
        read = model.memory.counters.bytes_read
        torch.manual_seed(case.seed)
        for ids in case.rows(words):
            began = time.perf_counter()
            batches = split_batch({"input_ids": ids, "labels": ids}, 1)
            losses.append(trainer.accumulate(batches, on_event=keep).loss)
            seconds.append(time.perf_counter() - began)
        stream = model.memory
        details = {
            "bytes_read_per_step": (stream.counters.bytes_read - read) / case.steps,
            "layers": len(stream.layers),
            "slots": stream.num_slots,
            "layer_bytes": sum(layer.nbytes for layer in stream.layers),
            "model_bytes": model.gbi.nbytes,
            "parameters": planner.blueprint.parameters,
            "adapter_parameters": model.num_adapter_parameters,
            "model_type": model.skeleton.config.model_type,
            "plan": parts,
            "device": str(model.backend.device),
            "compute_dtype": dtype_name(model.computing.dtype),
        }
        return Outcome(
            losses,
            gradients,
            _trained(adapter, lambda parameter: parameter),
            _memory(model.backend, before),
            seconds,
            details,
        )


def whole_model(case: Case) -> Outcome:
    """Train the whole model with `transformers` and PEFT, from the adapter that the other run has
    drawn; of LEMA there is the name of the device, and no more."""
    config = case.settings
    dtype = getattr(torch, case.dtype)
    with closing(open_backend(config)) as backend:
        device = backend.device
        before = _begin_peak()
        adapter = Path(case.scratch) / "adapter"
        published = AutoConfig.from_pretrained(case.model)
        if case.rope_parameters is not None:
            # as the adapter's card tells who uses it without LEMA
            published.get_text_config().rope_parameters = read_rope(adapter)
        base: Any = AutoModelForCausalLM.from_pretrained(case.model, config=published, dtype=dtype)
        base.to(device)
        base.config.use_cache = False
        model = PeftModel.from_pretrained(
            base, str(adapter), is_trainable=True, torch_device="cpu"
        ).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=case.learning_rate, weight_decay=0.0)
        losses = list[float]()
        seconds = list[float]()
        gradients = dict[str, Tensor]()
        torch.manual_seed(case.seed)
        for ids in case.rows(base.config.get_text_config().vocab_size):
            began = time.perf_counter()
            total = torch.zeros((), device=device)
            options = {"num_items_in_batch": ids[:, 1:].numel()} if len(ids) > 1 else {}
            for row in ids.to(device).split(1):
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    loss = model(input_ids=row, labels=row, **options).loss
                loss.backward()
                total = total + loss.detach()
            gradients = gradients or _trained(model, lambda parameter: parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
            seconds.append(time.perf_counter() - began)
        return Outcome(
            losses,
            gradients,
            _trained(model, lambda parameter: parameter),
            _memory(backend, before),
            seconds,
        )


ARMS: dict[str, Callable[[Case], Outcome]] = {"streamed": streamed, "whole": whole_model}


def run_in_subprocess(arm: str, case: Case) -> Outcome:
    """Run one of the two in a process of its own, or raise a LemaError with what it said where
    it fails.
    """
    result_file = Path(case.scratch) / f"{arm}.pt"
    command = [
        sys.executable,
        "-m",
        "lema_tools.proof",
        arm,
        json.dumps(asdict(case)),
        str(result_file),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **RETURNING}
    )
    if done.returncode or not result_file.is_file():
        stderr_tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        what = f"the {arm} run ended with {done.returncode}:\n{stderr_tail}"
        if arm == "whole" and (
            done.returncode in (-9, 137) or "out of memory" in stderr_tail.lower()
        ):
            how = (
                "the comparison needs the whole model in memory: use a smaller model of its "
                "kind, or fewer --tokens"
            )
            raise MemoryLimitError(what, where=case.model, how=how)
        raise LemaError(what, where=case.model, how="try the same command with smaller numbers")
    return Outcome(**torch.load(result_file, weights_only=True))


def _trained(model: nn.Module, what: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Copy something of all that trains to the host, by name."""
    selected = (
        (name, what(parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return {name: tensor.detach().cpu().clone() for name, tensor in selected if tensor is not None}


def _begin_peak() -> int:
    """Begin the process's peak of memory again, which Linux does where 5 is written to a file of
    /proc (proc(5), clear_refs), and return the bytes that are resident now. Elsewhere the peak is
    that since the process began."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii", newline="\n")
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """Return the most bytes that have been resident since `_begin_peak`."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return peak_memory()
    (line,) = (entry for entry in lines if entry.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _memory(backend: Backend, before: int) -> dict[str, int]:
    """Return the bytes resident before, and the most since: of the process, or of a device with
    memory of its own.
    """
    stats = backend.memory()
    return (
        {"before": before, "peak": _peak()} if stats.shared else {"before": 0, "peak": stats.peak}
    )
