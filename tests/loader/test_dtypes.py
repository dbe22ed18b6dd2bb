"""The dtype of a model whose config names none is the one that `from_pretrained` finds in its
files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blockfp8
import pytest
import torch
from asloaded import edit_config, llama, opened, store, tensors, write_model
from tinyconfig import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from lema import LemaConfig, LemaModel
from lema.errors import WeightsError
from lema.model import read_config
from lema.model.skeleton import auto_class
from lema.model.weight_names import checkpoint_dtype
from lema.plan.blueprint import draw_up
from lema.storage import GlobalBinaryIndex

pytestmark = pytest.mark.filterwarnings("ignore")

NORMS: Callable[[str], bool] = lambda name: "norm" in name  # noqa: E731
EMBEDDINGS: Callable[[str], bool] = lambda name: "embed" in name  # noqa: E731
HEAD: Callable[[str], bool] = lambda name: "lm_head" in name  # noqa: E731
TOWER: Callable[[str], bool] = lambda name: "vision" in name  # noqa: E731


def checkpoint(
    directory: Path, config: Any, wide: Callable[[str], bool], **parts: str | None
) -> Path:
    """Write a model in bf16, of which some tensors are stored in fp32, and whose config names
    the dtypes of `parts`.
    """
    model = write_model(config, directory, torch.bfloat16)
    store(model, {name: one.float() if wide(name) else one for name, one in tensors(model).items()})
    written = json.loads((model / "config.json").read_text())
    inner = {name: written[name] | {"dtype": dtype} for name, dtype in parts.items()}
    edit_config(model, "dtype", "torch_dtype", **inner)
    return model


def loaded_dtype(model: Path) -> torch.dtype:
    """Return the dtype that `from_pretrained` alone chooses."""
    loaded = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(model)
    found: torch.dtype = loaded.config.dtype
    assert loaded.get_output_embeddings().weight.dtype == found
    return found


@pytest.mark.parametrize(
    ("wide", "expected"),
    [(NORMS, torch.bfloat16), (EMBEDDINGS, torch.bfloat16), (HEAD, torch.float32)],
    ids=["norms", "embeddings", "head"],
)
def test_the_first_floating_tensor_of_the_sorted_names_decides(
    wide: Callable[[str], bool], expected: torch.dtype, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", llama(), wide)
    assert (
        loaded_dtype(model)
        == expected
        == checkpoint_dtype(read_config(model), GlobalBinaryIndex(model))
    )
    streamed = LemaModel(LemaConfig(str(model), device="cpu", save_steps=0))
    assert streamed.skeleton.lm_head.weight.dtype == expected
    streamed.close()
    assert draw_up(LemaConfig(str(model), device="cpu")).model.lm_head.weight.dtype == expected


@pytest.mark.parametrize("vision", ["float32", "bfloat16", None], ids=str)
@pytest.mark.parametrize("text", ["float32", "bfloat16", "float16", None], ids=str)
def test_dtypes_of_parts_are_read_as_they_are(
    text: str | None, vision: str | None, tmp_path: Path
) -> None:
    parts = {"text_config": text, "vision_config": vision}
    model = checkpoint(tmp_path / "model", tiny_config("gemma3"), TOWER, **parts)
    assert checkpoint_dtype(read_config(model), GlobalBinaryIndex(model)) == loaded_dtype(model)


@pytest.mark.parametrize("told", ["float32", None], ids=str)
def test_what_the_index_of_shards_says_comes_first(told: str | None, tmp_path: Path) -> None:
    model = write_model(llama(), tmp_path / "model", torch.bfloat16)
    loaded = auto_class(read_config(model)).from_pretrained(model)
    (model / "model.safetensors").unlink()
    loaded.save_pretrained(model, max_shard_size="10KB")
    edit_config(model, "dtype")
    file = model / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    told = {} if told is None else {"dtype": told}
    file.write_text(json.dumps(index | {"metadata": index["metadata"] | told}))
    assert checkpoint_dtype(read_config(model), GlobalBinaryIndex(model)) == loaded_dtype(model)
    file.write_text(json.dumps(index | {"metadata": index["metadata"] | {"dtype": "float31"}}))
    with pytest.raises(WeightsError, match=r"finds no dtype for the model.*float31"):
        checkpoint_dtype(read_config(model), GlobalBinaryIndex(model))


@pytest.mark.parametrize("asked", ["float32", None], ids=str)
def test_the_quantizer_of_a_checkpoint_has_the_last_word(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blockfp8.write(llama(), tmp_path / "model")
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "update_dtype", lambda *_: torch.float16)
    how = FineGrainedFP8Config(dequantize=True, weight_block_size=blockfp8.BLOCK)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=asked or "auto", quantization_config=how
    )
    assert (
        checkpoint_dtype(read_config(model), GlobalBinaryIndex(model), asked)
        == loaded.dtype
        == torch.float16
    )
    with opened(model, dtype=asked) as streamed:
        assert streamed.skeleton.config.dtype == torch.float16


@pytest.mark.parametrize(
    "method", ["bitsandbytes_4bit", "bitsandbytes_8bit", "torchao", "gptq", "awq", "auto-round"]
)
def test_quantizers_that_are_not_asked_keep_every_dtype(method: str) -> None:
    """Where LEMA expands what is stored itself. AWQ's has a word for its kernels on a GPU, which
    do not run here.
    """
    kind = AUTO_QUANTIZER_MAPPING[method]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kind.update_dtype(kind.__new__(kind), dtype) == dtype
