"""Models, their adapters, and adapters cut up: what the tests of shards stand on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreignadapter import ATTENTION, HEAD_DIM, MLP, Shape, write_foreign
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

GOLDEN = Path(
    os.environ.get(
        "LEMA_GOLDEN", Path(__file__).parents[3] / "shared/golden/optimum_neuron_tp2_kv1"
    )
).absolute()
golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"the adapter of a real run is not at {GOLDEN} (LEMA_GOLDEN)"
)

LAYERS = 8
HEADS = 8
HIDDEN = 24
INTERMEDIATE = 64
VOCABULARY = 50
RANK = 3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
O_PROJ = f"{ATTENTION.format(0)}.o_proj"
ONE_A = ({"q": "q", "k": "q", "v": "q"}, {"gate": "gate", "up": "gate"})


def model_config(kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=32,
    )


def write_model(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def write_adapter(
    model: Path, directory: Path, targets: list[str] | None = None, **options: Any
) -> Path:
    """Save an adapter whose every number is random, B too, and the same model is its base."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(model)
    lora = LoraConfig(
        r=RANK, lora_alpha=7, target_modules=targets or TARGETS, task_type="CAUSAL_LM", **options
    )
    adapted = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * (1 if "lora_" in name else 0.01))
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


def with_one_a(adapter: Path) -> dict[str, Tensor]:
    """The adapter's tensors, after those projections that are to be fused have been given one A,
    on disk too.
    """
    tensors = load_file(adapter / "adapter_model.safetensors")
    for layer in range(LAYERS):
        for base, same in zip((ATTENTION, MLP), ONE_A, strict=True):
            for name, other in same.items():
                key = f"{base.format(layer)}.{{}}_proj.lora_A.weight"
                tensors[key.format(name)] = tensors[key.format(other)].clone()
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


def config_of(adapter: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return content


def assert_same(directory: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(directory / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def logits(model: Path, adapter: Path) -> Tensor:
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    with torch.no_grad():
        answer: Tensor = loaded(torch.arange(1, 12)[None]).logits
    return answer


def adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    """Return what writes (once) a model with so many heads of keys, and an adapter of it."""
    made: dict[int, tuple[Path, Path]] = {}

    def write(kv_heads: int) -> tuple[Path, Path]:
        if kv_heads not in made:
            root = tmp_path_factory.mktemp(f"kv{kv_heads}")
            model = write_model(model_config(kv_heads), root / "model")
            made[kv_heads] = model, write_adapter(model, root / "adapter")
        return made[kv_heads]

    return write


def write_foreign_of(adapter: Path, directory: Path) -> Path:
    """Write foreign shards of an adapter with two heads of keys over four ranks."""
    copy = Path(shutil.copytree(adapter, directory / "adapter"))
    return write_foreign(
        directory / "run", with_one_a(copy), config_of(copy), Shape(4, HEADS, 2, 2)
    )


def rank_file(foreign: Path, rank: int) -> Path:
    return foreign / f"adapter_shards/model/dp_rank_00_tp_rank_{rank:02}_pp_rank_00.pt"


def change(foreign: Path, rank: int, name: str, value: Tensor | None) -> None:
    """Give a tensor of a rank another value, or take it away."""
    held = torch.load(rank_file(foreign, rank), weights_only=True)
    if value is None:
        del held[name]
    else:
        held[name] = value
    torch.save(held, rank_file(foreign, rank))
