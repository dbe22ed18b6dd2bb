"""Steps of divided, streamed models, the same whatever the number of processes; run alone, it is
the reference.

`main` runs on every rank: all cases one after the other; what each found is compared with what one
process has written into a directory, and the first rank writes how far off it is.
"""

import json
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.backend import Exchange, Parallel
from lema.backend.group import first_alone
from lema.convert.prepare import prepare
from lema.engine.head.loss import split_batch
from lema.errors import ConfigError
from lema.model.partition import layout_of, planned_parallel, whole_tensor
from lema.plan import Allocation
from lema.plan.blueprint import draw_up
from lema.plan.memory import device_parts
from lema.plan.work.meter import Tally
from lema.plan.work.step import demand_of, step_shape
from lema.plan.work.workload import measure
from lema.train.steps import no_event

LAYERS = 8
ROWS = 4
LENGTH = 16
STEPS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 67,  # which neither 2 nor 4 divide
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8}),
    "llama, 2 kv": ("llama", {"num_key_value_heads": 2}),
    "qwen3, 2 kv": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral, 1 kv": (
        "mistral",
        {"num_key_value_heads": 1, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "mixtral, 2 kv": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "experts stored one by one": ("qwen3_moe", {"num_key_value_heads": 2, "head_dim": 8} | EXPERTS),
    "int8": ("llama", {"num_key_value_heads": 2}),
    "nf4": ("llama", {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}),
    "wide": (
        "llama",
        {"hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 128},
    ),
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
    """Some of the ways; every model with and without sequence parallelism, in memory:
    `test_neuron_ranks`.
    """
    if size == 2:
        yield Case("llama, 2 kv", False, {"strategy": "resident", "max_grad_norm": None})
        yield Case("llama", True)
        yield Case("mistral, 1 kv", False)
        yield Case("llama", False)
        yield Case("qwen3, 2 kv", True)
        yield Case("llama, 2 kv", True, {"gradient_checkpointing": False})
        yield Case("llama", False, {"loss_chunk_tokens": 5, "label_smoothing_factor": 0.1})
        yield Case("llama", False, {"lora_target_modules": ["q_proj", "lm_head"]})
        yield Case("llama", False, {"lora_modules_to_save": ["embed_tokens"]})
        yield Case("llama, 2 kv", True, {"lora_use_dora": True, "lora_dropout": 0.1})
        yield Case("experts stored one by one", False)
        yield Case("experts stored one by one", True)
        yield Case("int8", False, {"strategy": "resident"})
        yield Case("nf4", True, {"adam_epsilon": 1e-3})
    else:
        yield Case("mistral, 1 kv", True)
        yield Case("mixtral, 2 kv", False, {"lora_target_parameters": []})
        yield Case("mixtral, 2 kv", True, {"adam_epsilon": 1e-3})
        yield Case("llama, 2 kv", True, {"tensor_parallel_size": 2})


def write_models(directory: Path) -> None:
    for name, (kind, changes) in MODELS.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(
            stored := directory / "stored" / name
        )
        if name.startswith("experts stored"):
            (directory / "stored" / name).rename(directory / name)
            continue
        # Experts are stored otherwise than they are used.
        prepare(stored, directory / name, quantize=name if name in ("int8", "nf4") else None)


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


class Numbers:
    """What stands for a tokenizer: texts are numbers of tokens."""

    name_or_path = "numbers"
    pad_token_id = 0
    bos_token_id = None
    eos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


def said(model: LemaModel, **options: Any) -> Tensor:
    """The tokens that follow two prompts."""
    model.files.__dict__["tokenizer"] = Numbers()
    texts = model.generate(["5 9 33 17", "40 2"], max_new_tokens=6, **options)
    # a text that has ended is shorter
    rows = [[int(word) for word in text.split()] for text in texts]
    return torch.tensor([row + [0] * (6 - len(row)) for row in rows])


def train(
    config: LemaConfig, saved: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Take some steps; return what was found, whole, and how many bytes this process has read: of
    layers in the last step, and outside of layers."""
    found: dict[str, Tensor] = {}
    torch.manual_seed(9)  # for dropout
    with closing(LemaModel(config)) as model:
        parallel = model.backend.parallel
        replicas = model.backend.replicas
        model.initialize_lora()
        assert model.lora_manager is not None
        outside = model._opened.stored.reader.bytes_read
        model.spend(Allocation(3))  # else every layer stays: `looked_at`
        rows = {name: one[replicas.rank :: replicas.size] for name, one in batch().items()}
        logits: list[Tensor] = []
        model.adapter.evaluate(split_batch(rows, 2), logits)
        if replicas.size == 1:
            found["logits"] = torch.cat(logits)
        trainer = model.get_trainer()
        losses = []
        for step in range(STEPS):
            gradients: dict[str, Tensor] = {}

            def note(event: str, gradients: dict[str, Tensor] = gradients) -> None:
                if event == "on_pre_optimizer_step":
                    for name, one in model.lora_manager.named_parameters():  # type: ignore[union-attr]
                        if one.grad is not None:
                            gradients[name] = whole_tensor(
                                parallel, one.grad, layout_of(one)
                            ).clone()

            before = model.adapter.counters.bytes_read
            result = trainer.accumulate(
                split_batch(rows, 2), on_event=note if step == 0 else no_event
            )
            losses.append(result.loss)
            found |= {f"gradient {name}": one for name, one in gradients.items()}
        read = model.adapter.counters.bytes_read - before
        found["losses"] = torch.tensor(losses)
        found["norm"] = torch.tensor(result.grad_norm or 0.0)
        for name, one in model.lora_manager.named_parameters():
            if one.requires_grad:
                found[f"after {name}"] = whole_tensor(
                    parallel, one.detach(), layout_of(one)
                ).clone()
        if not config.sequence_parallel:
            found["tokens"] = said(model)
        if saved is not None:
            trainer.save_checkpoint(saved)
            extra = trainer.load_checkpoint(saved)
            assert extra == {} and trainer.global_step == STEPS
            again = trainer.accumulate(split_batch(rows, 2))
            found["loss after resuming"] = torch.tensor(again.loss)
    return found, {"read": read, "outside": outside}


def reference(directory: Path, names: Collection[str]) -> dict[str, dict[str, int]]:
    """Train the named cases in one process; return how many bytes each reads."""
    read = {}
    for case in [*cases(2), *cases(4)]:
        if str(case) not in names or (file := directory / f"{case}.safetensors").exists():
            continue
        alone = {"sequence_parallel": False, "device": "cpu", "tensor_parallel_size": None}
        found, read[str(case)] = train(
            config_of(directory, case, **alone), directory / f"saved {case}"
        )
        save_file({name: one.contiguous() for name, one in found.items()}, file)
    return read


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor], kind: str) -> float:
    """The largest difference of one kind of tensors: relative to the largest number in each, or, of
    adapters after some steps, of norms: AdamW makes steps of one length of gradients that are next
    to nothing, and of their rounding."""
    names = [name for name in found if name.startswith(kind)]
    assert names and set(names) == {name for name in wanted if name.startswith(kind)}, (
        f"{kind}: other tensors"
    )
    order = 2.0 if kind == "after" else float("inf")

    def size(one: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(one.double(), order)
        return length

    return max(
        float(size(found[name] - wanted[name]) / size(wanted[name]).clamp_min(1e-6))
        for name in names
    )


def compared(directory: Path, case: Case, size: int) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "device": "neuron",
        "neuron_runtime": "emulated",
        "sequence_parallel": case.sequence_parallel,
    }
    saved = directory / f"saved by {size}" / str(case)
    found, read = train(config_of(directory, case, **shared), saved)
    wanted = load_file(directory / f"{case}.safetensors")
    for kind in ("logits", "tokens"):
        if kind not in found:
            wanted.pop(kind)
    told = ("logits", "tokens", "gradient", "losses", "norm", "after", "loss after")
    kinds = [kind for kind in told if kind in str(wanted.keys())]
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
        measured |= read
        first_alone(replicas, lambda: None)
    return measured


def looked_at(directory: Path, sequence_parallel: bool) -> dict[str, Any]:
    """Of a run whose settings leave memory to the backend: what is read, what a plan told, what
    text it makes.
    """
    torch.distributed.barrier()
    size = torch.distributed.get_world_size()
    settings: dict[str, Any] = {
        "device": "neuron",
        "neuron_runtime": "emulated",
        "tensor_parallel_size": size,
    }
    settings |= {"max_length": 96, "batch_size": 6, "micro_batch_size": 2, "loss_chunk_tokens": 64}
    config = config_of(
        directory, Case("wide", sequence_parallel), **settings, sequence_parallel=sequence_parallel
    )
    ids = torch.randint(1, SHAPE["vocab_size"], (2, 96), generator=torch.Generator().manual_seed(1))
    micro = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    read: list[int] = []
    with closing(LemaModel(config)) as model, sends() as wire:
        model.initialize_lora()
        stays = len(model.allocation.residents)
        model.skeleton.train()
        for _ in range(2):  # the first makes what later steps use again
            for parameter in model.get_trainable_parameters():
                parameter.grad = None
            before = model.adapter.counters.bytes_read
            wire.clear()
            with Tally(model.backend.parallel) as tally:
                tally.leave_out(
                    [*model.skeleton.parameters(), *model.skeleton.buffers(), *micro.values()]
                )
                ring = [buffer.memory for buffer in model.memory._ring.buffers]
                tally.leave_out([*model.memory._resident.slots.values(), *ring])
                model.adapter.loss([micro] * 3).backward()
            exchanged = tally.exchanged
            sent = list(wire)
            read.append(model.adapter.counters.bytes_read - before)
        refused = ""
        if sequence_parallel:
            try:
                said(model)
            except ConfigError as error:
                refused = str(error.where)
            sampled = None
        else:
            torch.manual_seed(torch.distributed.get_rank())
            sampled = said(model, do_sample=True, temperature=2.0).tolist()
    told, exchange = told_by_a_plan(config)
    return {
        "stays": stays,
        "read": read,
        "peak": tally.peak,
        "told": told,
        "exchanged": [exchanged.count, exchanged.nbytes],
        "sent": sent,
        "told exchanged": [exchange.count, exchange.nbytes],
        "refused": refused,
        "sampled": sampled,
    }


@contextmanager
def sends() -> Iterator[list[int]]:
    """The bytes that a ring of the processes sends for each collective that `torch.distributed`
    is asked for.
    """
    dist: Any = torch.distributed
    size = dist.get_world_size()
    found = list[int]()
    kept = (dist.all_reduce, dist.all_gather)

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        found.append(2 * tensor.nbytes * (size - 1) // size)
        return kept[0](tensor, **options)

    def all_gather(every: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        found.append(tensor.nbytes * (size - 1))
        return kept[1](every, tensor, **options)

    dist.all_reduce = all_reduce
    dist.all_gather = all_gather
    try:
        yield found
    finally:
        dist.all_reduce, dist.all_gather = kept


def told_by_a_plan(config: LemaConfig) -> tuple[int, Exchange]:
    """What a step of one process makes on its device, by a plan, and what it exchanges; there is no
    optimizer, gradients alone are made."""
    blueprint = draw_up(config, parallel=planned_parallel(config))
    shape = step_shape(config, 128, parts=blueprint.parallel.size)
    micro = shape.micro_batch
    chunk = config.loss_chunk_tokens
    work = measure(blueprint.model, blueprint.layers, micro, chunk, parallel=blueprint.parallel)
    (forward, again, backward), times = work.works[0].exchanges, shape.num_micro_batches
    assert len(work.works) == 1
    exchanged = work.entered.plus(work.head.exchange).plus(forward, LAYERS).plus(again, LAYERS - 1)
    exchanged = exchanged.plus(backward, LAYERS).plus(
        lowest_input(blueprint.parallel, config, micro.tokens), -1
    )
    demand = demand_of(
        blueprint.layers,
        work,
        None,
        shape,
        outside_bytes=0,
        adapter_bytes=blueprint.adapter_bytes // 4,
        lowest=blueprint.lowest_adapted,
        shared=True,
    )
    told = (
        sum(device_parts(demand, Allocation(3)).values())
        - device_parts(demand, Allocation(3))["slots"]
    )
    return told, Exchange().plus(exchanged, int(times))


def lowest_input(parallel: Parallel, config: LemaConfig, tokens: int) -> Exchange:
    """The sum of the gradient of what the lowest layer is given: nothing below trains, so it is not
    formed. A plan counts every layer as one of those above."""
    hidden = MODELS["wide"][1]["hidden_size"] * 4
    return Exchange(
        1,
        (1 if config.sequence_parallel else 2)
        * tokens
        * hidden
        * (parallel.size - 1)
        // parallel.size,
    )


def main(directory: Path, names: Collection[str]) -> None:
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    size = dist.get_world_size()
    works: dict[str, Callable[[], Any]] = {
        str(case): partial(compared, directory, case, size) for case in cases(size)
    }
    if size == 2:
        works |= {
            f"looked at {shared}": partial(looked_at, directory, shared) for shared in (False, True)
        }
    for name, work in ((name, work) for name, work in works.items() if name in names):
        try:
            measured: Any = work()
        except Exception:  # noqa: BLE001 - reported under its name
            measured = traceback.format_exc()
        every: list[Any] = [None] * size
        dist.all_gather_object(every, measured)
        found[name] = every
    if dist.get_rank() == 0:
        (directory / f"found {dist.get_world_size()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
