"""A `config.json` from a stranger: numbers no model has, ways to other files and to code are
refused by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import LlamaConfig

from lema.data.forms import Forms
from lema.errors import DataError, ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.storage.modelfiles import (
    MAX_CONFIG_BYTES,
    MAX_LAYERS,
    MAX_TEMPLATE_BYTES,
    check_companions,
    load_generation_config,
    load_tokenizer,
    read_config_file,
)

SIZES = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return tmp_path


def change(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, f"{10**9} of them, and {MAX_LAYERS} is the most"),
        ({"text_config": {"n_layer": 10**9}}, "is the most that is built"),
        ({"num_blocks": 1e300}, "is the most that is built"),
        ({"vocab_size": 2**63}, "a number of more than 64 bits"),
        ({"sizes": [1, -(2**64)]}, "a number of more than 64 bits"),
        (
            {"configuration_files": ["config.1.0.0.json"]},
            "config.json refers to other files, which LEMA does not check",
        ),
        ({"attn_implementation": {"": "someone/kernel"}}, "a kernel of the hub, 'someone/kernel'"),
        ({"parts": [{"_attn_implementation": "someone/kernel"}]}, "a kernel of the hub"),
        ({"model_type": ["llama"]}, "cannot read this config"),
        ({"model_type": "own", "auto_map": ["own.Config"]}, "cannot read this config"),
        ({"vocab_size": "many"}, "cannot"),
    ],
)
def test_what_no_model_says_is_refused_with_the_file(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_config(change(model, **changes))
    assert caught.value.where.startswith(str(model / "config.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b'{"a": ' + b"[" * 10_000, b"\xff{}"]
)
def test_what_is_no_config_is_refused_with_the_file(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json is damaged") as caught:
        read_config(model)
    assert caught.value.where == str(model / "config.json")


def test_a_config_may_not_be_endless(model: Path) -> None:
    (model / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ModelError, match="more than the 10,000,000 bytes that a config may have"):
        read_config_file(model)
    change_depth: Any = 1
    for _ in range(40):
        change_depth = [change_depth]
    (model / "config.json").write_text(json.dumps({"a": change_depth}))
    with pytest.raises(ModelError, match="nested too deep"):
        read_config_file(model)


def test_a_depth_that_models_may_have_is_built(model: Path) -> None:
    assert (
        read_config(change(model, num_hidden_layers=MAX_LAYERS, layer_types=None)).num_hidden_layers
        == MAX_LAYERS
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 2**31}, "asks for a table of"),
        ({"hidden_size": 10**15, "head_dim": None}, "asks for a table|cannot build"),
        ({"num_attention_heads": 0}, "cannot (read|build) this"),
        ({"hidden_act": "sorcery"}, "cannot build this model"),
    ],
)
def test_sizes_that_no_memory_has_are_refused_before_they_are_made(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        meta_model(read_config(change(model, **changes)))
    assert (
        caught.value.where.startswith(str(model / "config.json"))
        or "cannot read" in caught.value.what
    )


def test_more_tensors_than_any_model_has_are_not_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema.model.skeleton.MAX_TENSORS", 20)
    assert meta_model(read_config(change(model, num_hidden_layers=1)))
    with pytest.raises(ModelError, match="asks for more than 20 tensors"):
        meta_model(read_config(change(model, num_hidden_layers=9, layer_types=None)))


def test_files_beside_the_weights_are_checked_before_they_are_read(
    model: Path, tmp_path: Path
) -> None:
    for name, content in {"tokenizer.json": "{", "generation_config.json": "[]"}.items():
        (model / name).write_text(content)
    with pytest.raises(DataError, match="no tokenizer that can be loaded"):
        load_tokenizer(model, trusted=False, how="-")
    with pytest.raises(ModelError, match="cannot read these settings of generation"):
        load_generation_config(model)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(WeightsError, match="leaves its directory"):
        check_companions(model)


def test_a_tokenizer_that_makes_text_without_end_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    """Each of six rules makes ten characters of one: a kilobyte would be a gigabyte."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    honest: list[Any] = [
        normalizers.Prepend("▁"),
        normalizers.Replace(" ", "▁"),
        normalizers.Replace("\n", "<0x0A>"),
    ]
    file = tmp_path / "tokenizer.json"
    tokenizer.normalizer = normalizers.Sequence(honest)
    tokenizer.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    assert load_tokenizer(tmp_path, trusted=False, how="-")("a a").input_ids
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("a", 10 * "a") for _ in range(6)]
    )
    tokenizer.save(str(file))
    with pytest.raises(DataError, match="1,000 times as much text") as caught:
        load_tokenizer(tmp_path, trusted=False, how="-")
    assert caught.value.where == str(file)


def test_a_template_of_a_million_characters_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    template = "{{ messages }}" + "x" * MAX_TEMPLATE_BYTES
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    with pytest.raises(DataError, match="the chat template has 1,048,590 characters"):
        load_tokenizer(tmp_path, trusted=False, how="-")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    for place in (tmp_path, tmp_path / "additional_chat_templates"):
        place.mkdir(exist_ok=True)
        (place / "chat_template.jinja").write_text(template)
        with pytest.raises(
            DataError, match=r"chat_template\.jinja is larger than the 1,048,576 bytes"
        ):
            load_tokenizer(tmp_path, trusted=False, how="-")
        (place / "chat_template.jinja").unlink()
    (tmp_path / "elsewhere.jinja").write_text(template)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "elsewhere.jinja").rename(elsewhere := tmp_path.parent / "elsewhere.jinja")
    own = load_tokenizer(tmp_path, trusted=False, how="-")
    with pytest.raises(DataError, match="larger than"):
        Forms(chat_template=str(elsewhere)).with_template(own)


def test_a_config_of_millions_of_labels_is_refused_before_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_labels": 10000000}')
    with pytest.raises(ModelError, match="10000000 labels"):
        read_config_file(tmp_path)


@pytest.mark.parametrize("value", ["[-Infinity]", "1.5", "99999999999999999999", '"</s>"', "true"])
def test_a_token_of_generation_that_is_none_is_refused_by_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"bos_token_id": {value}}}')
    with pytest.raises(ModelError, match="bos_token_id") as caught:
        load_generation_config(tmp_path)
    assert "generation_config.json" in str(caught.value)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "pad_token_id": -1}')
    assert load_generation_config(tmp_path) is not None
