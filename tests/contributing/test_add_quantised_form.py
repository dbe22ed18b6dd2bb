"""How to add a quantised form in which models are published: `toyform.py` is one.

The numbers that the codes stand for are written beside the packed model as a whole one. What LEMA
reads are these numbers, and a training step has the bits of the whole model.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from quantized import ARCHITECTURE, LINEARS, published
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches
from torch import Tensor
from toyform import (
    BITS,
    FORMATS,
    METHOD,
    TOY,
    ToyQuantizer,
    ToySettings,
    codes_of,
    for_lema,
    for_transformers,
)
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

from lema.convert.tensors import read_tensor
from lema.model import meta_model, read_config
from lema.model.quantizers import methods
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex

FILE = "model.safetensors"
NUM_LAYERS = 4

pytestmark = pytest.mark.usefixtures("settings_are_known")


@pytest.fixture
def settings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package does so by `transformers.quantizers.auto.register_quantization_config`."""
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, ToySettings)


def write(directory: Path, stored_of: Callable[..., dict[str, Tensor]]) -> Checkpoint:
    """Write a model in the form, and beside it, whole, what its codes stand for."""
    whole = published(directory / "whole", num_hidden_layers=NUM_LAYERS)
    stored = dict[str, Tensor]()
    plain = dict[str, Tensor]()
    for file in sorted(whole.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if "proj.weight" in name:
                codes, scales = codes_of(weight)
                plain[name] = codes * scales
                stored |= stored_of(name, codes, scales)
            else:
                stored[name] = plain[name] = weight
    for file in whole.glob("*.safetensors*"):
        file.unlink()
    small = directory / "small"
    small.mkdir()
    save_file(plain, whole / FILE, {"format": "pt"})
    save_file(stored, small / FILE, {"format": "pt"})
    settings = {"quant_method": METHOD, "bits": BITS, "format": FORMATS[0], "dequantize": True}
    config = json.loads((whole / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return Checkpoint(ARCHITECTURE, whole, small)


def check(checkpoint: Checkpoint) -> None:
    """Compare every weight that LEMA reads, and a training step, with those of the whole model."""
    model = meta_model(read_config(checkpoint.streamed), torch.float32)
    names = map_names(model, GlobalBinaryIndex(checkpoint.streamed))
    assert len(names.quantized) == LINEARS * NUM_LAYERS
    for name, weight in load_file(checkpoint.published / FILE).items():
        assert torch.equal(read_tensor(names.stored[name], torch.float32), weight), name
    whole = whole_model(checkpoint)
    draw_b(whole)
    batches = micro_batches(3, padding=True)
    with streamed_model(checkpoint) as streamed:
        draw_b(streamed.lora_manager)
        assert_same(streamed_step(streamed, batches), whole_step(whole, batches))


def test_a_form_that_transformers_expands_needs_no_line_of_lema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package registers it by `transformers.quantizers.auto.register_quantizer`."""
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, METHOD, ToyQuantizer)
    checkpoint = write(tmp_path, for_transformers)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.streamed).state_dict()
    whole = load_file(checkpoint.published / FILE)
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())
    check(checkpoint)


def test_a_form_that_lema_expands_is_one_entry_of_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.PACKED, METHOD, (TOY, FORMATS, (BITS,)))
    check(write(tmp_path, for_lema))
