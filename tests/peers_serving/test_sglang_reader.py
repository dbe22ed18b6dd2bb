"""SGLang's own reader of adapters has the products that PEFT merges. No server of SGLang runs
here: it needs a GPU.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from servedmodels import measured, model_of, trained
from sglangloader import read_by_sglang
from torch import Tensor

from lema.convert import merge_adapter
from lema.convert.serving.export import export_adapter
from lema.errors import ConfigError
from lema.lora.serving.servers import SERVERS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

ROUNDED = 2e-7  # the sum of a weight and its change is rounded to float32
MIXTURES = ("mixtral", "olmoe", "qwen3_moe")
# What SGLang stacks into one matrix, in its order.
STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PUBLISHED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # in Mixtral


def pieces(tensors: dict[str, Tensor], scale: float) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each module, and the products of its stacked factors, which have as many columns of
    B together as there are matrices: SGLang multiplies each part of A with its rows of B."""
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            parts = a.chunk(a.shape[0] // b.shape[1])
            yield name.removesuffix(".lora_A.weight"), [b, *parts, torch.tensor(scale)]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", *MIXTURES])
def test_sglang_s_reader_has_the_products(model_type: str, tmp_path: Path) -> None:
    assert version("sglang") == SERVERS["sglang"].release
    model = model_of(model_type, tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    export_adapter(adapter, tmp_path / "exported", "sglang")
    merge_adapter(adapter, tmp_path / "merged")
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    changes = {
        name.removesuffix(".weight"): after[name] - tensor
        for name, tensor in before.items()
        if not torch.equal(tensor, after[name])
    }
    tensors, scale = read_by_sglang(model, tmp_path / "exported")
    worst = 0.0
    for module, (b, *parts, factor) in pieces(tensors, scale):
        place, _, leaf = module.removeprefix("base_model.model.").rpartition(".")
        names = [leaf] if f"{place}.{leaf}" in changes else list(STACKS.get(leaf, (leaf,)))
        if f"{place}.{names[0]}" not in changes:
            names = [PUBLISHED[name] for name in names]
        targets = [changes.pop(f"{place}.{name}") for name in names]
        # One matrix that the base has fused: SGLang repeats A, and each part has its own rows.
        same = len(targets) == 1
        assert same or len(parts) == len(targets)
        rows = b.split([target.shape[0] for target in targets])
        for target, part, own in zip(targets, parts, rows, strict=False):
            worst = max(worst, (own @ part * factor - target).abs().max().item())
        assert not same or all(torch.equal(part, parts[0]) for part in parts)
    assert not changes, sorted(changes)[:3]
    single = [name for name in tensors if re.search(r"\.experts\.\d+\.", name)]
    assert bool(single) == (model_type in MIXTURES)
    measured(f"{model_type}, weights by SGLang's reader", worst, ROUNDED)


def test_sglang_s_reader_fails_on_queries_without_values(tmp_path: Path) -> None:
    """For which the export is refused."""
    model = model_of("llama", tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter", lora_target_modules=["q_proj", "k_proj"])
    with pytest.raises(KeyError, match="v_proj"):
        read_by_sglang(model, adapter)
    with pytest.raises(ConfigError, match="q_proj without v_proj"):
        export_adapter(adapter, tmp_path / "exported", "sglang")
