"""One arm of `peers.py`: a process that loads the model, then takes one optimizer step whenever it
is told to.

Every arm trains the same adapters (LoRA of rank 16 on every linear, PEFT's draw for one seed, fp32)
on the same frozen weights and tokens, recomputes each layer in the backward pass, computes under
the same autocast, and steps torch's AdamW with the same settings. All are one process on the CPU, a
world of one. What each does with the weights:

- `lema`: reads them from the disk, layer by layer, past the page cache, with default settings: 3
  layers are in memory.
- `peft`: has them in memory, where `from_pretrained` maps the files; non-reentrant checkpointing.
- `fsdp2`: holds a copy of its own in memory and gathers each layer from it for each micro-batch, in
  the forward and in the backward pass (`CPUOffloadPolicy`, resharded after both). The adapters are
  left out of the sharding (`ignored_params`) and gradients are synchronised with the last
  micro-batch only: in a world of one that changes no number, and saves it the adapters' traffic and
  an optimizer over distributed tensors. Arms `fsdp2-sharded` (adapters sharded as well, the
  textbook's way) and `fsdp2-kept` (layers stay gathered from one micro-batch of a step to the next,
  a second copy of the weights) are there for comparison.
- `deepspeed`: ZeRO-3 with `offload_param` on the CPU, gradient accumulation over the micro-batches,
  `torch_autocast`. It holds a copy of its own in memory; on the CPU a gather in a world of one is a
  view. Decoder layers are its leaf modules: by default it runs hooks around each of the hundreds of
  modules that PEFT makes, at twice the CPU time. Clipping, which is on by default, is off as in the
  other arms.
- `soup`, `soup-ram`, `airllm`: peers that stream too (peers_streaming.py).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import memory_kinds
from peers_streaming import airllm_step, soup_model
from plainloop import ALPHA, RANK, RATE, SEED, adamw, peft_model, plain_step
from torch import Tensor

from lema.engine.head.loss import split_batch, trained_tokens

__all__ = [
    "ARMS",
    "Task",
    "deepspeed_engine",
    "deepspeed_settings",
    "deepspeed_step",
    "shard_with_fsdp2",
    "world_of_one",
]

Step = Callable[[], float]
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "soup-cli",
    "airllm",
    "lema",
)


@dataclass(frozen=True)
class Task:
    """What every arm is given; `tokens` are those of one micro-batch, which is one row."""

    directory: str
    scratch: str
    dtype: str
    vocabulary: int
    micro_batches: int
    tokens: int

    def ids(self) -> Tensor:
        """Return the tokens of every step, `[micro-batches, tokens]`."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            0, self.vocabulary, (self.micro_batches, self.tokens), generator=generator
        )

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the micro-batches of every step."""
        return split_batch({"input_ids": self.ids(), "labels": self.ids()}, 1)


def _lema(task: Task) -> Step:
    from lema import LemaConfig, LemaModel

    model = LemaModel(
        LemaConfig(
            task.directory,
            device="cpu",
            gradient_checkpointing=True,
            micro_batch_size=1,
            lora_rank=RANK,
            lora_alpha=ALPHA,
            learning_rate=RATE,
            seed=SEED,
            save_steps=0,
            output_dir=task.scratch,
        )
    )
    model.initialize_lora()
    trainer = model.get_trainer()
    batches = task.batches()
    return lambda: trainer.accumulate(batches).loss


def _peft(task: Task) -> Step:
    model = peft_model(task.directory)
    return plain_step(model, task.ids(), model.dtype, adamw(model))


def _fsdp2(task: Task, *, shard_adapters: bool = False, keep: bool = False) -> Step:
    world_of_one(task.scratch, "gloo")
    model = peft_model(task.directory)
    before = shard_with_fsdp2(model, "cpu", shard_adapters=shard_adapters, keep=keep)
    return plain_step(model, task.ids(), model.dtype, adamw(model), before)


def shard_with_fsdp2(
    model: Any, device: str, *, shard_adapters: bool = False, keep: bool = False, ahead: int = 0
) -> Callable[[bool], None]:
    """Have FSDP2 keep a model's weights in host memory; return what `plain_step` calls before each
    micro-batch.

    Args:
        model: as `peft_model` returns it.
        device: that computes.
        shard_adapters: the adapters too.
        keep: leave layers gathered from one micro-batch of a step to the next.
        ahead: layers whose gathering is queued before their turn; 0: as FSDP2 does by itself.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

    adapters = {one for one in model.parameters() if one.requires_grad}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu"),
        "ignored_params": None if shard_adapters else adapters,
    }
    layers = list(model.get_base_model().model.layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    sharded = fully_shard(model, **options)
    assert isinstance(sharded, FSDPModule)
    if not shard_adapters:  # FSDP2 moves what it shards alone
        for one in adapters:
            one.data = one.data.to(device)
    for number, layer in enumerate(layers if ahead else ()):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - ahead) : number][::-1])

    def before(last: bool) -> None:
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)
        if keep:
            sharded.set_reshard_after_backward(last)

    return before


def _deepspeed(task: Task) -> Step:
    world_of_one(task.scratch, "gloo")
    model = peft_model(task.directory)
    engine = deepspeed_engine(model, task.dtype, task.micro_batches)
    return deepspeed_step(engine, task.batches())


def _soup(task: Task, source: str) -> Step:
    model = soup_model(task.directory, task.scratch, task.dtype, source)
    return plain_step(model, task.ids(), getattr(torch, task.dtype), adamw(model))


def deepspeed_settings(
    dtype: str, micro_batches: int, offload: dict[str, Any], **zero: Any
) -> dict[str, Any]:
    """Return DeepSpeed's settings, with further ones of `zero_optimization` and of
    `offload_param`.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default is 1
        "steps_per_print": 1 << 30,
        "torch_autocast": {
            "enabled": dtype != "float32",
            "dtype": dtype,
            # the adapters' gradients stay fp32, as in the other arms
            "lower_precision_safe_modules": [],
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", **offload},
            "memory_efficient_linear": False,  # torch's own linear, as in the other arms
            **zero,
        },
    }


def deepspeed_engine(
    model: Any,
    dtype: str,
    micro_batches: int,
    settings: dict[str, Any] | None = None,
    *,
    in_parts: bool = False,
) -> Any:
    """Return DeepSpeed's engine over a model as `peft_model` returns it; a layer is gathered as a
    whole.

    Args:
        model: in host memory.
        dtype: of its weights.
        micro_batches: of an optimizer step.
        settings: DeepSpeed's; None: those of the CPU.
        in_parts: hand the weights over one by one; else the whole model passes through the device's
            memory first.
    """
    deepspeed: Any = import_module("deepspeed")
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.get_base_model().model.layers[0])])
    if settings is None:
        # The default reduce bucket, of 5e8 elements, would be a buffer of 2 GB.
        adapters = sum(one.numel() for one in model.parameters() if one.requires_grad)
        settings = deepspeed_settings(
            dtype, micro_batches, {"pin_memory": False}, reduce_bucket_size=adapters
        )
    if in_parts:
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=settings, dist_init_required=False
    )
    engine.train()
    return engine


def deepspeed_step(engine: Any, batches: Sequence[dict[str, Tensor]]) -> Step:
    """Return what takes one optimizer step of the engine over some micro-batches."""
    total = trained_tokens(batches)

    def step() -> float:
        losses = []
        for batch in batches:
            loss = engine(**batch, use_cache=False, num_items_in_batch=total).loss
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            losses.append(loss.detach())
        return sum(float(one) for one in losses)

    return step


def world_of_one(scratch: str, carrier: str) -> None:
    """Make this process a world of its own for `torch.distributed`."""
    from torch.distributed import init_process_group

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    init_process_group(carrier, init_method=f"file://{scratch}/{os.getpid()}", rank=0, world_size=1)


ARMS: dict[str, Callable[[Task], Step]] = {
    "lema": _lema,
    "peft": _peft,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "soup": lambda task: _soup(task, "disk"),
    "airllm": lambda task: airllm_step(task.directory, task.scratch, task.ids()),
    "soup-ram": lambda task: _soup(task, "ram"),
    "fsdp2-sharded": lambda task: _fsdp2(task, shard_adapters=True),
    "fsdp2-kept": lambda task: _fsdp2(task, keep=True),
}


@dataclass(frozen=True)
class Spent:
    """What this process has spent so far."""

    seconds: float
    cpu_seconds: float
    bytes_read: int

    @classmethod
    def now(cls) -> Spent:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return cls(time.perf_counter(), usage.ru_utime + usage.ru_stime, int(counted["read_bytes"]))

    def since(self, began: Spent) -> dict[str, float]:
        earlier = asdict(began)
        return {name: value - earlier[name] for name, value in asdict(self).items()}


def _serve(name: str, task: Task, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield that the arm is ready, then for each line one step: its loss, and what it took."""
    before = memory_kinds()["anonymous"]
    step = ARMS[name](task)
    yield {
        "anonymous_before": before,
        "threads": torch.get_num_threads(),
        "versions": {one: version(one) for one in PACKAGES},
    }
    for _ in lines:
        began = Spent.now()
        loss = step()
        yield {"loss": loss, **Spent.now().since(began), "file": memory_kinds()["file"]}


def main() -> None:
    """Talk to `peers.py`: lines in on stdin, JSON out on stdout; whatever libraries print goes
    to stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    name = sys.argv[1]
    task = Task(**json.loads(sys.argv[2]))
    for answer in _serve(name, task, sys.stdin):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
