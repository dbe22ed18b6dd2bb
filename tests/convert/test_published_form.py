"""What is merged and prepared is the published checkpoint again, of every type: names, shapes,
classes and logits.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from everytype import STREAMED, opened
from openedways import classes, read, shapes
from parity import draw_b
from publishedclass import adapted, logits, publish
from safetensors.torch import load_file, save_file

from lema.convert.hubformat import open_stored
from lema.convert.merge import merge_adapter
from lema.convert.prepare import prepare
from lema.errors import WeightsError
from lema.model.skeleton import auto_class

VARIED = (
    *(
        "llama",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "qwen3_5",
        "qwen3_5_moe",
        "llama4",
        "gemma3",
        "mistral3",
        "gpt2",
    ),
    *("gpt_neox", "phi3", "deepseek_v3", "gpt_oss", "bloom"),
)
# Types with a module in several layers, which PEFT adapts in each for itself: its weights part.
PARTED = ("zamba", "zamba2")
TOWERS = ("model.vision_tower.", "model.multi_modal_projector.")  # which are not read
# Types of which PEFT's reader loses what PEFT has written.
MISREAD = (
    *("deepseek_ocr2", "inkling2", "inkling2_text", "laguna", "mistral_large4", "unlimited_ocr"),
)
TYPES = [
    pytest.param(kind, marks=() if kind in VARIED else pytest.mark.exhaustive)
    for kind in STREAMED
    if kind != "emu3"
]


def settings(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


# towers that the class that trains has not
@pytest.mark.filterwarnings("ignore:.*tensors on disk are not used")
@pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules")
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")  # which the other class needs
# of embeddings that nothing changed
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_merged_and_prepared_is_the_published_checkpoint_again(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    prepared = prepare(source, tmp_path / "prepared").path
    with opened(source) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    parts = {"tie_word_embeddings": False} if model_type in PARTED else {}
    assert settings(prepared) == settings(source)
    assert settings(merged) == settings(source) | parts
    assert shapes(prepared) == shapes(source)
    for kind in classes(source):
        whole, report = read(kind, source)
        plain = logits(whole)
        again, reported = read(kind, prepared)
        assert reported == report
        assert torch.equal(logits(again), plain)
        peft = adapted(whole, tmp_path / "adapter", misread=model_type in MISREAD)
        # PEFT adds every adapter of a weight that several modules share to the one weight; its
        # merge is not its model.
        changed = logits(peft if parts else peft.merge_and_unload())
        assert not torch.equal(changed, plain), (
            f"the adapter changes nothing on {type(whole).__name__}"
        )
        again, reported = read(kind, merged)
        assert reported == report
        torch.testing.assert_close(logits(again), changed, atol=1e-5, rtol=1e-5)
    again.save_pretrained(tmp_path / "again")  # of the class that the config names
    assert shapes(merged) == shapes(tmp_path / "again")
    assert parts or shapes(merged) == shapes(source)


@pytest.mark.parametrize(("model_type", "count"), [("emu3", 39), ("shieldgemma2", 55)])
def test_a_published_checkpoint_that_the_class_that_trains_does_not_read_is_refused(
    model_type: str, count: int, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    model, (missing, _) = read(auto_class(transformers.AutoConfig.from_pretrained(source)), source)
    # transformers draws them all
    assert set(missing) == {name for name in model.state_dict() if not name.startswith(TOWERS)}
    for refused in (lambda: prepare(source, tmp_path / "out"), lambda: open_stored(source)):
        with pytest.raises(WeightsError, match=rf"does not fit the model\n{count} missing"):
            refused()


def with_stray(source: Path, name: str, architecture: str | None = None) -> None:
    """Add a tensor to a checkpoint, and name another class in its config."""
    file = source / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(2, 32)}, file, metadata={"format": "pt"})
    changed = settings(source) | ({} if architecture is None else {"architectures": [architecture]})
    (source / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("name", "architecture", "kept"),
    [
        ("stray.weight", None, False),
        ("model.layers.9.mlp.down_proj.weight", None, False),
        ("score.weight", "LlamaForSequenceClassification", True),  # which reads it
        ("stray.weight", "LlamaForSequenceClassification", False),
        # transformers does not know what that reads
        (
            "stray.weight",
            "LlamaForSomethingElse",
            True,
        ),
        # transformers expects it, and needs it not
        (
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            None,
            True,
        ),
    ],
)
def test_what_no_class_reads_is_left_out_and_said(
    name: str, architecture: str | None, kept: bool, tmp_path: Path
) -> None:
    source = publish("llama", tmp_path / "source")
    plain = shapes(source)
    with_stray(source, name, architecture)
    expected = shapes(source) if kept else plain
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tensors on disk are not used")
        with opened(source) as model:
            model.save_pretrained(tmp_path / "adapter")
    said = f"1 tensors on disk are left out, because no class reads them: {name.replace('9', '*')}"
    with warnings.catch_warnings() if kept else pytest.warns(UserWarning, match=re.escape(said)):
        merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    prepared = prepare(source, tmp_path / "prepared")
    assert shapes(merged) == shapes(prepared.path) == expected
    assert [note.partition(":")[0] for note in prepared.notes()] == [
        "1 tensors left out, because no class reads them"
    ] * (not kept)
    if architecture is None:
        _, (missing, unexpected) = read(transformers.AutoModelForCausalLM, merged)
        assert not missing and not unexpected
