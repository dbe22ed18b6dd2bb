"""The adapters of a phase take what `LemaConfig` has for adapters, by the same names, and are
refused alike.
"""

from typing import Any

import pytest

from lema.config import LemaConfig
from lema.config.adapter import AdapterSettings
from lema.config.problems import SettingsError
from lema.train.phases.phase import Phase
from lema.train.phases.stage import of_kind

OWN = {name for name in LemaConfig.model_fields if name.startswith("lora_")} - {"lora_serving"}

EVERY: dict[str, Any] = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.1,
    "lora_exclude_modules": ["lm_head"],
    "lora_rank_pattern": {"q_proj": 2},
    "lora_alpha_pattern": {"q_proj": 3},
    "lora_use_rslora": True,
    "lora_layers_to_transform": [1, 0],
    "lora_layers_pattern": "layers",
    "lora_init": "gaussian",
    "lora_bias": "lora_only",
    "lora_modules_to_save": ["embed_tokens"],
    "lora_use_dora": True,
    "lora_trainable_token_indices": [3, 5],
    "lora_ensure_weight_tying": True,
}


def phase(**lora: Any) -> Phase:
    mixture = [{"name": "text", "rate": 1.0}]
    return Phase(trains="lora", tokens=64, mixture=mixture, learning_rate=1e-3, **lora)


def problems(**lora: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        phase(**lora)
    return {problem.key: f"{problem.what} ({problem.how})" for problem in caught.value.problems}


def test_there_is_every_setting_that_a_run_has_for_adapters_with_the_same_default() -> None:
    assert AdapterSettings.model_fields.keys() == OWN <= Phase.model_fields.keys()
    for name in OWN:
        of_run, of_phase = (
            kind.model_fields[name].get_default(call_default_factory=True)
            for kind in (LemaConfig, Phase)
        )
        assert of_run == of_phase


def test_what_is_given_reaches_the_run() -> None:
    config = LemaConfig("model", **of_kind(phase(**EVERY)))
    assert {name: getattr(config, name) for name in EVERY} == EVERY
    assert LemaConfig("model", **of_kind(phase(lora_lora_bias=True))).lora_lora_bias
    assert LemaConfig(
        "model", **of_kind(phase(lora_target_parameters=["gate_up_proj"]))
    ).lora_target_parameters == ["gate_up_proj"]
    assert AdapterSettings(**AdapterSettings(**EVERY).model_dump(mode="json")) == AdapterSettings(
        **EVERY
    )


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_setting_is_in_the_numbers(name: str) -> None:
    more = {
        "lora_lora_bias": True,
        "lora_target_parameters": ["experts.down_proj"],
        "lora_layers_to_transform": 1,
    }
    given = EVERY | more
    beside = {"lora_layers_to_transform": 1} if name == "lora_layers_pattern" else {}
    changed = AdapterSettings(**{name: given[name]} | beside)
    assert changed.adapter_numbers() != AdapterSettings().adapter_numbers()
    assert changed.adapter_numbers()[name] != AdapterSettings().adapter_numbers()[name]


def test_adapters_that_are_the_same_have_the_same_numbers() -> None:
    for one, other in (
        ({"lora_target_modules": ["b", "a", "a"]}, {"lora_target_modules": ["a", "b"]}),
        ({"lora_layers_to_transform": 3}, {"lora_layers_to_transform": [3]}),
        ({"lora_alpha_pattern": {"q": 8}}, {"lora_alpha_pattern": {"q": 8.0}}),
        ({"lora_alpha": 32.0}, {}),
    ):
        assert (
            AdapterSettings(**one).adapter_numbers() == AdapterSettings(**other).adapter_numbers()
        )


@pytest.mark.parametrize(
    ("lora", "key", "said"),
    [
        ({"rank": 4}, "rank", "did you mean lora_rank?"),
        ({"r": 4}, "r", "did you mean lora_rank?"),
        ({"use_dora": True}, "use_dora", "did you mean lora_use_dora?"),
        ({"lora_dropout": 1.0}, "lora_dropout", "less than 1"),
        ({"lora_init": "pissa"}, "lora_init", "frozen weights"),
        ({"lora_bias": "some"}, "lora_bias", "'none', 'all' or 'lora_only'"),
        ({"lora_rank_pattern": {"q_proj": 0}}, "lora_rank_pattern", "at least 1"),
        ({"lora_rank_pattern": {"(": 2}}, "lora_rank_pattern", "not a regular expression"),
        (
            {"lora_use_dora": True, "lora_lora_bias": True},
            "lora_lora_bias",
            "exclude each other; leave one",
        ),
        (
            {"lora_layers_pattern": "h"},
            "lora_layers_pattern",
            "lora_layers_to_transform counts; give both, or neither",
        ),
        (
            {"lora_target_modules": [], "lora_rank": 2},
            "lora_target_modules",
            "is empty; name modules",
        ),
        ({"lora_rank": 3, "lora_init": "orthogonal"}, "lora_init", "or lora_rank_pattern has 3"),
        (
            {"lora_target_parameters": ["w"], "lora_dropout": 0.5},
            "lora_dropout",
            "exclude each other",
        ),
    ],
)
def test_what_no_run_could_do_is_refused_by_its_name_here(
    lora: dict[str, Any], key: str, said: str
) -> None:
    found = problems(**lora)
    assert list(found) == [key]
    assert said in found[key]
