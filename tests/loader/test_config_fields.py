"""Fields of a published `config.json` that change how a model runs do to it what they do under `from_pretrained`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asloaded import edit_config, farthest_from_whole, llama, rows, write_model
from tinyconfig import tiny_config

from lema import LemaConfig
from lema.plan.blueprint import draw_up
from lema.plan.workload import MicroBatch, measure

CONFIGS = {"llama": llama, "gpt2": partial(tiny_config, "gpt2"), "gemma3": partial(tiny_config, "gemma3")}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"gradient_checkpointing": False}], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpointing_that_a_config_asks_for_changes_no_number(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(CONFIGS[kind](), tmp_path / "model")
    edit_config(model, gradient_checkpointing=True)
    if inner := json.loads((model / "config.json").read_text()).get("text_config"):
        edit_config(model, text_config=inner | {"gradient_checkpointing": True})
    assert farthest_from_whole(model, rows(12, 9), rows(7), **settings) == 0


def test_a_plan_knows_a_model_whose_config_asks_for_checkpointing(tmp_path: Path) -> None:
    plain = write_model(llama(), tmp_path / "model")
    expected = draw_up(LemaConfig(str(plain), device="cpu"))
    work = measure(expected.model, expected.layers, MicroBatch(2, 16), 16)
    edit_config(plain, gradient_checkpointing=True)
    asking = draw_up(LemaConfig(str(plain), device="cpu"))
    assert measure(asking.model, asking.layers, MicroBatch(2, 16), 16) == work
