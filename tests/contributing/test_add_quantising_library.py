"""How to add a library that quantises: `toylibrary.py` is one, and `LIBRARIES` the table of all.

`prepare` writes a model with it, as `lema prepare --quantize rows8` does. Every weight that is read
again is what the library's parts stand for, and a step has the bits of the whole model.
"""

from pathlib import Path

import pytest
import torch
import toylibrary
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from quantized import ARCHITECTURE, LINEARS, prepared, published
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches
from toyform import codes_of

from lema.convert.tensors import read_tensor
from lema.errors import ConfigError, WeightsError
from lema.storage import GlobalBinaryIndex
from lema.storage.quantized import formats

NUM_LAYERS = 4
(KIND,) = toylibrary.KINDS


@pytest.fixture
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the library where a contributor does; `KINDS` is made of that table."""
    monkeypatch.setitem(formats.LIBRARIES, toylibrary.LIBRARY, toylibrary)
    monkeypatch.setitem(formats.KINDS, KIND, toylibrary.LIBRARY)


@pytest.mark.usefixtures("in_the_table")
def test_what_is_written_is_read_as_what_it_stands_for(tmp_path: Path) -> None:
    source = published(tmp_path / "source", num_hidden_layers=NUM_LAYERS)
    result = prepared(source, KIND)
    assert {row.sampled for row in result.precision} == {NUM_LAYERS}
    assert 0 < max(row.weights_worst for row in result.precision) < 0.02
    records = formats.fold(GlobalBinaryIndex(result.path))
    weights = {
        name: weight
        for file in source.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
    changed = 0
    for name, weight in weights.items():
        if isinstance(records[name], formats.QuantizedRecord):
            codes, scales = codes_of(weight)
            weights[name] = codes * scales
            changed += 1
        assert torch.equal(read_tensor(records[name], torch.float32), weights[name]), name
    assert changed == LINEARS * NUM_LAYERS

    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(ARCHITECTURE, source, result.path)
    whole = whole_model(checkpoint)
    draw_b(whole)
    batches = micro_batches(3, padding=True)
    with streamed_model(checkpoint) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.usefixtures("in_the_table")
def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    codes = torch.zeros(2, 2, dtype=torch.int8)
    save_file({"up_proj.weight.toy_codes": codes}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'up_proj.weight' lacks up_proj.weight.toy_scales"):
        formats.fold(GlobalBinaryIndex(tmp_path))


def test_a_kind_that_is_in_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot be quantised to '{KIND}'"):
        prepared(published(tmp_path / "source", num_hidden_layers=1), KIND)
