"""Regular expressions of an adapter from elsewhere: they are matched in a bounded time, or the
adapter is refused.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from smallrun import opened, settings, write_model

from lema.convert import merge_adapter
from lema.errors import ModelError
from lema.lora import checks as patterns
from lema.lora.checks import check_patterns

NAMES = [
    f"model.layers.{layer}.{name}"
    for layer in range(8)
    for name in ("self_attn.q_proj", "mlp.down_proj")
]
ENDLESS = "([a-z_.0-9]+)*!"
MANY = "(.|.)" * 30 + "!"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ENDLESS},
        {"target_modules": MANY},
        {"target_modules": ["q_proj"], "exclude_modules": ENDLESS},
        {"target_modules": ["q_proj"], "modules_to_save": [ENDLESS]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ENDLESS},
        {"target_modules": ["q_proj"], "rank_pattern": {ENDLESS: 2}},
        {"target_modules": ["q_proj"], "alpha_pattern": {ENDLESS: 2}},
    ],
    ids=lambda options: " ".join(f"{name}-{len(str(value))}" for name, value in options.items()),
)
def test_a_pattern_that_never_ends_is_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.2)
    with pytest.raises(ModelError, match=r"takes more than 0\.2 seconds") as caught:
        check_patterns(LoraConfig(**options), NAMES)
    assert caught.value.where.split(":")[0] == list(options)[-1]


def test_what_is_no_expression_is_named() -> None:
    with pytest.raises(ModelError, match="no regular expression: missing") as caught:
        check_patterns(LoraConfig(target_modules=["q_proj"], rank_pattern={"(q": 2}), NAMES)
    assert caught.value.where == "rank_pattern: (q"


def test_ordinary_patterns_are_taken() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj"
        for layer in range(64)
        for expert in range(64)
    ]
    ordinary = LoraConfig(
        target_modules=r".*\.(?:layers|h)\.\d+\.(?:self_attn|mlp)\..*(?:up|down)_proj",
        # as methods write it that find a rank for each module
        rank_pattern=dict.fromkeys(names, 2),
        alpha_pattern={r"model\.layers\.\d+\.mlp.*": 4},
    )
    check_patterns(ordinary, names)


@pytest.mark.slow
def test_an_adapter_with_such_a_pattern_is_refused_by_whoever_loads_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with opened(settings(model, tmp_path / "out")) as streamed:
        streamed.get_trainer().save_checkpoint(tmp_path / "good")
    hostile = Path(shutil.copytree(tmp_path / "good", tmp_path / "hostile"))
    file = hostile / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "target_modules": ENDLESS}))
    with pytest.raises(ModelError, match="takes more than 3 seconds"):
        merge_adapter(hostile, tmp_path / "merged")
