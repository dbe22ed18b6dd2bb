"""An adapter that was trained on a class that sees images is merged into that class: the whole
checkpoint, with the numbers that PEFT's merged model has on images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from imagerows import STREAMED_IMAGES, TOWERLESS, image_batch, publish_with_images
from parity import draw_b
from peft import LoraConfig, PeftModel
from publishedclass import published_class
from safetensors.torch import load_file
from transformers import AutoConfig

import lema
from lema.convert import merge_adapter
from lema.convert.serving.export import export_adapter
from lema.errors import ConfigError
from lema.model.skeleton import find_layers

COMPANIONS = {
    "preprocessor_config.json": json.dumps({"image_processor_type": "CLIPImageProcessor"}),
    "processor_config.json": json.dumps({"processor_class": "LlavaProcessor"}),
    "chat_template.jinja": "{{ messages }}",
}

Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, which is written once."""
    root = tmp_path_factory.mktemp("published")

    def directory(model_type: str) -> Path:
        path = root / model_type
        if not path.exists():
            publish_with_images(model_type, path)
            for name, text in COMPANIONS.items():
                (path / name).write_text(text)
        return path

    return directory


def trained(directory: Path, adapter: Path, targets: str) -> None:
    """Save an adapter of the class with towers, all of whose matrices are drawn."""
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = lema.streamed(directory, config, modalities="all", device="cpu", seed=1)
    draw_b(model)
    model.save_pretrained(str(adapter))
    model.close()


def whole(directory: Path) -> Any:
    kind = published_class(AutoConfig.from_pretrained(directory))
    model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert {name: found for name, found in report.items() if found} == {}
    return aligned(model).eval()


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("targets", ["all-linear", TOWERLESS], ids=["all", "text"])
@pytest.mark.parametrize("model_type", STREAMED_IMAGES)
# of PEFT, where it reads the targets that it has made of those that were asked for
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not:RuntimeWarning")
def test_the_merged_model_sees_what_peft_s_does(
    model_type: str, targets: str, published: Directories, tmp_path: Path
) -> None:
    directory = published(model_type)
    trained(directory, tmp_path / "adapter", targets)
    out = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    for name, text in COMPANIONS.items():
        assert (out / name).read_text() == text
    reference = PeftModel.from_pretrained(whole(directory), str(tmp_path / "adapter"))
    batch = image_batch(reference, [2, 1, 0])
    expected = reference.merge_and_unload().eval()
    merged = whole(out)
    assert type(merged) is type(expected)
    state = merged.state_dict()
    before = whole(directory).state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    changed = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
    assert changed
    layers, _ = find_layers(merged)
    on_towers = [name for name in changed if not name.startswith(f"{layers}.")]
    same = whole(directory)  # whose numbers lie in memory as the merged model's do
    same.load_state_dict(expected.state_dict())
    with torch.no_grad():
        assert torch.equal(merged(**batch).logits, same(**batch).logits)
    source = stored(directory)
    assert {name: one.shape for name, one in stored(out).items()} == {
        name: one.shape for name, one in source.items()
    }
    if targets == TOWERLESS:
        assert not on_towers
        written = [name for name, one in stored(out).items() if not torch.equal(one, source[name])]
        assert written and all(re.fullmatch(rf"{TOWERLESS}(\.weight)?", name) for name in written)
    else:
        assert on_towers


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "idefics3"])
def test_an_adapter_of_the_language_model_has_published_names_for_a_server(
    model_type: str, published: Directories, tmp_path: Path
) -> None:
    directory = published(model_type)
    targets = TOWERLESS.replace("q_proj|", "q_proj|v_proj|", 1)  # which SGLang reads together
    trained(directory, tmp_path / "adapter", targets)
    names = {name.removesuffix(".weight") for name in stored(directory)}
    for layout in ("vllm", "sglang", "per-expert"):
        exported = export_adapter(tmp_path / "adapter", tmp_path / layout, layout)  # type: ignore[arg-type] # one of these
        adapted = {
            re.sub(r"^base_model\.model\.|\.lora_[AB]\.weight$", "", name)
            for name in stored(exported.directory)
        }
        assert adapted and adapted <= names


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_a_server_takes_no_adapter_of_a_tower(
    layout: Any, published: Directories, tmp_path: Path
) -> None:
    trained(published("llava"), tmp_path / "adapter", "all-linear")
    with pytest.raises(ConfigError, match="adapters of towers, which see images or hear"):
        export_adapter(tmp_path / "adapter", tmp_path / "out", layout)
    assert export_adapter(tmp_path / "adapter", tmp_path / "out", "peft").directory.is_dir()
