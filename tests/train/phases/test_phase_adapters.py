"""The adapters of a phase take what `LemaConfig` has for adapters, by the same names, and are refused alike."""

from typing import Any

import pytest

from lema.config import LemaConfig
from lema.config.problems import SettingsError
from lema.train.phases import LoRAConfig, Phase
from lema.train.phases.kinds import of_kind

OWN = {name for name in LemaConfig.model_fields if name.startswith("lora_")}

EVERY: dict[str, Any] = {
    "rank": 4,
    "alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "dropout": 0.1,
    "exclude_modules": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 3},
    "use_rslora": True,
    "layers_to_transform": [1, 0],
    "layers_pattern": "layers",
    "init": "gaussian",
    "bias": "lora_only",
    "modules_to_save": ["embed_tokens"],
    "use_dora": True,
    "trainable_token_indices": [3, 5],
    "ensure_weight_tying": True,
}


def phase(**lora: Any) -> Phase:
    mixture = [{"name": "text", "rate": 1.0}]
    return Phase(trains="lora", tokens=64, mixture=mixture, learning_rate=1e-3, lora=lora)


def problems(**lora: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        phase(**lora)
    return {problem.key: f"{problem.what} ({problem.how})" for problem in caught.value.problems}


def test_there_is_every_setting_that_a_run_has_for_adapters_and_no_other() -> None:
    assert LoRAConfig().settings().keys() == OWN
    defaults = {name: field.get_default(call_default_factory=True) for name, field in LemaConfig.model_fields.items()}
    other = {name: value for name, value in LoRAConfig().settings().items() if defaults[name] != value}
    assert other == {"lora_alpha": 16.0}  # that of the trainer which the names are from


def test_what_is_given_reaches_the_run() -> None:
    config = LemaConfig("model", **of_kind(phase(**EVERY)))
    assert {name: getattr(config, f"lora_{name}") for name in EVERY} == EVERY
    assert LemaConfig("model", **of_kind(phase(lora_bias=True))).lora_lora_bias
    assert LemaConfig("model", **of_kind(phase(target_parameters=["gate_up_proj"]))).lora_target_parameters == [
        "gate_up_proj"
    ]
    assert LoRAConfig(**LoRAConfig(**EVERY).model_dump(mode="json")) == LoRAConfig(**EVERY)


@pytest.mark.parametrize("name", sorted(LoRAConfig.model_fields))
def test_every_setting_is_in_the_numbers(name: str) -> None:
    with_bias = EVERY | {"lora_bias": True, "target_parameters": ["experts.down_proj"], "layers_to_transform": 1}
    changed = LoRAConfig(**({name: with_bias[name]} | ({"layers_to_transform": 1} if name == "layers_pattern" else {})))
    assert changed.numbers() != LoRAConfig().numbers()
    assert changed.numbers()[name] != LoRAConfig().numbers()[name]


def test_adapters_that_are_the_same_have_the_same_numbers() -> None:
    for one, other in (
        ({"target_modules": ["b", "a", "a"]}, {"target_modules": ["a", "b"]}),
        ({"layers_to_transform": 3}, {"layers_to_transform": [3]}),
        ({"alpha_pattern": {"q": 8}}, {"alpha_pattern": {"q": 8.0}}),
        ({"alpha": 16}, {}),
    ):
        assert LoRAConfig(**one).numbers() == LoRAConfig(**other).numbers()


@pytest.mark.parametrize(
    ("lora", "key", "said"),
    [
        ({"lora_rank": 4}, "lora.lora_rank", "did you mean rank?"),
        ({"lora_dropout": 0.1}, "lora.lora_dropout", "did you mean dropout?"),
        ({"lora_use_dora": True}, "lora.lora_use_dora", "did you mean use_dora?"),
        ({"rank": 4, "lora_rank": 4}, "lora.lora_rank", "did you mean rank?"),
        ({"r": 4}, "lora.r", "did you mean rank?"),
        ({"dropout": 1.0}, "lora.dropout", "less than 1"),
        ({"init": "pissa"}, "lora.init", "frozen weights"),
        ({"bias": "some"}, "lora.bias", "'none', 'all' or 'lora_only'"),
        ({"rank_pattern": {"q_proj": 0}}, "lora.rank_pattern", "at least 1"),
        ({"rank_pattern": {"(": 2}}, "lora.rank_pattern", "not a regular expression"),
        (
            {"use_dora": True, "lora_bias": True},
            "lora.lora_bias",
            "use_dora and lora_bias exclude each other (leave one",
        ),
        ({"layers_pattern": "h"}, "lora.layers_pattern", "layers_to_transform counts (give both, or neither)"),
        ({"target_modules": [], "rank": 2}, "lora.target_modules", "target_modules is empty (name modules"),
        ({"rank": 3, "init": "orthogonal"}, "lora.init", "need even ranks, and rank or rank_pattern has 3"),
        ({"target_parameters": ["w"], "dropout": 0.5}, "lora.dropout", "exclude each other"),
    ],
)
def test_what_no_run_could_do_is_refused_by_its_name_here(lora: dict[str, Any], key: str, said: str) -> None:
    found = problems(**lora)
    assert list(found) == [key]
    assert said in found[key]
    assert "lora_rank_pattern" not in found[key] and "lora_target" not in found[key]
