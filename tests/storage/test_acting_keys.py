"""Keys of a model's small files that would fetch code, start compilers or open other files:
ignored, or refused.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from smallrun import settings, tokenizer, write_model
from transformers import AutoConfig

from lema import LemaModel
from lema.errors import DataError, ModelError
from lema.model import read_config
from lema.storage.modelfiles import MACHINERY, load_generation_config, load_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(file: Path, **changes: Any) -> Path:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))
    return file


def warned(call: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return call(), [str(one.message) for one in caught]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"]
)
def test_attention_that_may_run_other_code_is_ignored_with_a_line(
    key: str, name: str, model: Path
) -> None:
    file = change(model / "config.json", **{key: name})
    # as transformers would have it
    assert AutoConfig.from_pretrained(model)._attn_implementation == name
    config, (line,) = warned(lambda: read_config(model))
    assert config._attn_implementation is None
    assert str(file) in line
    assert f"attn_implementation: {name}" in line
    assert "Your own setting attn_implementation" in line


@pytest.mark.parametrize("name", ["sonicmoe", "deepgemm"])
def test_experts_that_fetch_kernels_are_ignored_with_a_line(name: str, model: Path) -> None:
    change(model / "config.json", experts_implementation=name)
    config, (line,) = warned(lambda: read_config(model))
    assert config._experts_implementation is None
    assert f"experts_implementation: {name}" in line
    assert "Your own setting" not in line


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("attn_implementation", "eager"),
        ("attn_implementation", "sdpa"),
        ("experts_implementation", "eager"),
    ],
)
def test_what_torch_has_is_taken(key: str, name: str, model: Path) -> None:
    change(model / "config.json", **{key: name})
    config, lines = warned(lambda: read_config(model))
    assert getattr(config, f"_{key}") == name
    assert lines == []


def test_parts_of_a_model_are_looked_at_too(tmp_path: Path) -> None:
    inner = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    chosen = {"attn_implementation": {"text_config": "flash_attention_2"}}
    written = {"model_type": "llava", "text_config": inner, **chosen}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config, (line,) = warned(lambda: read_config(tmp_path))
    assert config.text_config._attn_implementation is None
    assert "flash_attention_2" in line


def test_the_users_own_attention_is_computed_whatever_the_config_says(
    model: Path, tmp_path: Path
) -> None:
    change(model / "config.json", attn_implementation="flash_attention_2")
    given = settings(model, tmp_path / "out", attn_implementation="eager")
    opened, _ = warned(lambda: LemaModel(given))
    assert opened.skeleton.config._attn_implementation == "eager"
    opened.close()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"use_pretrained_backbone": True}, "use_pretrained_backbone"),
        (
            {"vision_config": {"use_pretrained_backbone": True}},
            "vision_config.use_pretrained_backbone",
        ),
        (
            {
                "vision_config": {
                    "model_type": "timm_wrapper",
                    "architecture": "hf-hub:someone/model",
                }
            },
            "vision_config.architecture",
        ),
        (
            {
                "parts": [
                    {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "/somewhere"}}
                ]
            },
            "parts[0].model_args.checkpoint_path",
        ),
    ],
)
def test_a_config_that_loads_parts_from_elsewhere_is_refused(
    changes: dict[str, Any], place: str, model: Path
) -> None:
    file = change(model / "config.json", **changes)
    with pytest.raises(
        ModelError, match="load files or repositories that LEMA does not check"
    ) as caught:
        read_config(model)
    assert caught.value.where == f"{file}: {place}"


@pytest.mark.parametrize(
    "changes",
    [
        {"use_pretrained_backbone": False},
        {
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "mobilenetv5",
                "model_args": {"depth": 2},
            }
        },
    ],
)
def test_one_that_only_describes_its_parts_is_taken(changes: dict[str, Any], model: Path) -> None:
    change(model / "config.json", **changes)
    assert read_config(model).model_type == "llama"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache_implementation", "static"),
        ("cache_implementation", "offloaded"),
        ("cache_config", {"backend": "hqq"}),
        ("compile_config", {"_compile_all_devices": True}),
        ("continuous_batching_config", {"block_size": 4}),
    ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_how_generation_is_computed_is_no_matter_of_a_file(
    name: str, key: str, value: Any, model: Path
) -> None:
    (model / "generation_config.json").unlink(missing_ok=True)
    file = change(model / name, **{key: value, "top_k": 7})
    if (name, key) == ("config.json", "compile_config"):
        with pytest.raises(ModelError, match="compile_config"):  # by transformers
            load_generation_config(model)
        return
    found, lines = warned(lambda: load_generation_config(model))
    (line,) = (one for one in lines if "act on the machine" in one)
    assert found.top_k == 7
    assert [getattr(found, one) for one in MACHINERY] == [None] * len(MACHINERY)
    assert str(file) in line
    assert key in line


def test_an_old_word_for_the_usual_cache_needs_no_line(model: Path) -> None:
    change(model / "generation_config.json", cache_implementation="hybrid")
    found, lines = warned(lambda: load_generation_config(model))
    assert found.cache_implementation is None
    assert lines == []


def test_no_arguments_of_a_tokenizers_class_come_from_a_file(model: Path) -> None:
    file = change(model / "tokenizer_config.json", init_inputs=["/dev/zero"])
    with pytest.raises(DataError, match="may name other files") as caught:
        load_tokenizer(model, trusted=False, how="")
    assert caught.value.where == f"{file}: init_inputs"
    change(file, init_inputs=[])
    assert load_tokenizer(model, trusted=False, how="")("the mill") == tokenizer()("the mill")


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "merges_file", "vocab"])
def test_no_file_of_a_tokenizer_is_taken_from_elsewhere(
    key: str, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text("not read")
    change(model / "tokenizer_config.json", **{key: str(other)})
    assert (
        load_tokenizer(model, trusted=False, how="")("the mill")["input_ids"]
        == tokenizer()("the mill")["input_ids"]
    )
