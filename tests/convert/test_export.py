"""Adapters in the layouts of servers: no number changes, and what a server does not take is
refused by name.
"""

import json
import re
import shlex
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import STREAMED
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from publishedclass import publish
from safetensors.torch import load_file, save_file
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers import core_model_loading as loading

from lema import LemaConfig, LemaModel
from lema.convert.merge import merge_adapter
from lema.convert.serving.export import export_adapter
from lema.errors import AdapterError, ConfigError
from lema.lora.attach import lora_config
from lema.lora.merge import ADAPTER, wrapped
from lema.lora.serving.checks import published_names
from lema.lora.serving.experts import expert_parts, factors_of, parameter_wrappers
from lema.model import meta_model

PREFIX = "base_model.model."
# Published with a matrix for each expert; in one tensor; without experts.
APART = ("mixtral", "qwen3_moe", "deepseek_v2", "ernie4_5_moe")
TOGETHER = ("gpt_oss", "granitemoe")
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def saved(model_type: str, directory: Path, **settings: Any) -> Path:
    """An adapter whose factors are small whole numbers, so that no product of them is rounded."""
    publish(model_type, directory / "model")
    base = {"device": "cpu", "lora_rank": 4, "lora_alpha": 8}
    config = LemaConfig(str(directory / "model"), **(base | settings))
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.get_trainable_parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator).float())
        model.save_pretrained(directory / "adapter")
    return directory / "adapter"


def products(directory: Path) -> dict[str, Tensor]:
    """What each pair of factors in a directory adds, by the name of its matrix."""
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())

    def of(patterns: dict[str, Any], name: str, default: Any) -> Any:
        return next(
            (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)),
            default,
        )

    found = {}
    for name, a in tensors.items():
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            rank = of(config["rank_pattern"], module, config["r"])
            assert rank == a.shape[0] == b.shape[1]
            alpha = of(config["alpha_pattern"], module, config["lora_alpha"])
            found[module] = b @ a * (alpha / rank)
    return found


def trained(adapter: Path) -> dict[str, Tensor]:
    """What PEFT adds to each matrix of the published files."""
    with closing(LemaModel.from_pretrained(adapter, device="cpu")) as model:
        skeleton = model.skeleton
        added = dict[str, Tensor]()
        for name, module in wrapped(skeleton):
            for wrapper in parameter_wrappers(module):
                added[f"{name}.{wrapper.parameter_name}"] = delta(wrapper)
            if not parameter_wrappers(module):
                added[f"{name}.weight"] = delta(module)
    published = loading.revert_weight_conversion(skeleton, added)
    return {name.removesuffix(".weight"): tensor for name, tensor in published.items()}


def delta(module: Any) -> Tensor:
    """PEFT's own product of an adapted module, of its adapter alone."""
    if not isinstance(module, ParamWrapper):
        linear: Tensor = module.get_delta_weight(ADAPTER).detach()
        return linear
    # As `ParamWrapper.get_delta_weight` has it, which sends it to the device of the weight.
    wrapper: Any = module
    a = wrapper.lora_A[ADAPTER].weight.detach()
    b = wrapper.lora_B[ADAPTER].weight.detach()
    if wrapper.get_param().ndim == 2:  # the matrix of a router
        return b @ a * wrapper.scaling[ADAPTER]
    a = a.reshape(wrapper.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, wrapper.num_experts)
    sides = "e o i" if wrapper._did_swap_in_out_features else "e i o"
    stacked: Tensor = torch.einsum(f"o r e, e r i -> {sides}", b, a) * wrapper.scaling[ADAPTER]
    return stacked


# PEFT leaves shared experts of some types out.
@pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", APART)
@pytest.mark.parametrize("layout", ["per-expert", "vllm", "sglang"])
def test_experts_have_adapters_of_their_own_and_no_number_changes(
    model_type: str, layout: Any, tmp_path: Path
) -> None:
    adapter = saved(model_type, tmp_path)
    exported = export_adapter(adapter, tmp_path / "out", layout)
    found = products(tmp_path / "out")
    expected = trained(adapter)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    single = [name for name in found if re.search(r"\.experts\.\d+\.", name)]
    assert exported.experts == len(single) > 0
    assert bool(exported.line) == (layout != "per-expert")
    again = trained(tmp_path / "out")
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_adapters_of_single_experts_of_any_rank_are_read(tmp_path: Path) -> None:
    """As another program writes them: not for every expert, each matrix with factors of its own."""
    adapter = saved("mixtral", tmp_path)
    export_adapter(adapter, tmp_path / "out", "per-expert")
    file = tmp_path / "out" / "adapter_model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name in [*tensors]:
        module = name.rpartition(".lora_")[0]
        if ".experts.1." in name:
            del tensors[name]
        elif module.endswith(".w3"):  # rank 2 of 4
            shape = (2, tensors[name].shape[1]) if "_A" in name else (tensors[name].shape[0], 2)
            tensors[name] = torch.randint(-3, 4, shape, generator=generator).float()
    save_file(tensors, file, {"format": "pt"})
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    written["rank_pattern"] = {"w3": 2}
    written["alpha_pattern"] = {"w3": 4}
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(written))
    expected = products(tmp_path / "out")
    found = trained(tmp_path / "out")
    for name, delta_weight in found.items():
        assert torch.equal(delta_weight, expected.pop(name, torch.zeros_like(delta_weight)))
    assert not expected
    merge_adapter(tmp_path / "out", tmp_path / "merged")

    del written["alpha_pattern"]
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(written))
    with pytest.raises(AdapterError, match="are scaled by"):
        LemaModel.from_pretrained(tmp_path / "out", device="cpu")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT's own keys
def test_such_an_adapter_is_what_peft_reads(tmp_path: Path) -> None:
    adapter = saved("qwen3_moe", tmp_path)
    export_adapter(adapter, tmp_path / "out", "per-expert")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, tmp_path / "out")
    expected = get_peft_model_state_dict(whole)
    with closing(LemaModel.from_pretrained(tmp_path / "out", device="cpu")) as model:
        model.save_pretrained(tmp_path / "read")
    found = load_file(tmp_path / "read" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_and_scales_of_modules_stay(tmp_path: Path) -> None:
    adapter = saved(
        "mixtral",
        tmp_path,
        lora_rank_pattern={"experts.down_proj": 2, "k_proj": 8},
        lora_alpha_pattern={"experts.gate_up_proj": 4},
    )
    export_adapter(adapter, tmp_path / "out", "vllm")
    found = products(tmp_path / "out")
    expected = trained(adapter)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="ranks and scales by module"):
        export_adapter(adapter, tmp_path / "other", "sglang")
    assert not (tmp_path / "other").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", TOGETHER)
def test_experts_that_are_published_in_one_tensor(model_type: str, tmp_path: Path) -> None:
    """vLLM reads those of some types as PEFT writes them, with the first product's inside."""
    adapter = saved(model_type, tmp_path)
    with pytest.raises(ConfigError, match="no published matrices of their own"):
        export_adapter(adapter, tmp_path / "apart", "per-expert")
    with pytest.raises(ConfigError, match=r"SGLang .* no published file has as matrices"):
        export_adapter(adapter, tmp_path / "sglang", "sglang")
    if model_type != "gpt_oss":
        with pytest.raises(ConfigError, match=r"vLLM .* no published file has as matrices"):
            export_adapter(adapter, tmp_path / "vllm", "vllm")
        return
    exported = export_adapter(adapter, tmp_path / "vllm", "vllm")
    assert '"is_3d_lora_weight": true' in exported.line
    assert exported.line in (tmp_path / "vllm" / "SERVE.md").read_text()
    tensors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    names = [name for name in tensors if ".0.mlp.experts." in name]
    hidden = tiny_config("gpt_oss").hidden_size
    for name in names:
        is_inner = ".base_layer." in name
        is_a = name.endswith("lora_A.weight")
        assert (tensors[name].shape[-1] == hidden) == (is_inner and is_a) or not is_a
    assert len(names) == 4
    export_adapter(adapter, tmp_path / "peft", "peft")
    ours = load_file(adapter / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_use_dora": True}, "DoRA"),
        ({"lora_bias": "all"}, "trained biases"),
        ({"lora_modules_to_save": ["lm_head"]}, "modules that train whole"),
        ({"lora_trainable_token_indices": [1, 2]}, "trained rows of embeddings"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "embeddings and the head"),
    ],
)
def test_what_a_server_does_not_take_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    adapter = saved("llama", tmp_path, **settings)
    for server, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(ConfigError, match=rf"{title} .* does not take .*{words}"):
            export_adapter(adapter, tmp_path / "out", server)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_use_dora": True}, "DoRA"),
        ({"lora_bias": "all"}, "trained biases"),
        ({"lora_modules_to_save": ["lm_head"]}, r"modules that train whole \(.*lm_head\)"),
        ({"lora_trainable_token_indices": [3, 5]}, "trained rows"),
        (
            {"lora_target_modules": ["q_proj", "embed_tokens"]},
            r"embeddings \(model\.embed_tokens\)",
        ),
    ],
)
def test_what_is_not_factors_of_a_matrix_has_no_place_beside_them(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    adapter = saved("llama", tmp_path, **settings)
    with pytest.raises(ConfigError, match=rf"has no place for .*{words}"):
        export_adapter(adapter, tmp_path / "out", "per-expert")
    assert not (tmp_path / "out").exists()
    export_adapter(adapter, tmp_path / "peft", "peft")
    tensors = load_file(adapter / "adapter_model.safetensors")
    again = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert tensors.keys() == again.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_tied_modules_that_train_whole_are_written_as_peft_has_them(tmp_path: Path) -> None:
    """They share memory, and safetensors writes each tensor by itself."""
    publish("llama", tmp_path / "model", LlamaConfig(**TINY, tie_word_embeddings=True))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = LoraConfig(
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
    )
    get_peft_model(whole, config).save_pretrained(tmp_path / "adapter")
    export_adapter(tmp_path / "adapter", tmp_path / "out", "peft", base_dir=tmp_path / "model")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    again = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("layout", ["per-expert", "vllm"])
def test_adapters_of_routers_are_factors_of_their_matrices(layout: Any, tmp_path: Path) -> None:
    routers = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = saved("mixtral", tmp_path, lora_target_parameters=routers)
    export_adapter(adapter, tmp_path / "out", layout)
    found = products(tmp_path / "out")
    expected = trained(adapter)
    assert any(name.endswith("block_sparse_moe.gate") for name in found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match=r"adapters of routers \(model\.layers\.0\.mlp\.gate"):
        export_adapter(adapter, tmp_path / "sglang", "sglang")


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_layers_to_transform": [1], "lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": r".*layers\.1\.(self_attn\.[qv]_proj|mlp\.up_proj)"},
    ],
)
@pytest.mark.parametrize("layout", ["per-expert", "vllm", "sglang"])
def test_an_adapter_of_some_layers_is_read_again_as_that(
    layout: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    adapter = saved("llama", tmp_path, **settings)
    export_adapter(adapter, tmp_path / "out", layout)
    expected = trained(adapter)
    again = trained(tmp_path / "out")
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_sglang_reads_queries_and_values_together_only(tmp_path: Path) -> None:
    """Keys may be left out."""
    adapter = saved("llama", tmp_path / "alone", lora_target_modules=["q_proj", "down_proj"])
    with pytest.raises(ConfigError, match=r"adapter of q_proj without v_proj \(model\.layers\.0"):
        export_adapter(adapter, tmp_path / "refused", "sglang")
    export_adapter(adapter, tmp_path / "vllm", "vllm")
    both = saved("llama", tmp_path / "both", lora_target_modules=["q_proj", "v_proj"])
    assert export_adapter(both, tmp_path / "sglang", "sglang").line


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
def test_vllm_s_line_has_the_smallest_rank_that_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = saved("llama", tmp_path, lora_rank=12)
    exported = export_adapter(adapter, tmp_path / "mine", "vllm")
    assert "--max-lora-rank 16" in exported.line
    assert exported.line.endswith(f"--lora-modules mine={tmp_path / 'mine'}")
    spaced = export_adapter(adapter, tmp_path / "my own", "vllm")
    assert shlex.split(spaced.line)[-1] == f"my own={tmp_path / 'my own'}"
    # A base that is named from here is found from wherever the server is started.
    monkeypatch.chdir(tmp_path)
    moved = export_adapter(adapter, "moved", "vllm", base_dir="model")
    assert shlex.split(moved.line)[2] == str(tmp_path / "model")
    written = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "model")
    with pytest.raises(ConfigError, match="not empty"):
        export_adapter(adapter, tmp_path / "mine", "vllm")
    with pytest.raises(ConfigError, match="there is no layout 'tgi'"):
        export_adapter(adapter, tmp_path / "new", "tgi")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of many types, some of which are announced as old
def test_experts_of_every_type_are_taken_apart_exactly_or_are_in_one_tensor() -> None:
    apart = set[str]()
    for model_type in STREAMED:
        config = tiny_config(model_type)
        skeleton = meta_model(config, torch.float32)
        lora = lora_config(skeleton, rank=3, alpha=6, dropout=0.0, targets=None)
        ends = tuple(lora.target_parameters or ())
        names = [
            name
            for name, parameter in skeleton.named_parameters()
            if parameter.ndim == 3 and name.endswith(ends)
        ]
        parts = {name: expert_parts(skeleton, name) for name in names if ends}
        if any(parts.values()):
            apart.add(model_type)
            assert_exact(skeleton, lora, parts)
    assert len(apart) >= 20


@pytest.mark.slow
@pytest.mark.timeout(900)  # of all types, on a machine that does much else
@pytest.mark.filterwarnings("ignore")  # of many types, some of which are announced as old
def test_what_is_exported_of_every_type_is_read_again(tmp_path: Path) -> None:
    again = set[str]()
    for model_type in STREAMED:
        skeleton = meta_model(tiny_config(model_type), torch.float32)
        lora = lora_config(skeleton, rank=4, alpha=8, dropout=0.0, targets=None)
        names = published_names(skeleton, lora)
        if not names.experts or names.missing:
            continue
        adapter = saved(model_type, tmp_path / model_type)
        export_adapter(adapter, tmp_path / model_type / "out", "per-expert")
        expected = trained(adapter)
        found = trained(tmp_path / model_type / "out")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), model_type
        again.add(model_type)
        shutil.rmtree(tmp_path / model_type)
    assert len(again) >= 20


def assert_exact(skeleton: PreTrainedModel, lora: Any, parts: dict[str, Any]) -> None:
    """The factors of every published matrix have the product that `transformers` writes."""
    whole = type(skeleton)._from_config(skeleton.config, dtype=torch.float32)
    adapted = get_peft_model(whole, lora)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator).float())
    wrappers = {
        f"{module}.{wrapper.parameter_name}": wrapper
        for module in {name.rpartition(".")[0] for name in parts}
        for wrapper in parameter_wrappers(whole.get_submodule(module))
    }
    # All at once, because some types have matrices of several parameters written together.
    published = loading.revert_weight_conversion(
        whole, {name: delta(wrapper) for name, wrapper in wrappers.items()}
    )
    for name, pieces in parts.items():
        for piece in pieces or ():
            factors = piece.factors(*factors_of(wrappers[name], piece.expert))
            assert torch.equal(
                factors.b @ factors.a * factors.scale, published.pop(f"{piece.module}.weight")
            )
    assert not [name for name in published if re.search(r"\.experts\.\d+\.", name)]
