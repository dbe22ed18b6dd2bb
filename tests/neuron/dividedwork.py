"""Steps of divided, streamed models, the same whatever the number of processes; run alone, it is the reference.

torchrun --nproc-per-node N dividedwork.py DIRECTORY: on every rank, all cases one after the other; what each found is
compared with what one process has written into DIRECTORY, and the first rank writes how far off it is.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.held import layout_of, whole_tensor
from lema.loss import split_batch
from lema.replicate import first_alone

LAYERS, ROWS, LENGTH, STEPS = 8, 4, 16, 5
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8}),
    "llama, 2 kv": ("llama", {"num_key_value_heads": 2}),
    "qwen3, 2 kv": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral, 1 kv": ("mistral", {"num_key_value_heads": 1, "sliding_window": 8}),
}


class Case(NamedTuple):
    """One way to train a model."""

    model: str
    sequence_parallel: bool
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def __str__(self) -> str:
        changes = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.model}{', sequence' * self.sequence_parallel}{', ' * bool(changes)}{changes}"


def cases(size: int) -> Iterator[Case]:
    """Some of the ways; every model with and without sequence parallelism, in memory: `test_neuron_ranks`."""
    if size == 2:
        yield Case("llama", False)
        yield Case("llama", True)
        yield Case("qwen3, 2 kv", True)
        yield Case("mistral, 1 kv", False)
        yield Case("llama, 2 kv", True, {"gradient_checkpointing": False})
        yield Case("llama, 2 kv", False, {"strategy": "resident", "max_grad_norm": None})
    else:
        yield Case("mistral, 1 kv", True)
        yield Case("llama, 2 kv", False)
        yield Case("llama, 2 kv", True, {"tensor_parallel_size": 2})


def write_models(directory: Path) -> None:
    for name, (kind, changes) in MODELS.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)


def batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(1, SHAPE["vocab_size"], (ROWS, LENGTH), generator=drawn)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def config_of(directory: Path, case: Case, **options: Any) -> LemaConfig:
    settings: dict[str, Any] = {
        "gradient_checkpointing": True,
        "max_grad_norm": 0.5,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "output_dir": str(directory / "out"),
    }
    return LemaConfig(str(directory / case.model), **{**settings, **case.settings, **options})


def train(config: LemaConfig, saved: Path | None = None) -> tuple[dict[str, Tensor], int]:
    """Take some steps; return what was found, whole, and how many bytes this process has read of layers."""
    found: dict[str, Tensor] = {}
    with closing(LemaModel(config)) as model:
        parallel, replicas = model.backend.parallel, model.backend.replicas
        model.initialize_lora()
        assert model.lora_manager is not None
        rows = {name: one[replicas.rank :: replicas.size] for name, one in batch().items()}
        logits: list[Tensor] = []
        model.adapter.evaluate(split_batch(rows, 2), logits)
        if replicas.size == 1:
            found["logits"] = torch.cat(logits)
        trainer = model.get_trainer()
        losses = []
        for step in range(STEPS):
            gradients = {}

            def note(event: str, gradients: dict[str, Tensor] = gradients) -> None:
                if event == "on_pre_optimizer_step":
                    for name, one in model.lora_manager.named_parameters():  # type: ignore[union-attr]
                        if one.grad is not None:
                            gradients[name] = whole_tensor(parallel, one.grad, layout_of(one)).clone()

            before = model.adapter.counters.bytes_read
            result = trainer.accumulate(split_batch(rows, 2), on_event=note if step == 0 else None)
            losses.append(result.loss)
            found |= {f"gradient {name}": one for name, one in gradients.items()}
        read = model.adapter.counters.bytes_read - before
        found["losses"] = torch.tensor(losses)
        found["norm"] = torch.tensor(result.grad_norm or 0.0)
        for name, one in model.lora_manager.named_parameters():
            if one.requires_grad:
                found[f"after {name}"] = whole_tensor(parallel, one.detach(), layout_of(one)).clone()
        if saved is not None:
            trainer.save_checkpoint(saved)
            extra = trainer.load_checkpoint(saved)
            assert extra == {} and trainer.global_step == STEPS
            again = trainer.accumulate(split_batch(rows, 2))
            found["loss after resuming"] = torch.tensor(again.loss)
    return found, read


def reference(directory: Path) -> dict[str, int]:
    """Train each case in one process; return how many bytes each reads in a step."""
    read = {}
    for case in [*cases(2), *cases(4)]:
        if (file := directory / f"{case}.safetensors").exists():
            continue
        alone = {"sequence_parallel": False, "device": "cpu", "tensor_parallel_size": None}
        found, read[str(case)] = train(config_of(directory, case, **alone), directory / f"saved {case}")
        save_file({name: one.contiguous() for name, one in found.items()}, file)
    return read


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor], kind: str) -> float:
    """The largest difference of one kind of tensors: relative to the largest number in each, or, of adapters after some
    steps, of norms: AdamW makes steps of one length of gradients that are next to nothing, and of their rounding."""
    names = [name for name in found if name.startswith(kind)]
    assert names and set(names) == {name for name in wanted if name.startswith(kind)}, f"{kind}: other tensors"
    order = 2.0 if kind == "after" else float("inf")

    def size(one: Tensor) -> Tensor:
        return torch.linalg.vector_norm(one.double(), order)

    return max(float(size(found[name] - wanted[name]) / size(wanted[name]).clamp_min(1e-6)) for name in names)


def compared(directory: Path, case: Case, size: int) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "device": "neuron",
        "neuron_runtime": "emulated",
        "sequence_parallel": case.sequence_parallel,
    }
    saved = directory / f"saved by {size}" / str(case)
    found, read = train(config_of(directory, case, **shared), saved)
    wanted = load_file(directory / f"{case}.safetensors")
    if "logits" not in found:
        wanted.pop("logits")
    kinds = [
        kind for kind in ("logits", "gradient", "losses", "norm", "after", "loss after") if kind in str(wanted.keys())
    ]
    measured: dict[str, Any] = {kind: furthest(found, wanted, kind) for kind in kinds}
    # What one process has saved goes on in several.
    with closing(LemaModel(config_of(directory, case, **shared))) as model:
        model.initialize_lora()
        trainer = model.get_trainer()
        trainer.load_checkpoint(directory / f"saved {case}")
        replicas = model.backend.replicas
        rows = {name: one[replicas.rank :: replicas.size] for name, one in batch().items()}
        loss = trainer.accumulate(split_batch(rows, 2)).loss
        measured["taken over"] = abs(loss - float(wanted["loss after resuming"]))
        measured["read"] = read
        first_alone(replicas, lambda: None)
    return measured


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for case in cases(dist.get_world_size()):
        try:
            measured: Any = compared(directory, case, dist.get_world_size())
        except Exception:  # noqa: BLE001 - reported under its name
            measured = traceback.format_exc()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, measured)
        found[str(case)] = every
    if dist.get_rank() == 0:
        (directory / f"found {dist.get_world_size()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
