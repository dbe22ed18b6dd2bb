"""What the planner's page says of a pasted config.json, and of numbers that it does not take."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plannerpage.node import NODE, evaluated
from plannerpage.reference import figures_of, relative_differences
from plannerpage.write import PAGE, known_models

from lema_tools.models.checkpoints import config_of, named

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(NODE is None, reason="Node is not installed; tox -e planner has a browser"),
]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
INPUTS = {
    "model": "pasted",
    "form": "published",
    "card": "4090",
    "objective": "sft",
    "rank": 16,
    "length": 512,
    "rows": 4,
    "deviceMemory": 24 * 10**9,
    "hostMemory": 32 * 10**9,
    "diskSpeed": 3.5e9,
    "dataRows": 5000,
    "dataLength": 100,
    "epochs": 1,
    "price": 1.0,
}
WITHIN = 0.01


def refusals(changes: list[dict[str, Any]], tmp_path: Path) -> list[str]:
    """Why the page does not plan for the config with each of the changes; empty: it does."""
    configs = [{**CONFIG, **change} for change in changes]
    said: list[str] = evaluated(
        "values.map((config) => lemaPasted.whyNot(config))", configs, tmp_path
    )
    return said


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_of_other_than_two_bytes_are_refused(key: str, tmp_path: Path) -> None:
    types = ["float32", "torch.float32", "float8_e4m3fn", "float64"]
    for said, dtype in zip(refusals([{key: name} for name in types], tmp_path), types, strict=True):
        assert said.startswith(f"its weights are {dtype.removeprefix('torch.')}, ")
        assert "bfloat16, float16" in said
    assert refusals([{key: name} for name in ("bfloat16", "float16", None)], tmp_path) == [""] * 3
    assert "float32" in refusals([{"text_config": {key: "float32"}}], tmp_path)[0]


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"num_attention_heads": 12},
        {"num_attention_heads": 12, "head_dim": 128},
        {"num_key_value_heads": 5},
        {"num_attention_heads": 8, "num_key_value_heads": 16},
        {"model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": None},
        {"num_attention_heads": 0},
        {"hidden_size": "2048"},
        {"vocab_size": -1},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "toString"},
    ]
    said = refusals(changes, tmp_path)
    assert "its 12 heads (num_attention_heads) do not divide its hidden_size of 2048" in said[0]
    assert said[1] == "" and said[4] == ""
    assert "its 5 heads of keys" in said[2] and "its 16 heads of keys" in said[3]
    assert [reason.rpartition(" ")[2] for reason in said[5:8]] == [
        "num_attention_heads",
        "hidden_size",
        "vocab_size",
    ]
    assert "published quantised" in said[8] and "none for toString" in said[9]


def test_absent_keys_are_those_that_transformers_fills_in(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    dropped = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    short = {name: size for name, size in CONFIG.items() if name not in dropped}
    kinds = ("mistral", "qwen3", "gemma2", "gemma3_text", "smollm3")
    whole = []
    for kind in kinds:
        config = CONFIG_MAPPING[kind](**{**short, "model_type": kind, "num_attention_heads": 32})
        sizes = {name: getattr(config, name, None) for name in (*dropped, "head_dim")}
        whole.append({**short, "model_type": kind, "num_attention_heads": 32, **sizes})
    bare = [{**short, "model_type": kind, "num_attention_heads": 32} for kind in kinds]
    facts = evaluated("values.map((config) => lemaPasted.facts(config))", [*whole, *bare], tmp_path)
    assert facts[: len(kinds)] == facts[len(kinds) :]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"max_position_embeddings": 256},
        {"max_position_embeddings": 1500, "torch_dtype": "bfloat16"},
    ],
)
def test_a_pasted_config_has_the_figures_of_the_plan(
    change: dict[str, Any], tmp_path: Path
) -> None:
    config = {**CONFIG, **change}
    length = min(512, config["max_position_embeddings"])
    lengths = evaluated("Object.keys(lemaPasted.facts(values).work).map(Number)", config, tmp_path)
    assert lengths[-1] == config["max_position_embeddings"]
    inputs = {**INPUTS, "config": config, "length": max(length, lengths[-1] % 8192)}
    page = evaluated("lemaPlanner.figures(values)", inputs, tmp_path)
    plan = figures_of(inputs, page["yaml"], tmp_path / "checkpoints")
    assert page["fits"] and plan["fits"]
    differences = relative_differences(page, plan)
    assert {name: far for name, far in differences.items() if far > WITHIN} == {}


def test_published_configs_are_recognised_and_what_differs_from_them_is_not(tmp_path: Path) -> None:
    names = list(known_models())
    configs = []
    for name in names:
        checkpoint = named(name)
        assert checkpoint is not None
        config = json.loads(config_of(checkpoint).to_json_string(use_diff=False))
        config |= {"dtype": "bfloat16", "model_type": checkpoint.model_type}
        if known_models()[name]["method"] is not None:
            config["quantization_config"] = {"quant_method": known_models()[name]["method"]}
        configs.append(config)
    recognised = "values.map((config) => lemaPasted.published(config) ?? null)"
    said = evaluated(recognised, configs, tmp_path)
    signs = [
        {key: known_models()[name][key] for key in ("type", "sizes", "method")} for name in names
    ]
    for place, name in enumerate(said):
        assert signs[names.index(name)] == signs[place]
    llama = configs[names.index("Llama-3.1-8B-Instruct")]
    changes: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"head_dim": 64},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"vocab_size": 128257},
    ]
    others = [{**llama, **change} for change in changes]
    assert evaluated(recognised, others, tmp_path) == [None] * len(changes)


class NumberFields(HTMLParser):
    """The attributes of the page's fields of numbers, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, dict[str, str | None]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "input" and attributes.get("type") == "number":
            self.fields[str(attributes["name"])] = attributes


def said_of(name: str, value: str, tmp_path: Path, *, bad: bool = False) -> str:
    """What the page says of a value in a field."""
    parser = NumberFields()
    parser.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    attributes = parser.fields[name]
    field = {key: attributes.get(key) or "" for key in ("min", "max", "step")}
    field |= {"label": name, "value": value, "bad": bad, "required": "required" in attributes}
    return str(evaluated("lemaForm.faultOf(values)", field, tmp_path))


def test_every_number_but_the_price_is_required() -> None:
    parser = NumberFields()
    parser.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    assert len(parser.fields) >= 10
    optional = [name for name, field in parser.fields.items() if "required" not in field]
    assert optional == ["price"]
    assert all(float(field["min"] or -1) >= 0 for field in parser.fields.values())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rows", "", "rows: a whole number from 1 to 4096 is missing."),
        ("rows", "0", "rows: 0 is not a whole number from 1 to 4096."),
        ("rows", "4097", "rows: 4097 is not a whole number from 1 to 4096."),
        ("rank", "16.5", "rank: 16.5 is not a whole number from 1 to 256."),
        ("rank", "0", "rank: 0 is not a whole number from 1 to 256."),
        ("diskSpeed", "0", "diskSpeed: 0 is not a number of 0.05 or more."),
        ("dataRows", "0", "dataRows: 0 is not a whole number of 1 or more."),
        ("epochs", "1e999", "epochs: 1e999 is not a number of 0.01 or more."),
        ("price", "-1", "price: -1 is not a number of 0 or more."),
        ("price", "", ""),
        ("rank", "256", ""),
        ("diskSpeed", "0.05", ""),
    ],
)
def test_a_number_that_a_field_does_not_take_gets_a_sentence(
    name: str, value: str, said: str, tmp_path: Path
) -> None:
    assert said_of(name, value, tmp_path) == said


def test_what_is_no_number_gets_a_sentence(tmp_path: Path) -> None:
    said = said_of("price", "", tmp_path, bad=True)
    assert said == "price: what is there is not a number of 0 or more."
