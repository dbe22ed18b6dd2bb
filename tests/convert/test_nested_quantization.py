"""What a part of a config says of how weights are quantised is read, and not left in what is
written expanded.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import opened
from publishedforms import write_published
from safetensors import safe_open
from tinyconfig import tiny_config

from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Kimi-K2.5 is published: its `text_config` says that the experts are int4."""
    directory = write_published(
        tiny_config("kimi_k25"), "int4 experts", tmp_path_factory.mktemp("nested") / "published"
    )
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    return directory


def settings_in(part: Any, name: str = "config.json") -> list[str]:
    """Name the parts of a config that say how weights are quantised."""
    if not isinstance(part, dict):
        return []
    nested = [found for key, value in part.items() for found in settings_in(value, key)]
    return nested + ([name] if part.get("quantization_config") else [])


def dtypes_in(directory: Path) -> set[torch.dtype]:
    found = set[torch.dtype]()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    return found


def test_a_prepared_model_says_nothing_of_it(published: Path, tmp_path: Path) -> None:
    out = prepare(published, tmp_path / "out").path
    assert torch.int32 not in dtypes_in(out) and torch.int32 in dtypes_in(published)
    assert settings_in(json.loads((published / "config.json").read_text())) == ["text_config"]
    assert settings_in(json.loads((out / "config.json").read_text())) == []


def test_a_merged_model_says_nothing_of_it(published: Path, tmp_path: Path) -> None:
    with opened(published, lora_target_modules=["o_proj"]) as model:
        model.save_pretrained(tmp_path / "adapter")
    out = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert torch.int32 not in dtypes_in(out)
    assert settings_in(json.loads((out / "config.json").read_text())) == []


def test_a_model_that_is_quantised_again_says_so_once(published: Path, tmp_path: Path) -> None:
    out = prepare(published, tmp_path / "out", quantize="int8").path
    assert settings_in(json.loads((out / "config.json").read_text())) == ["config.json"]
