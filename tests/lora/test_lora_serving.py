"""`lora_serving` refuses, before anything is trained, an adapter that the server would not take."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from publishedclass import publish
from transformers import AutoConfig

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.lora.attach import configured_lora
from lema.lora.serving.checks import check_served, published_names
from lema.model import meta_model
from lema.plan.blueprint import draw_up


def config_of(directory: Path, model_type: str, **settings: Any) -> LemaConfig:
    publish(model_type, directory / "model")
    base = {"device": "cpu", "lora_rank": 4}
    return LemaConfig(str(directory / "model"), **(base | settings))


@pytest.mark.filterwarnings("ignore:weights of experts are not adapted by default")
@pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules")
@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("llama", {"lora_serving": "vllm", "lora_use_dora": True}, r"vLLM .* DoRA"),
        ("llama", {"lora_serving": "vllm", "lora_rank": 513}, "rank of 513, of at most 512"),
        ("llama", {"lora_serving": "sglang", "lora_use_rslora": True}, r"SGLang .* rsLoRA"),
        ("gpt2", {"lora_serving": "vllm"}, "adapters of GPT2LMHeadModel"),
        ("dots1", {"lora_serving": "vllm"}, "adapters of experts of Dots1ForCausalLM"),
        ("llama4_text", {"lora_serving": "vllm"}, "k_proj and q_proj of Llama4ForCausalLM, whose"),
        ("granitemoe", {"lora_serving": "vllm"}, "no published file has as matrices"),
        (
            "mixtral",
            {"lora_serving": "vllm", "lora_target_parameters": ["experts.down_proj"]},
            "some matrices of experts alone",
        ),
    ],
)
def test_plan_and_training_refuse_what_the_server_does_not_take(
    model_type: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, model_type, **settings)
    with pytest.raises(ConfigError, match=words) as refused:
        draw_up(config)
    assert refused.value.where == "lora_serving"
    with closing(LemaModel(config)) as model, pytest.raises(ConfigError, match=words):
        model.initialize_lora()
    free = LemaConfig(**{**config.to_dict(), "lora_serving": None})
    with closing(LemaModel(free)) as model:
        model.initialize_lora()


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_what_the_server_takes_trains(model_type: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, model_type, lora_serving="vllm")
    draw_up(config)
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        model.save_pretrained(tmp_path / "adapter")
    # What is continued is asked the same.
    further = LemaConfig(**{**config.to_dict(), "adapter_name_or_path": str(tmp_path / "adapter")})
    with closing(LemaModel(further)) as model:
        model.initialize_lora()


def test_names_are_those_of_the_published_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, "mixtral")
    skeleton = meta_model(AutoConfig.from_pretrained(config.model_name_or_path))
    lora = configured_lora(skeleton, config)
    names = published_names(skeleton, lora)
    assert not names.missing
    assert {name.rpartition(".")[2] for name in names.experts} == {"gate_up_proj", "down_proj"}
    parts = names.experts["model.layers.0.mlp.experts.down_proj"] or ()
    assert [part.module for part in parts] == [
        f"model.layers.0.block_sparse_moe.experts.{expert}.w2" for expert in range(len(parts))
    ]
    check_served("vllm", skeleton, lora, names, where="here")
