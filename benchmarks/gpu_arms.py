"""The arms of gpu.py: how each puts one model onto a device, and takes optimizer steps with it.

Every arm trains the same adapters on the same frozen weights and tokens, recomputes each layer in
the backward pass, computes under the same autocast and steps AdamW with the same settings. The
learning rate is 0: all is computed, and an arm's loss stays that of PEFT, however many steps either
has taken. What each does with the weights:

- `lema`: in page-locked host memory (`resident`) or on the disk (`streaming`); layers cross the
  link once per pass for all micro-batches. What does not fit with the default settings is tried
  with less memory for slots and logits. Weights in host memory stay there for the next row
  (gpu_host.py), so that another plan or another cap costs no second load.
- `peft`: on the device, all of them; non-reentrant checkpointing. It has no cap: it is what the
  others are compared to.
- `fsdp2`: in page-locked host memory, gathered layer by layer for each micro-batch
  (`CPUOffloadPolicy`), two layers ahead; the adapters stay on the device.
- `deepspeed`: ZeRO-3 with `offload_param`, page-locked, fetched layer by layer for each
  micro-batch, two layers ahead; what is smaller than a million elements, adapters among it, stays
  on the device.
- `roundpipe`: in page-locked host memory (`register`); stages of layers cross the link once per
  pass for all micro-batches; boundaries wait on the host, and its own AdamW steps there, while the
  next step has begun.

An arm is built once and then prepared for one number of micro-batches after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from common import Shape
from gpu_device import Device
from gpu_host import keep_host_weights
from gpu_predicted import predicted_parts, predicted_seconds
from gpu_repeated import repeat_layers
from peers_arms import (
    deepspeed_engine,
    deepspeed_settings,
    deepspeed_step,
    shard_with_fsdp2,
    world_of_one,
)
from plainloop import ALPHA, SEED, adamw, peft_model, plain_step
from torch import Tensor

from lema.backend import Backend, load
from lema.engine.head.loss import split_batch

if TYPE_CHECKING:
    from lema import LemaConfig, LemaModel

__all__ = ["ARMS", "FRUGAL", "RATE", "Job", "Prepared", "installed"]

PACKAGES = {"deepspeed": "deepspeed", "roundpipe": "roundpipe"}
AHEAD = 2  # layers that the peers fetch before their turn, as LEMA does
PERSISTENT = 1_000_000  # elements
RATE = 0.0  # of learning
PLANNED = (1.0, 0.96, 0.92)  # of the cap, for LEMA's plan: the next where one ran out of memory
# What LEMA is asked for, until its plan fits the cap: fewer bytes of logits, then one slot less.
FRUGAL = (
    {"embeddings": "host"},
    {"embeddings": "host", "loss_chunk_tokens": 256},
    {"embeddings": "host", "loss_chunk_tokens": 128, "prefetch_depth": 1},
)


@dataclass(frozen=True)
class Job:
    """What an arm is given.

    Attributes:
        arm: its name.
        model: directory.
        shape: of the model.
        device: that computes, by LEMA's name for it.
        cap: of the device's memory, in bytes; None: all of it.
        tokens: of one micro-batch, which is one row.
        rank: of the adapters.
        scratch: a directory for what an arm writes.
        strategy: of LEMA.
        repeated: whether all layers are the bytes of the first (gpu_repeated.py).
        changes: of LEMA's settings, beside those that every job has.
    """

    arm: str
    model: str
    shape: Shape
    device: str
    cap: int | None
    tokens: int
    rank: int
    scratch: str
    strategy: str = "resident"
    repeated: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """An arm that can take steps of one number of micro-batches.

    Attributes:
        step: takes one and returns its loss; the device may still be busy afterwards.
        about: settings in words, and what memory is predicted to be spent on, in bytes.
        counters: bytes moved so far, by name.
        warm_up: steps to take before those that are measured.
        close: gives back what was prepared.
    """

    step: Callable[[], float]
    about: dict[str, Any] = field(default_factory=dict)
    counters: Callable[[], dict[str, int]] = dict
    warm_up: int = 1
    close: Callable[[], None] = lambda: None


Prepare = Callable[[Tensor], Prepared]


def installed(arm: str) -> bool:
    """Whether the package that an arm needs is there."""
    return arm not in PACKAGES or find_spec(PACKAGES[arm]) is not None


@cache
def _backend(device: str) -> Backend:
    """Return the backend of all models of this process, whose host memory outlives them."""
    return load(device)


def _lema(job: Job) -> Prepare:
    if job.repeated:
        repeat_layers()
    backend = _backend(job.device)
    keep_host_weights(backend)
    return _LemaArm(job, backend).prepare


class _LemaArm:
    """Prepares LEMA with the first settings whose plan fits, and with a smaller plan where the
    device has less memory than the plan says."""

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        self._backend = backend

    def prepare(self, ids: Tensor) -> Prepared:
        device = Device(self._job.device)
        for part in PLANNED[:-1]:
            try:
                return self._attempt(ids, part)
            except torch.OutOfMemoryError:
                pass
            gc.collect()  # what the failed attempt held goes with its traceback, which ends here
            device.empty_cache()
        return self._attempt(ids, PLANNED[-1])

    def _attempt(self, ids: Tensor, part: float) -> Prepared:
        model = self._opened(ids, part)
        try:
            trainer = model.get_trainer()
            batches = split_batch({"input_ids": ids, "labels": ids}, 1)
            parts = predicted_parts(model)

            def step() -> float:
                return float(trainer.accumulate(batches).loss)

            step()  # makes the optimizer's state, so that a plan that is too bold is found out here
            model.backend.synchronize()
        except BaseException:
            model.close(keep_backend=True)
            raise
        names = ("device_memory", "loss_chunk_tokens", "prefetch_depth")
        about = {
            "settings": {name: getattr(model.config, name) for name in names},
            "allocation": model.allocation.summary(),
            "planned": parts,
            "predicted_seconds": predicted_seconds(model),
        }

        def counters() -> dict[str, int]:
            found = model.memory.counters
            return {"bytes_uploaded": found.bytes_uploaded, "bytes_read": found.bytes_read}

        return Prepared(
            step, about, counters, warm_up=1, close=lambda: model.close(keep_backend=True)
        )

    def _opened(self, ids: Tensor, part: float) -> LemaModel:
        """Open the model with the first settings whose plan fits this part of the cap."""
        from lema import LemaModel
        from lema.errors import MemoryLimitError

        for changes in FRUGAL[:-1]:
            model = LemaModel(self._config(ids, part, changes), backend=self._backend)
            try:
                return self._planned(model)
            except MemoryLimitError:
                pass
        return self._planned(LemaModel(self._config(ids, part, FRUGAL[-1]), backend=self._backend))

    @staticmethod
    def _planned(model: LemaModel) -> LemaModel:
        try:
            model.initialize_lora()
            assert model.allocation  # made here, where it may be refused
        except BaseException:
            model.close(keep_backend=True)
            raise
        return model

    def _config(self, ids: Tensor, part: float, changes: Mapping[str, Any]) -> LemaConfig:
        from lema import LemaConfig
        from lema.config import MemoryStrategy

        job = self._job
        return LemaConfig(
            job.model,
            device=job.device,
            strategy=MemoryStrategy(job.strategy),
            device_memory=None if job.cap is None else int(job.cap * part),
            gradient_checkpointing=True,
            batch_size=len(ids),
            micro_batch_size=1,
            max_length=job.tokens,
            lora_rank=job.rank,
            lora_alpha=ALPHA,
            learning_rate=RATE,
            seed=SEED,
            save_steps=0,
            output_dir=job.scratch,
            **{**changes, **job.changes},
        )


def _peft(job: Job) -> Prepare:
    model = peft_model(job.model, device=job.device, rank=job.rank)
    return _plain(model, job)


def _fsdp2(job: Job) -> Prepare:
    world_of_one(job.scratch, "gloo" if job.device == "cpu" else "nccl")
    model = peft_model(job.model, rank=job.rank)
    before = shard_with_fsdp2(model, job.device, ahead=AHEAD)
    return _plain(model, job, before)


def _plain(model: Any, job: Job, before: Callable[[bool], None] = lambda _: None) -> Prepare:
    optimizer = adamw(model, lr=RATE, fused=job.device != "cpu")
    dtype = getattr(torch, job.shape.dtype)
    return lambda ids: Prepared(plain_step(model, ids.to(job.device), dtype, optimizer, before))


def _deepspeed(job: Job) -> Prepare:
    on_device = job.device != "cpu"
    world_of_one(job.scratch, "nccl" if on_device else "gloo")
    model = peft_model(job.model, rank=job.rank)
    layer = job.shape.layer_parameters
    width = getattr(torch, job.shape.dtype).itemsize
    adapters = sum(one.numel() for one in model.parameters() if one.requires_grad)
    live = int(job.cap / width / 2) if job.cap else 10 * layer  # half of the cap
    settings = deepspeed_settings(
        job.shape.dtype,
        1,
        {"pin_memory": on_device},
        stage3_prefetch_bucket_size=AHEAD * layer,
        stage3_max_live_parameters=live,
        stage3_max_reuse_distance=live,
        stage3_param_persistence_threshold=PERSISTENT,
        reduce_bucket_size=adapters,
        overlap_comm=True,
    )
    engine = deepspeed_engine(model, job.shape.dtype, 1, settings, in_parts=True)
    for group in engine.optimizer.param_groups:
        group["lr"] = RATE
    for buffer in model.buffers():
        buffer.data = buffer.data.to(job.device)

    def prepare(ids: Tensor) -> Prepared:
        engine.set_train_batch_size(len(ids))
        here = ids.to(job.device)
        return Prepared(deepspeed_step(engine, split_batch({"input_ids": here, "labels": here}, 1)))

    return prepare


def _roundpipe(job: Job) -> Prepare:
    from gpu_roundpipe import build

    return build(job, peft_model(job.model, rank=job.rank))


ARMS: dict[str, Callable[[Job], Prepare]] = {
    "lema": _lema,
    "peft": _peft,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "roundpipe": _roundpipe,
}
