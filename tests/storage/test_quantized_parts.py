"""A part of a quantised weight expands to that part of what the whole weight expands to, bit for
bit.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantized import KINDS, prepared, published
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from lema.convert.prepare import prepare
from lema.storage import GlobalBinaryIndex
from lema.storage.header import TensorRecord
from lema.storage.quantized.formats import cut_rows
from lema.storage.quantized.records import QuantizedRecord, fold, part_of_quantized
from lema.stream import LayerStream
from lema.stream.placement import lay_out_tensors
from lema_cpu import CpuBackend


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("quantised") / "published")


def leased(records: dict[str, QuantizedRecord]) -> tuple[dict[str, Tensor], int]:
    """What a layer of these weights has on lease, and the bytes that are read for it."""
    layer = lay_out_tensors({name: (record, torch.float32) for name, record in records.items()})
    with closing(LayerStream([layer], CpuBackend(poison=True), prefetch_depth=0)) as stream:
        stream.announce([0])
        with stream.lease(0) as lease:
            return {name: one.clone() for name, one in lease.weights.items()}, layer.read_bytes


@pytest.mark.parametrize(
    "kind", [*KINDS[:1], pytest.param(KINDS[1], marks=pytest.mark.slow), KINDS[2]]
)
def test_parts_along_either_axis_are_those_of_the_whole(kind: str, source: Path) -> None:
    index = GlobalBinaryIndex(prepared(source, kind).path)
    records = {
        name: one
        for name, one in fold(index).items()
        if ".layers.3." in name and isinstance(one, QuantizedRecord)
    }
    whole, all_bytes = leased(records)
    assert len(whole) == 7
    for axis in (0, 1):
        ranges = {
            name: [(0, one.shape[axis] // 4), (one.shape[axis] // 2, one.shape[axis] - 16)]
            for name, one in records.items()
        }
        cut = {name: part_of_quantized(one, axis, ranges[name]) for name, one in records.items()}
        held, read = leased(cut)
        for name, one in held.items():
            parts = [whole[name].narrow(axis, start, stop - start) for start, stop in ranges[name]]
            assert torch.equal(one, torch.cat(parts, axis)), (name, axis)
            assert cut[name].shape == tuple(one.shape)
        # With one scale per row a part is all that is read; of blocks the whole is.
        assert read == all_bytes if kind == "nf4" else read < 0.75 * all_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_cut_from_what_is_stored_of_all(kind: str, tmp_path: Path) -> None:
    """Of nf4 their scales are in blocks of 256, which begin elsewhere than experts do."""
    sizes = {
        "num_hidden_layers": 1,
        "num_local_experts": 5,
        "hidden_size": 64,
        "intermediate_size": 192,
    }
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(vocab_size=48, num_attention_heads=2, num_key_value_heads=2, **sizes)
    ).save_pretrained(tmp_path / "plain")
    index = GlobalBinaryIndex(prepare(tmp_path / "plain", tmp_path / kind, quantize=kind).path)
    records = {
        name: one
        for name, one in fold(index).items()
        if ".experts." in name and isinstance(one, QuantizedRecord)
    }
    whole, all_bytes = leased(records)
    assert sorted(one.shape for one in whole.values()) == [(5, 64, 192), (5, 384, 64)]
    for first, end in ((0, 1), (1, 3), (3, 5), (0, 5)):
        held, read = leased({name: cut_rows(one, first, end) for name, one in records.items()})
        assert all(torch.equal(one, whole[name][first:end]) for name, one in held.items())
        assert read < (0.1 + (end - first) / 5) * all_bytes


def test_blocks_that_experts_share_are_refused(tmp_path: Path) -> None:
    parts = {
        "": TensorRecord("w", tmp_path, "U8", (48, 1), 0, 48),
        "absmax": TensorRecord("a", tmp_path, "F32", (2,), 0, 8),
    }
    record = QuantizedRecord(
        "experts", "bitsandbytes", parts, (2, 3, 16), {"quant_type": "nf4", "blocksize": 64}
    )
    with pytest.raises(ValueError, match="experts is stored in blocks that several experts share"):
        cut_rows(record, 0, 1)


def test_memory_for_a_whole_weight_is_counted_where_one_is_expanded(source: Path) -> None:
    records = {
        name: one
        for name, one in fold(GlobalBinaryIndex(prepared(source, "nf4").path)).items()
        if name.endswith("layers.0.mlp.down_proj.weight") and isinstance(one, QuantizedRecord)
    }
    ((name, record),) = records.items()
    part = part_of_quantized(record, 1, [(0, 96)])
    whole, half = (lay_out_tensors({name: (one, torch.float32)}) for one in (record, part))
    assert whole.scratch_bytes == 0
    assert half.scratch_bytes == whole.expanded_bytes
    assert half.expanded_bytes == half.scratch_bytes + whole.expanded_bytes // 2
    assert replace(half, expansions=()).expanded_bytes == 0
