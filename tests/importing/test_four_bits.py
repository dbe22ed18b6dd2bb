"""`quantize_base: nf4` is bitsandbytes' with double quantisation, and the importers say so.

`tests/convert/test_quantized_base.py` compares its weights with those that `transformers` quantises
with `bnb_4bit_use_double_quant=True`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lema_tools.importing.recognition import peer_named
from lema_tools.importing.translation import ForeignRun, Translation

FILES: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "org/model",
        "datasets": [{"path": "org/rows", "type": "alpaca"}],
        "adapter": "qlora",
        "lora_r": 8,
        "lora_target_linear": True,
        "learning_rate": 2e-4,
        "warmup_steps": 10,
        "load_in_4bit": True,
    },
    "llamafactory": {
        "model_name_or_path": "org/model",
        "dataset": "org/rows",
        "dataset_dir": "ONLINE",
        "template": "chatml",
        "bf16": True,
        "do_train": True,
        "quantization_bit": 4,
    },
}
KEYS = {"axolotl": "load_in_4bit", "llamafactory": "quantization_bit"}
MODELS = {"axolotl": "base_model", "llamafactory": "model_name_or_path"}


def translated(tool: str, **values: Any) -> Translation:
    return peer_named(tool).translate(ForeignRun(FILES[tool] | values))


def changed(translation: Translation) -> set[str]:
    return {note.key for note in translation.changes}


@pytest.mark.parametrize("tool", FILES)
def test_nf4_with_double_quantisation_is_the_same_run(tool: str) -> None:
    translation = translated(tool)
    assert translation.settings["quantize_base"] == "nf4"
    assert changed(translation) == set()


@pytest.mark.parametrize(
    ("tool", "values", "key"),
    [
        ("llamafactory", {"double_quantization": False}, "double_quantization"),
        ("llamafactory", {"quantization_type": "fp4"}, "quantization_type"),
        (
            "axolotl",
            {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
            "bnb_config_kwargs",
        ),
        ("axolotl", {"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, "bnb_config_kwargs"),
    ],
)
def test_other_numbers_of_four_bits_are_told(tool: str, values: dict[str, Any], key: str) -> None:
    assert changed(translated(tool, **values)) == {key}


def test_options_that_axolotl_has_anyway_are_the_same_run() -> None:
    options = {"bnb_4bit_use_double_quant": True, "llm_int8_has_fp16_weight": False}
    assert changed(translated("axolotl", bnb_config_kwargs=options)) == set()


@pytest.mark.parametrize("tool", FILES)
def test_experts_are_quantised_here_alone(tool: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_experts": 4}), encoding="utf-8")
    assert changed(translated(tool, **{MODELS[tool]: str(tmp_path)})) == {KEYS[tool]}
    config.write_text(json.dumps({"hidden_size": 4}), encoding="utf-8")
    translation = translated(tool, **{MODELS[tool]: str(tmp_path)})
    assert changed(translation) == set()
    assert translation.same[KEYS[tool]] == "quantize_base: nf4"


@pytest.mark.parametrize("tool", FILES)
@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "a/b-moe"])
def test_a_model_that_is_not_here_is_told_by_its_name(tool: str, name: str) -> None:
    assert changed(translated(tool, **{MODELS[tool]: name})) == {KEYS[tool]}


def test_axolotl_leaves_a_module_of_falcon_h1_unquantised() -> None:
    assert changed(translated("axolotl", base_model="tiiuae/Falcon-H1-1.5B")) == {"load_in_4bit"}


def test_axolotl_quantises_with_qlora_alone() -> None:
    translation = translated("axolotl", adapter="lora")
    assert translation.settings["quantize_base"] is None
    assert changed(translation) == {"load_in_4bit"}
