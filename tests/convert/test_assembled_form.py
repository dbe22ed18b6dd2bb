"""A file whose tensors are put together is a checkpoint like any other: no class draws its
weights at random.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from everytype import STREAMED, micro_batches, opened
from openedways import classes, read, shapes
from parity import draw_b
from publishedclass import logits, publish, published_class
from tinyconfig import tiny_config

from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare
from lema.model import meta_model, read_config
from lema.model.skeleton import auto_class
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex
from lema.storage.index import SINGLE_NAME

VARIED = (
    "llama",
    "qwen3_moe",
    "mixtral",
    "qwen3_5",
    "qwen3_5_moe",
    "llama4",
    "gemma3",
    "gpt2",
    "qwen3_vl_moe",
)
VARIED += ("inkling2_text", "dots3_note")
TYPES = [
    pytest.param(kind, marks=() if kind in VARIED else pytest.mark.exhaustive)
    for kind in STREAMED
    if kind != "emu3"
]
# Types that are published in pieces of which no name in memory is read by both classes, or as it
# is.
IN_PIECES = ("dots3_note", "inkling2", "inkling2_text")


@pytest.mark.parametrize("model_type", TYPES)
def test_a_prepared_file_is_read_as_its_source_by_every_class_and_needs_no_assembling(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    one = tmp_path / "one"
    shutil.copytree(source, one, ignore=shutil.ignore_patterns("model*"))
    prepare(source, one / SINGLE_NAME)
    for kind in classes(source):
        whole, (missing, unexpected) = read(kind, source)
        again, (missed, unread) = read(kind, one)
        assert missed == missing
        assert bool(unread) == bool(unexpected)  # towers of a class that sees images
        assert torch.equal(logits(again), logits(whole))
    if model_type not in IN_PIECES:
        assert map_names(meta_model(read_config(one)), GlobalBinaryIndex(one)).rearranged == []
    # What is written of it again is as published.
    assert shapes(prepare(one, tmp_path / "again").path) == shapes(source)


@pytest.mark.filterwarnings("ignore:.*tensors on disk are not used")
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5"])
def test_an_adapter_of_a_prepared_file_is_merged_into_what_is_published(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    one = tmp_path / "one"
    shutil.copytree(source, one, ignore=shutil.ignore_patterns("model*"))
    prepare(source, one / SINGLE_NAME)
    found = []
    for base in (source, one):
        with opened(base) as model:
            draw_b(model.lora_manager)
            model.save_pretrained(tmp_path / f"adapter of {base.name}")
        merged = merge_adapter(
            tmp_path / f"adapter of {base.name}", tmp_path / f"merged {base.name}"
        )
        assert shapes(merged) == shapes(source)
        found.append(logits(read(published_class(tiny_config(model_type)), merged)[0]))
    assert torch.equal(*found)


@pytest.mark.parametrize("model_type", ["mixtral", "gemma3", "qwen3_5"])
def test_a_model_in_memory_is_written_as_save_pretrained_does_or_put_together(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    one = tmp_path / "one"
    kind = published_class(tiny_config(model_type))
    model, _ = read(kind, source)
    assert shapes(prepare(model, tmp_path / "out").path) == shapes(source)
    shutil.copytree(source, one, ignore=shutil.ignore_patterns("model*"))
    prepare(model, one / SINGLE_NAME)
    for directory in (tmp_path / "out", one):
        again, (missing, unexpected) = read(kind, directory)
        assert not missing and not unexpected
        assert torch.equal(logits(again), logits(model))
    assert shapes(one) == shapes(prepare(source, tmp_path / "file.safetensors").path)


@pytest.mark.filterwarnings("ignore:.*tensors on disk are not used")  # towers
def test_what_no_class_reads_in_one_piece_is_not_quantised_and_said(tmp_path: Path) -> None:
    source = publish("dots3_note", tmp_path / "source")
    quantized = prepare(source, tmp_path / "out", quantize="int8")
    assert any(
        note.startswith("4 tensors not quantised, because they stay in pieces")
        for note in quantized.notes()
    )
    expanded = prepare(quantized.path, tmp_path / "expanded").path
    assert shapes(expanded) == shapes(source)
    whole, _ = read(transformers.AutoModelForCausalLM, expanded)
    with opened(quantized.path) as model:
        streamed: list[torch.Tensor] = []
        model.adapter.loss(micro_batches()[:1], logits=streamed)
    assert torch.equal(streamed[0], logits(whole))


def quantizable(model_type: str, directory: Path) -> Path:
    """Write a model whose rows are long enough for every kind of quantisation."""
    config = tiny_config(model_type)
    for part in (config, config.get_text_config()):
        for size in (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ):
            if isinstance(getattr(part, size, None), int):
                setattr(part, size, 64)
    if model_type.startswith("qwen3_5"):
        config.vision_config.out_hidden_size = 64
    torch.manual_seed(0)
    published_class(config)._from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def whole_state(kind: Any, directory: Path) -> dict[str, torch.Tensor]:
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_a_quantised_directory_is_read_by_the_class_that_its_config_names(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    source = quantizable(model_type, tmp_path / "source")
    quantized = prepare(source, tmp_path / "out", quantize=kind).path
    named = getattr(
        transformers, json.loads((quantized / "config.json").read_text())["architectures"][0]
    )
    before = whole_state(named, source)
    after = whole_state(named, quantized)
    towers = [name for name in before if "visual" in name]
    assert bool(towers) == (model_type == "qwen3_5")
    assert all(torch.equal(after[name], before[name]) for name in towers)
    assert shapes(prepare(quantized, tmp_path / "again").path) == shapes(source)


@pytest.mark.parametrize(
    ("model_type", "kind", "message"),
    [
        # experts in one tensor are not bitsandbytes'
        (
            "qwen3_moe",
            "nf4",
            "ignore_mismatched_sizes",
        ),
        ("mixtral", "nf4", "ignore_mismatched_sizes"),
        # torchao's tensors cannot be renamed
        (
            "qwen3_5",
            "int8",
            "issues during automatic conversion",
        ),
    ],
)
def test_a_class_that_cannot_read_a_quantised_directory_says_so(
    model_type: str, kind: str, message: str, tmp_path: Path
) -> None:
    source = quantizable(model_type, tmp_path / "source")
    quantized = prepare(source, tmp_path / "out", quantize=kind).path
    with pytest.raises(RuntimeError, match=message):
        auto_class(read_config(quantized)).from_pretrained(quantized)
    with opened(quantized) as model:
        assert model.adapter is not None
