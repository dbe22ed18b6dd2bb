"""Blocks of bitsandbytes' 4 bits that go on in the next row stand for what their codes say, as
they do on a GPU.
"""

from pathlib import Path

import pytest
import torch
from asloaded import llama, tensors, write_model
from formmutations import BITSANDBYTES, by_bitsandbytes
from torch import Tensor

from lema.model import meta_model, read_config
from lema.model.outer_weights import read_stored
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex

BLOCK = 64  # neighbouring elements that have a scale together

pytestmark = pytest.mark.filterwarnings("ignore")


def decoded(held: dict[str, Tensor], name: str) -> Tensor:
    """Return what the codes of a weight stand for, one after the other."""
    words = held[name].flatten()
    codes = torch.stack([words >> 4, words & 15], 1).flatten().long()
    return (
        held[f"{name}.quant_map"][codes].view(-1, BLOCK) * held[f"{name}.absmax"][:, None]
    ).flatten()


def test_every_weight_is_what_its_codes_say(tmp_path: Path) -> None:
    model = write_model(llama(), tmp_path / "model")  # rows of 32 and 48
    by_bitsandbytes(BITSANDBYTES["nf4"])(model)
    held = tensors(model)
    names = map_names(meta_model(read_config(model)), GlobalBinaryIndex(model))
    assert len(names.quantized) == 28
    for name in names.quantized:
        record = names.stored[name]
        assert record.shape[-1] % BLOCK
        assert torch.equal(read_stored(record, torch.float32).flatten(), decoded(held, name))
