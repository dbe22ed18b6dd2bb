"""In the slot of a device that copies every weight begins at an aligned address, wherever its
file has it.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_fakes import Stored, raw_bytes, same
from torch import Tensor

from lema.storage.header import TensorRecord
from lema.stream import LayerStream
from lema.stream.placement import lay_out_tensors
from lema.stream.slotlayout import SLOT_ALIGNMENT, VECTOR, Packed, lay_out, part_of
from lema_cpu import CpuBackend

TENSORS = st.lists(
    st.tuples(st.integers(0, 9000), st.integers(0, 20000), st.booleans()), max_size=20
)


def packed_of(tensors: list[tuple[int, int, bool]]) -> list[Packed]:
    """Tensors one after the other, with gaps."""
    packed = []
    end = 0
    for gap, nbytes, part in tensors:
        packed.append(Packed(end + gap, nbytes, VECTOR if part else SLOT_ALIGNMENT))
        end += gap + nbytes
    return packed


@given(TENSORS)
def test_every_tensor_is_copied_whole_to_an_aligned_place_of_its_own(
    tensors: list[tuple[int, int, bool]],
) -> None:
    packed = packed_of(tensors)
    layout = lay_out(packed)
    source = torch.arange(sum(gap + nbytes for gap, nbytes, _ in tensors), dtype=torch.int32)
    slot = torch.full((layout.nbytes,), -1, dtype=torch.int32)
    for span in layout.spans:
        assert bool((slot[span.slot : span.slot + span.nbytes] == -1).all()), "two spans overlap"
        slot[span.slot : span.slot + span.nbytes] = source[span.start : span.start + span.nbytes]
    for tensor in packed:
        if tensor.nbytes:
            (start,) = (slot == tensor.start).nonzero().flatten().tolist()
            assert start % tensor.alignment == 0
            assert torch.equal(
                slot[start : start + tensor.nbytes],
                source[tensor.start : tensor.start + tensor.nbytes],
            )


@given(TENSORS, st.integers(1, 5))
def test_the_parts_of_processes_are_the_slot(
    tensors: list[tuple[int, int, bool]], size: int
) -> None:
    layout = lay_out(packed_of(tensors))
    each = -(-layout.nbytes // size)
    moved = [part_of(layout, rank * each, (rank + 1) * each) for rank in range(size)]
    there = [
        (span.start + index, rank * each + span.slot + index)
        for rank, (begin, end, part) in enumerate(moved)
        for span in part.spans
        for index in (0, span.nbytes - 1)
        if begin <= span.start and span.start + span.nbytes <= end
    ]
    for start, slot in there:
        (span,) = (one for one in layout.spans if one.slot <= slot < one.slot + one.nbytes)
        assert start - span.start == slot - span.slot
    assert sum(part.copied for *_, part in moved) == layout.copied


def layer_at(directory: Path, lead: int, odd: bool) -> tuple[Stored, int]:
    """A layer whose tensors begin `lead` bytes into their file; the second has an odd number of
    bytes, or not.
    """
    contents: dict[str, Tensor] = {
        "weight": torch.randn(96, 64),
        "scale": torch.arange(7 if odd else 64, dtype=torch.uint8),
        "experts": torch.randn(4, 32, 32).bfloat16(),
    }
    file = directory / "layer.bin"
    data = bytearray(lead)
    records = {}
    names = {torch.float32: "F32", torch.uint8: "U8", torch.bfloat16: "BF16"}
    for name, tensor in contents.items():
        data += bytes(len(data) % tensor.dtype.itemsize)
        raw = raw_bytes(tensor)
        stored = TensorRecord(
            name, file, len(data), len(raw), names[tensor.dtype], tuple(tensor.shape)
        )
        records[name] = stored, tensor.dtype
        data += raw
    file.write_bytes(data)
    return Stored(file, [lay_out_tensors(records)], [contents]), len(data)


@pytest.mark.parametrize("lead", [0, 8, 24, 256, 4000])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("held", [{"residents": {0}}, {"host_cached": {0}}, {}], ids=str)
def test_leased_weights_begin_at_multiples_of_sixteen(
    tmp_path: Path, lead: int, odd: bool, held: dict[str, set[int]]
) -> None:
    stored, _ = layer_at(tmp_path, lead, odd)
    stream = LayerStream(stored.layers, CpuBackend(poison=True), **held)
    with stream.lease(0) as lease:
        assert same(lease.weights, stored.contents[0])
        assert all(weight.data_ptr() % VECTOR == 0 for weight in lease.weights.values())
        base = lease.slot.data_ptr()
        assert all(
            (weight.data_ptr() - base) % SLOT_ALIGNMENT == 0 for weight in lease.weights.values()
        )
    assert stream.counters.bytes_read == stored.layers[0].read_bytes
    stream.close()


def test_a_layer_that_is_aligned_within_itself_is_one_copy(tmp_path: Path) -> None:
    """Wherever its file has it, and with no more bytes than it has."""
    records = {}
    for number in range(3):
        records[str(number)] = (
            TensorRecord(
                str(number), tmp_path / "file", 1000 + 8 + 512 * number, 512, "U8", (512,)
            ),
            torch.uint8,
        )
    assert lay_out_tensors(records).upload_bytes == 3 * 512
