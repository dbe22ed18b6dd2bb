"""vLLM's own loader reads exported adapters of experts as PEFT merges them.

It opens the model twice: as it is, and as `lema merge` writes it with PEFT's sum. What it makes
of the exported adapter is the difference of their weights, for every expert.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from servedmodels import measured, model_of, trained
from vllmloader import added, loading, weights

from lema.convert import merge_adapter
from lema.convert.serving.export import export_adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

ROUNDED = 2e-7  # the sum of a weight and its change is rounded to float32
APART = (
    "deepseek_v2",
    "ernie4_5_moe",
    "exaone_moe",
    "jamba",
    "laguna",
    "lfm2_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
STACKED = ("gpt_oss", "qwen3_5_moe")


@pytest.fixture(scope="module", autouse=True)
def _vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with loading(tmp_path_factory.mktemp("vllm") / "rendezvous"):
        yield


@pytest.mark.parametrize("model_type", [*APART, *STACKED])
def test_every_expert_has_its_own_product(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type, tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    exported = export_adapter(adapter, tmp_path / "exported", "vllm")
    assert ("is_3d_lora_weight" in exported.line) == (model_type in STACKED)
    assert bool(exported.experts) == (model_type in APART)
    merge_adapter(adapter, tmp_path / "merged")
    before = weights(model)
    after = weights(tmp_path / "merged")
    changes = {
        name: after[name] - tensor
        for name, tensor in before.items()
        if not torch.equal(tensor, after[name])
    }
    products = added(model, tmp_path / "exported")
    assert changes.keys() == {name for name, product in products.items() if product.any()}
    experts = [name for name in changes if name.endswith(("w13_weight", "w2_weight"))]
    assert len(experts) >= 2
    for name in experts:
        assert all(change.abs().max() > 0.01 for change in changes[name])
    worst = max((products[name] - change).abs().max().item() for name, change in changes.items())
    measured(f"{model_type}, weights by vLLM's loader", worst, ROUNDED)


def test_vllm_refuses_the_adapter_that_was_not_exported(tmp_path: Path) -> None:
    model = model_of("mixtral", tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="contains fused 3D MoE weights"):
        added(model, adapter)
