"""vLLM's own loader reads exported adapters as PEFT merges them, of every type that it opens here.

It opens the model twice: as it is, and as `lema merge` writes it with PEFT's sum. What it makes
of the exported adapter is the difference of their weights, for every matrix and every expert.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from everytype import STREAMED
from publishedclass import published_class
from servedmodels import measured, model_of, trained
from tinyconfig import tiny_config
from vllmloader import added, loading, registry, supports_lora, weights

from lema.convert import merge_adapter
from lema.convert.serving.export import export_adapter
from lema.errors import ConfigError, ModelError
from lema.lora.serving.servers import SERVERS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

# All types without adapters of experts that vLLM's classes open on a CPU with tiny configs, and for
# which they take adapters.
DENSE = [
    "apertus",
    "arcee",
    "bert-generation",
    "biogpt",
    "bitnet",
    "chameleon",
    "cohere",
    "cohere2",
    "ctrl",
    "cwm",
    "doge",
    "ernie4_5",
    "exaone4",
    "exaone4_5",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "gpt_neox",
    "granite",
    "granite_swa",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "idefics3",
    "internvl",
    "jais2",
    "jetmoe",
    "llama",
    "minicpm3",
    "minicpmv4_6",
    "minicpmv4_7",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "moshi",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_vl",
    "seed_oss",
    "smollm3",
    "smolvlm",
    "starcoder2",
    "vaultgemma",
    "youtu",
]
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


@pytest.mark.parametrize("model_type", [*DENSE, *APART, *STACKED])
def test_every_matrix_and_every_expert_has_its_product(model_type: str, tmp_path: Path) -> None:
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
    assert bool(experts) == (model_type not in DENSE)
    for name in experts:
        assert all(change.abs().max() > 0.01 for change in changes[name])
    worst = max((products[name] - change).abs().max().item() for name, change in changes.items())
    measured(f"{model_type}, weights by vLLM's loader", worst, ROUNDED)


def test_vllm_refuses_or_drops_experts_that_were_not_exported(tmp_path: Path) -> None:
    """It refuses those whose names it knows, and drops the others without a word."""
    for model_type in ("qwen3_moe", "mixtral"):
        model_of(model_type, tmp_path / model_type)
        trained(tmp_path / model_type, tmp_path / f"{model_type}-adapter")
    with pytest.raises(ValueError, match="contains fused 3D MoE weights"):
        added(tmp_path / "qwen3_moe", tmp_path / "qwen3_moe-adapter")
    products = added(tmp_path / "mixtral", tmp_path / "mixtral-adapter")
    assert {"w13_weight", "w2_weight"} <= {name.rpartition(".")[2] for name in products}
    assert {"weight"} == {name.rpartition(".")[2] for name in products if products[name].any()}


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama4_text"])
def test_modules_that_vllm_misreads_are_refused(model_type: str, tmp_path: Path) -> None:
    """vLLM says nothing, so the export does. Of these, names are those of published files."""
    model = model_of(model_type, tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"which it leaves out|rows it has in another order"):
        export_adapter(adapter, tmp_path / "exported", "vllm")
    merge_adapter(adapter, tmp_path / "merged")
    before = weights(model)
    after = weights(tmp_path / "merged")
    products = added(model, adapter)
    wrong = [
        name
        for name, tensor in before.items()
        if not torch.allclose(products.get(name, torch.tensor(0.0)), after[name] - tensor, atol=0.1)
    ]
    assert len(wrong) == len([name for name in wrong if ".attn." in name or "qkv_proj" in name]) > 0


def test_classes_without_adapters_are_those_of_vllm() -> None:
    """And those that it runs by the code of `transformers`, where they have experts."""
    refused = set[str]()
    borrowed = set[str]()
    for name in published():
        if name in registry._VLLM_MODELS:
            kind = registry.ModelRegistry.models[name].load_model_cls()
            if kind.__name__.startswith("TransformersMoE"):
                borrowed.add(name)
            elif not supports_lora(kind):
                refused.add(name)
    assert refused == SERVERS["vllm"].without_adapters
    unknown = SERVERS["vllm"].without_experts - registry._VLLM_MODELS.keys()
    assert borrowed <= SERVERS["vllm"].without_experts
    assert SERVERS["vllm"].without_experts == borrowed | unknown


def published() -> set[str]:
    """The published classes of all types that stream."""
    names = set[str]()
    for model_type in STREAMED:
        with suppress(ModelError):
            names.add(published_class(tiny_config(model_type)).__name__)
    return names
