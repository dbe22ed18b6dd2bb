"""Cases for several ranks: tiny models, parallelized and adapted, against transformers and PEFT
in one process.
"""

from collections.abc import Callable
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from covering import cases as product_cases
from covering import covering
from neuronlayers import far, numbers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

import lema_neuron.peft as parallel
from lema_neuron.comm import Comm, Solo
from lema_neuron.gradients import global_norm, part_of, parts, reduce_gradients
from lema_neuron.parallelize import parallelize

LAYERS = 8
IDS = 96
SIZES = {
    "vocab_size": IDS,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **given: LlamaConfig(attention_bias=True, mlp_bias=True, **SIZES, **given),
    "qwen3": lambda **given: Qwen3Config(head_dim=8, **SIZES, **given),
    "mistral": lambda **given: MistralConfig(sliding_window=5, **SIZES, **given),
    "mixtral": lambda **given: MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, **SIZES, **given
    ),
    "phi3": lambda **given: Phi3Config(**SIZES, **given),
}


AXES = {
    "name": ("llama", "qwen3", "mistral", "mixtral"),
    "heads": ("equal", "fewer"),
    "sp": ("tokens", "sequence"),
}
# With others a gradient is so small beside its terms that single precision alone, in one process,
# is off by 1e-5.
SEEDS = {"mixtral": 6}


def whole_model(
    name: str, kv_heads: int, dtype: torch.dtype = torch.float32, layers: int = LAYERS
) -> Any:
    """The same on every rank."""
    torch.manual_seed(SEEDS.get(name, 1))
    config = CONFIGS[name](num_key_value_heads=kv_heads, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def lora(name: str, dropout: float = 0.0, dora: bool = False) -> LoraConfig:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if name == "mixtral" else "all-linear"
    given: dict[str, Any] = {"lora_dropout": dropout, "use_dora": dora, "target_modules": targets}
    return LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **given)


def batch() -> dict[str, Tensor]:
    ids = torch.arange(2 * 12).view(2, 12) * 37 % (IDS - 3) + 3
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@cache
def in_one_process(
    name: str,
    kv_heads: int,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
) -> tuple[dict[str, Tensor], Any]:
    """The adapter, and what transformers and PEFT compute with it: loss, logits, and its
    gradients.
    """
    alone = get_peft_model(whole_model(name, kv_heads, dtype), lora(name, dropout, dora))
    trained = {path: one for path, one in alone.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for path, parameter in trained.items():
            drawn = numbers(path, *parameter.shape) * 0.1
            parameter.copy_(parameter * (1 + drawn) if "magnitude" in path else drawn)
    torch.manual_seed(5)
    output = alone(**batch())
    output.loss.backward()
    found = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    return {path: one.detach() for path, one in trained.items()}, found | {
        path: one.grad for path, one in trained.items()
    }


def model_case(
    comm: Comm,
    name: str,
    kv_heads: int,
    sequence: bool,
    kv_layout: Any = "tile",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
    **given: Any,
) -> dict[str, float]:
    adapter, wanted = in_one_process(name, kv_heads, dropout, dtype, dora)
    model = whole_model(name, kv_heads, dtype)
    parallelize(model, comm, sequence_parallel=sequence, kv_layout=kv_layout, **given)
    over: Any = parallel.get_peft_model(model, lora(name, dropout, dora))
    over.load_adapter_state(adapter)
    torch.manual_seed(5)
    output = over(**batch())
    output.loss.backward()
    found = {one: far(getattr(output, one).detach(), wanted[one]) for one in ("loss", "logits")}
    trained = {path: one for path, one in over.named_parameters() if one.requires_grad}
    assert trained.keys() == adapter.keys()
    reduce_gradients(trained.values())
    known = parts(over, comm)
    for path, one in trained.items():
        part: Any = known[path]
        # copies are compared bit for bit
        found[path] = far(part.consolidate(one.grad, comm), wanted[path])
    norm = torch.stack([wanted[path].norm() for path in adapter]).norm()
    mine = global_norm(trained.values(), comm)
    found["norm"] = far(mine, norm.float())
    every = comm.all_gather(mine.view(1), 0)
    assert (every == every[0]).all()
    return found


def left_out(ranks: int) -> set[str]:
    """The cases of `AXES` that a session leaves out: it has every pair over 2 ranks, and a few
    others over 4.
    """
    pairs = {"-".join(case.values()) for case in covering(AXES, 2)}
    others = [
        name for case in product_cases(AXES) if (name := "-".join(case.values())) not in pairs
    ]
    return pairs.union(others) - set(others[::4]) if ranks == 4 else set(others)


def model_cases(ranks: int) -> dict[str, Callable[[Comm], dict[str, float]]]:
    """The cases, by name; of the key/value heads there are as many as query heads, or fewer than
    ranks.
    """
    few = ranks // 2
    cases: dict[str, Callable[[Comm], dict[str, float]]] = {
        "draw": drawn,
        "unreduced": unreduced,
        "saved": saved,
    }
    cases["magnitudes-saved"] = lambda comm: saved(comm, dora=True)
    for case in product_cases(AXES):
        name, heads, sp = case.values()
        given = (name, 8 if heads == "equal" else few, sp == "sequence")
        cases["-".join(case.values())] = lambda comm, given=given: model_case(comm, *given)
    cases["llama-fewer-interleave"] = lambda comm: model_case(
        comm, "llama", few, False, "interleave"
    )
    cases["llama-fewer-in-double"] = lambda comm: model_case(
        comm, "llama", few, True, dtype=torch.float64
    )
    cases["llama-dropout-tokens"] = lambda comm: model_case(comm, "llama", 4, False, dropout=0.3)
    cases["llama-dropout-sequence"] = lambda comm: model_case(comm, "llama", 4, True, dropout=0.3)
    for heads, sequence, dropout in (
        (few, True, 0.0),
        (8, False, 0.0),
        (few, False, 0.3),
        (8, True, 0.3),
    ):
        case_of = f"magnitudes-{'fewer' if heads == few else 'equal'}-{'sequence' if sequence else 'tokens'}"
        given = (heads, sequence, "tile", dropout)
        cases[f"{case_of}{'-dropout' if dropout else ''}"] = lambda comm, given=given: model_case(
            comm, "llama", *given, dora=True
        )
    cases["phi3-gathered"] = lambda comm: model_case(comm, "phi3", 4, True)
    cases["mixtral-whole-experts"] = lambda comm: model_case(
        comm, "mixtral", 4, True, replicated=("mlp.experts",)
    )
    return cases


def over_ranks(
    comm: Comm, sequence: bool = False, seed: int | None = None, dora: bool = False
) -> Any:
    model = whole_model("llama", 2)
    parallelize(model, comm, sequence_parallel=sequence)
    return parallel.get_peft_model(model, lora("llama", dora=dora), seed=seed)


def drawn(comm: Comm) -> dict[str, float]:
    """Initial values are those of one process; without a seed, those of the first rank's."""
    alone = over_ranks(Solo(), seed=7).adapter_state()
    mine = over_ranks(comm, seed=7).adapter_state()
    assert mine.keys() == alone.keys()
    found = {path: float((mine[path] - one).abs().max()) for path, one in alone.items()}
    assert any(one.any() for one in alone.values())
    torch.manual_seed(100 + comm.rank)
    unseeded = over_ranks(comm).adapter_state()  # raises where copies differ
    torch.manual_seed(100)
    again = over_ranks(Solo()).adapter_state()
    return found | {
        f"unseeded {path}": float((unseeded[path] - one).abs().max()) for path, one in again.items()
    }


def unreduced(comm: Comm) -> dict[str, float]:
    """What the reduction is for: under sequence parallelism without it, whole factors' gradients
    are others.
    """
    adapter, wanted = in_one_process("llama", 2)
    over = over_ranks(comm, sequence=True)
    over.load_adapter_state(adapter)
    over(**batch()).loss.backward()
    wrong = []
    for path, one in over.named_parameters():
        part: Any = part_of(one)
        if one.requires_grad and part.sum_over is not None and part.layout is None:
            wrong.append(far(one.grad, wanted[path]))
    return {"wrong": min(wrong)}


def saved(comm: Comm, dora: bool = False) -> dict[str, float]:
    """PEFT's own files, read by PEFT on the whole model, and by us over the ranks."""
    adapter, wanted = in_one_process("llama", 2, dora=dora)
    over = over_ranks(comm, sequence=True, dora=dora)
    begun = {name: one for name, one in over.adapter_state().items() if "magnitude" in name}
    fresh = (
        get_peft_model(whole_model("llama", 2), lora("llama", dora=dora)).state_dict()
        if dora
        else {}
    )
    first = {f"begins as PEFT's: {name}": far(one, fresh[name]) for name, one in begun.items()}
    assert bool(first) == dora
    over.load_adapter_state(adapter)
    folder: list[Any] = [mkdtemp() if comm.rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    over.save_pretrained(folder[0])
    read = PeftModel.from_pretrained(whole_model("llama", 2), folder[0])
    found = {**first, "read by PEFT": far(read(**batch()).logits.detach(), wanted["logits"])}
    model = whole_model("llama", 2)
    parallelize(model, comm)
    again = parallel.NeuronPeftModel.from_pretrained(model, folder[0])
    assert type(again) is parallel.NeuronPeftModelForCausalLM
    found["read again"] = far(again(**batch()).logits.detach(), wanted["logits"])
    kept = again.adapter_state()  # it does not train, and would be saved all the same
    assert kept.keys() == adapter.keys()
    found["kept"] = max(float((kept[path] - one).abs().max()) for path, one in adapter.items())
    merged = again.merge_and_unload()
    found["merged"] = far(merged(**batch()).logits.detach(), wanted["logits"])
    comm.barrier()
    if comm.rank == 0:
        rmtree(folder[0])
    return found
