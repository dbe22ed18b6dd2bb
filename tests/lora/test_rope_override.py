"""Rotary parameters that replace the model's own: exact against transformers, and kept by the
adapter.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

import lema
from lema import LemaConfig, LemaModel
from lema.convert.merge import merge_adapter
from lema.convert.serving.export import export_adapter
from lema.data.forms import longest_row, num_positions
from lema.errors import ConfigError
from lema.model.sequence.rope import ROPE, with_rope
from lema.train.checkpoint.card import CARD, model_card
from lema_cpu import CpuBackend

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
TYPES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "gpt_oss": GptOssConfig(**SIZES, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
    "phi3": Phi3Config(**SIZES),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
BY_LAYERS = {"full_attention": {"rope_type": "linear", "factor": 4.0}}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("llama", rope) for rope in (YARN, LLAMA3, LONG)),
    ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    ("llama", {"rope_type": "linear", "factor": 4.0}),
    ("llama", {"rope_type": "default", "rope_theta": 500000.0}),
    ("qwen3", YARN),
    ("mistral", YARN),
    ("gemma3", BY_LAYERS),
    ("gemma3", {"full_attention": YARN, "sliding_attention": LLAMA3}),
    ("gpt_oss", {**YARN, "truncate": False, "beta_fast": 16.0}),
    ("phi3", LONG),
    ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
]
LENGTH = 48  # tokens, more than the models were made for


def written(kind: str, tmp_path: Path) -> Path:
    return write_model(TYPES[kind], tmp_path / "model")


def edited(model: Path, rope: dict[str, Any]) -> PreTrainedConfig:
    """Return the config of a model whose `config.json` has been edited by hand."""
    file = model / "config.json"
    values = json.loads(file.read_text())
    own = values["rope_parameters"]
    nested = any(isinstance(part, dict) for part in own.values())
    theta = {} if nested else {"rope_theta": own["rope_theta"]}
    if nested:
        rope = {
            **own,
            **{
                name: {"rope_theta": own[name]["rope_theta"], **part} for name, part in rope.items()
            },
        }
    copy = model.parent / "edited"
    copy.mkdir(exist_ok=True)
    values["rope_parameters"] = {**theta, **rope}
    (copy / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(copy)


pytestmark = pytest.mark.filterwarnings("ignore:max_length is")


def settings(model: Path, rope: dict[str, Any] | None, **changes: Any) -> LemaConfig:
    options: dict[str, Any] = {"lora_target_parameters": []}
    options |= {"lora_rank": 2, "lora_init": False, "gradient_checkpointing": True}
    options |= {"max_length": 64, "micro_batch_size": 2, "batch_size": 2, "max_grad_norm": None}
    return LemaConfig(
        str(model), device="cpu", device_memory=None, rope_parameters=rope, **options | changes
    )


def ids() -> Tensor:
    return torch.randint(1, 96, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def whole(model: Path, config: PreTrainedConfig, adapter: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


@pytest.mark.parametrize(("kind", "rope"), CASES)
def test_a_step_is_bitwise_that_of_the_whole_model_with_the_same_parameters(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(kind, tmp_path)
    rows = ids()
    targets = {"lora_target_modules": ["q_b_proj", "o_proj"]} if kind == "deepseek_v3" else {}
    model = LemaModel(settings(directory, rope, **targets), backend=CpuBackend(poison=True))
    model.initialize_lora()
    model.save_pretrained(tmp_path / "adapter")
    reference = whole(directory, edited(directory, rope), tmp_path / "adapter")
    expected = reference(input_ids=rows, labels=rows)
    expected.loss.backward()
    loss = model.adapter.loss([{"input_ids": rows, "labels": rows}])
    loss.backward()
    own = reference.get_base_model().config.rope_parameters
    assert model.skeleton.config.rope_parameters == own
    assert torch.equal(loss.detach(), expected.loss.detach())
    gradients = {
        name: parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    peft_model = model.lora_manager
    assert peft_model is not None
    compared = 0
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, gradients[name]), name
            compared += 1
    assert compared == len(gradients) > 0
    plain = whole(directory, AutoConfig.from_pretrained(directory), tmp_path / "adapter")
    assert not torch.equal(plain(input_ids=rows, labels=rows).loss, expected.loss)
    model.close()


def trained(directory: Path, tmp_path: Path, rope: dict[str, Any] | None) -> Path:
    """Return an adapter that was made with rotary parameters, with its card."""
    model = LemaModel(settings(directory, rope, output_dir=str(tmp_path / "adapter")))
    model.initialize_lora()
    model.save_pretrained(tmp_path / "adapter")
    card = model_card(model.config, str(directory), {}, {})
    (tmp_path / "adapter" / CARD).write_text(card)
    model.close()
    return tmp_path / "adapter"


def logits_of(model: LemaModel) -> Tensor:
    model.skeleton.eval()
    logits = list[Tensor]()
    model.adapter.evaluate([{"input_ids": ids(), "labels": ids()}], logits)
    return logits[0]


@pytest.mark.parametrize(("kind", "rope"), [("llama", YARN), ("gemma3", BY_LAYERS)])
def test_the_adapter_has_them_for_whoever_opens_it(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(kind, tmp_path)
    adapter = trained(directory, tmp_path, rope)
    expected = whole(directory, edited(directory, rope), adapter)(input_ids=ids()).logits
    (adapter / "lema_config.json").unlink()  # as on the hub, which gets PEFT's files and ROPE
    model = LemaModel.from_pretrained(adapter, device="cpu", dtype="float32")
    assert torch.equal(logits_of(model), expected)
    model.close()
    streamed = lema.streamed(directory, adapter, device="cpu", dtype="float32").eval()
    assert torch.equal(streamed(input_ids=ids()).logits, expected)
    streamed.save_pretrained(str(tmp_path / "again"))
    assert (tmp_path / "again" / ROPE).read_text() == (adapter / ROPE).read_text()
    streamed.opened.close()
    options: dict[str, Any] = {"adapter_name_or_path": str(adapter), "lora_target_parameters": None}
    begun = LemaModel(settings(directory, None, **options))
    begun.initialize_lora()
    assert torch.equal(logits_of(begun), expected)
    begun.close()


def test_the_code_of_the_card_gives_the_same_model(tmp_path: Path) -> None:
    directory = written("qwen3", tmp_path)
    adapter = trained(directory, tmp_path, YARN)
    expected = whole(directory, edited(directory, YARN), adapter)(input_ids=ids()).logits
    code = (adapter / CARD).read_text().split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if "okenizer = " not in line]
    names: dict[str, Any] = {}
    exec("\n".join(lines).replace("config=config", "config=config, dtype='float32'"), names)
    assert torch.equal(names["model"].eval()(input_ids=ids()).logits, expected)
    assert "yarn" in (adapter / CARD).read_text().split("## Settings")[-1]


@pytest.mark.parametrize(("kind", "rope"), [("llama", LLAMA3), ("gemma3", BY_LAYERS)])
def test_a_merged_model_has_them_in_its_config(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(kind, tmp_path)
    adapter = trained(directory, tmp_path, rope)
    merged = merge_adapter(adapter, tmp_path / "merged")
    config = AutoConfig.from_pretrained(merged)
    assert config.rope_parameters == edited(directory, rope).rope_parameters
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    expected = whole(directory, edited(directory, rope), adapter)(input_ids=ids()).logits
    torch.testing.assert_close(model(input_ids=ids()).logits, expected)


def test_an_exported_adapter_has_them_and_its_server_is_told(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    adapter = trained(directory, tmp_path, YARN)
    exported = export_adapter(adapter, tmp_path / "exported", "vllm")
    assert (exported.directory / ROPE).read_text() == (adapter / ROPE).read_text()
    words = shlex.split(exported.line)
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    assert overrides == {"rope_parameters": json.loads((adapter / ROPE).read_text())}


def test_an_older_config_says_it_once(tmp_path: Path) -> None:
    """`rope_scaling`, an older name, would be preferred."""
    own = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    parameters = {"rope_theta": 10000.0, **YARN}
    assert with_rope(own, parameters) == {"rope_theta": 10000.0, "rope_parameters": parameters}
    assert with_rope({"text_config": own}, parameters)["text_config"] == with_rope(own, parameters)


def test_another_override_than_the_adapters_is_refused(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    adapter = trained(directory, tmp_path, YARN)
    with pytest.raises(ConfigError, match=re.escape("factor is 2.0, not 4.0")):
        LemaModel.from_pretrained(adapter, rope_parameters={**YARN, "factor": 2.0})
    LemaModel.from_pretrained(adapter, rope_parameters=YARN).close()
    plain = trained(directory, tmp_path / "plain", None)
    with pytest.raises(ConfigError, match="made with the model's own"):
        LemaModel.from_pretrained(plain, rope_parameters=YARN)
    again = settings(directory, {**YARN, "factor": 8.0}, adapter_name_or_path=str(adapter))
    with pytest.warns(UserWarning, match="training goes on with those of the settings"):
        begun = LemaModel(again)
    begun.close()
    model = LemaModel(settings(directory, None))
    with pytest.raises(ConfigError, match="other rope_parameters than the model's own"):
        model.begin_with_adapter(adapter)
    model.close()
    streamed = lema.streamed(directory, LoraConfig(r=2, target_modules=["q_proj"]), device="cpu")
    with pytest.raises(ConfigError, match="other rope_parameters than the model's own"):
        streamed.load_adapter(adapter, "other")
    streamed.opened.close()


def test_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    rows = [{"input_ids": list(range(1, 49)), "labels": list(range(1, 49))}] * 4
    options: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "save_steps": 1}
    options |= {"lr_scheduler_type": "constant", "max_steps": 2}

    def run(rope: dict[str, Any], resume: bool) -> None:
        model = LemaModel(settings(directory, rope, **options))
        model.initialize_lora()
        model.get_trainer().fit(rows, resume=resume)
        model.close()

    run(YARN, resume=False)
    options["max_steps"] = 3
    run({**YARN, "rope_theta": 10000.0}, resume=True)  # in full, which is the same
    with pytest.raises(ConfigError, match="rope_parameters"):
        run({**YARN, "factor": 2.0}, resume=True)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {**YARN, "faktor": 2}, "faktor"),
    ("llama", {"rope_type": "yarn"}, "factor"),
    ("llama", {"rope_type": "linear", "factor": 0.5}, "factor field must be a float"),
    ("llama", {**LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor field must be greater"),
    ("llama", {**LONG, "long_factor": [1.0]}, "must have length 4"),
    ("llama", {"rope_type": "yarm", "factor": 2.0}, "there is no rope_type 'yarm'"),
    ("llama", {"full_attention": YARN}, "full_attention has parameters of its own"),
    ("gemma3", YARN, "for each type of layers"),
    ("gemma3", {"sliding": YARN}, "sliding is none"),
    ("phi3", YARN, "longrope"),
]


@pytest.mark.parametrize(("kind", "rope", "what"), WRONG)
def test_what_transformers_would_warn_of_is_refused(
    kind: str, rope: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        LemaModel(settings(written(kind, tmp_path), rope))
    assert refused.value.where == "rope_parameters"
    assert refused.value.how


@pytest.mark.parametrize("value", [{}, {"factor": 2.0}, {"a": YARN, "b": 2}, "yarn"])
def test_what_is_no_description_of_rotary_embeddings_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="rope_parameters"):
        LemaConfig("model", rope_parameters=value)


def test_a_model_without_rotary_embeddings_has_none_to_replace(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    directory = write_model(config, tmp_path / "model")
    with pytest.raises(ConfigError, match="no rotary embeddings"):
        LemaModel(settings(directory, YARN, max_length=32))
    with pytest.raises(ConfigError, match="fewer than max_length"):
        longest_row(64, num_positions(config, settings(directory, None)))


def test_longer_rows_than_the_model_was_made_for_are_a_warning(tmp_path: Path) -> None:
    directory = written("llama", tmp_path)
    with pytest.warns(UserWarning, match="max_length is 64.*32 positions.*rope_parameters"):
        LemaModel(settings(directory, None)).close()
    LemaModel(settings(directory, YARN)).close()
    LemaModel(settings(directory, None, max_length=32)).close()


def test_prompts_may_be_as_long_as_they_reach() -> None:
    config = LlamaConfig(**SIZES)
    options: dict[str, Any] = {"rope_parameters": YARN}
    assert num_positions(config) == 32
    assert num_positions(config, LemaConfig("model")) == 32
    assert num_positions(config, LemaConfig("model", **options)) == 128
    assert num_positions(config, LemaConfig("model", max_length=200, **options)) == 200
