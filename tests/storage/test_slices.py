"""Parts of stored tensors: the bytes of ranges along an axis, none between them, in place or
cast.
"""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lema.storage import slices
from lema.storage.header import TensorRecord, read_header
from lema.storage.slices import AssembledRecord, Move, Piece, part_of
from lema.stream.placement import lay_out_tensors, views
from lema.stream.reader import LayerReader
from lema_cpu import CpuBackend

Ranges = tuple[tuple[int, int], ...]


def some_ranges(draw: random.Random, length: int) -> Ranges:
    """A few ranges in any order, some of them neighbours."""
    cuts = sorted({0, length, *(draw.randrange(length + 1) for _ in range(4))})
    pieces = [(start, stop) for start, stop in pairwise(cuts) if draw.random() < 0.7]
    draw.shuffle(pieces)
    return tuple(pieces) or ((0, 1),)


def chosen(whole: torch.Tensor, axis: int, ranges: Ranges) -> torch.Tensor:
    return torch.cat([whole.narrow(axis, start, stop - start) for start, stop in ranges], axis)


def ranges_of(record: TensorRecord | AssembledRecord) -> list[tuple[int, int]]:
    pieces: tuple[Piece, ...] = record.pieces if isinstance(record, AssembledRecord) else ()
    return [one for piece in pieces for one in piece.ranges()[0]]


@pytest.mark.parametrize(
    "least", [0, slices.LEAST_READ], ids=["exactly", "with what lies between elements"]
)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=["as stored", "cast"])
def test_a_part_is_read_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype, least: int
) -> None:
    monkeypatch.setattr(slices, "LEAST_READ", least)
    draw = random.Random(0)
    whole = {
        f"tensor {number}": torch.randn(
            *(draw.randrange(1, 9) for _ in range(draw.randrange(1, 4)))
        )
        for number in range(60)
    }
    save_file(whole, tmp_path / "whole.safetensors")
    records = read_header(tmp_path / "whole.safetensors")[1]
    parts = {}
    expected = {}
    for name, tensor in whole.items():
        axis = draw.randrange(tensor.ndim)
        ranges = some_ranges(draw, tensor.shape[axis])
        parts[name] = part_of(records[name], axis, ranges)
        expected[name] = chosen(tensor, axis, ranges).to(wanted)
    layer = lay_out_tensors({name: (part, wanted) for name, part in parts.items()})
    buffer = CpuBackend().host_buffer(layer.nbytes).fill_(0xC3)
    reader = LayerReader(threads=2)
    reader.submit(layer, buffer).wait()
    reader.close()
    found = views(buffer, layer)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    wanted_bytes = sum(4 * tensor.numel() for tensor in expected.values())
    assert reader.bytes_read == layer.read_bytes
    assert (
        layer.read_bytes == wanted_bytes
        if least == 0
        else wanted_bytes < layer.read_bytes < 2 * wanted_bytes
    )
    assert {type(part) for part in parts.values()} == {TensorRecord, AssembledRecord}


def test_pieces_that_follow_each_other_are_one() -> None:
    record = TensorRecord("w", Path("file"), 100, 4 * 24, "F32", (2, 3, 4))
    rows = part_of(record, 0, [(1, 2)])
    assert isinstance(rows, TensorRecord) and (rows.offset, rows.nbytes, rows.shape) == (
        148,
        48,
        (1, 3, 4),
    )
    whole = part_of(record, 1, [(0, 1), (1, 3)])
    assert isinstance(whole, TensorRecord) and (whole.offset, whole.nbytes, whole.shape) == (
        100,
        96,
        (2, 3, 4),
    )
    columns = part_of(record, 2, [(2, 4)])
    assert columns.shape == (2, 3, 2) and ranges_of(columns) == [
        (108 + 16 * row, 8) for row in range(6)
    ]
    turned = part_of(record, 0, [(1, 2), (0, 1)])
    assert ranges_of(turned) == [(148, 48), (100, 48)]


def test_an_empty_part_has_no_bytes() -> None:
    record = TensorRecord("w", Path("file"), 0, 16, "F32", (4,))
    part = part_of(record, 0, [])
    assert (part.shape, part.nbytes) == ((0,), 0)


def test_parts_of_a_tensor_that_is_put_together_are_put_together_of_what_they_need(
    tmp_path: Path,
) -> None:
    """Experts stored one by one, in halves, row by row in turn, turned over, in one piece, and
    whole.
    """
    stacked = torch.randn(5, 4, 3)
    stored = {f"expert {one}": stacked[one].clone() for one in range(5)}
    stored |= {
        "upper": stacked[:, :2].clone(),
        "lower": stacked[:, 2:].clone(),
        "whole": stacked.clone(),
    }
    stored |= {"even": stacked[:, ::2].clone(), "odd": stacked[:, 1::2].clone()}
    stored["turned"] = stacked.mT.contiguous()
    save_file(stored, tmp_path / "stored.safetensors")
    records = read_header(tmp_path / "stored.safetensors")[1]

    def made(*pieces: tuple[str, Move]) -> AssembledRecord:
        return AssembledRecord(
            "experts", (5, 4, 3), tuple(Piece(records[name], move) for name, move in pieces)
        )

    run = ((12, 1, 1),)
    halves = ((5, 6, 12), (6, 1, 1))
    turns = ((5, 6, 12), (2, 3, 6), (3, 1, 1))
    ways: dict[str, TensorRecord | AssembledRecord] = {
        "one by one": made(*((f"expert {one}", Move(0, 12 * one, run)) for one in range(5))),
        "in halves": made(("upper", Move(0, 0, halves)), ("lower", Move(0, 6, halves))),
        "in turn": made(("even", Move(0, 0, turns)), ("odd", Move(0, 3, turns))),
        "turned over": made(("turned", Move(0, 0, ((5, 12, 12), (4, 1, 3), (3, 4, 1))))),
        "in one piece": made(("whole", Move(0, 0, ((60, 1, 1),)))),
        "whole": records["whole"],
    }
    reader = LayerReader(threads=1)
    draw = random.Random(0)
    some = [(axis, some_ranges(draw, stacked.shape[axis])) for axis in (0, 1, 2) for _ in range(9)]
    for axis, ranges in ((0, ((0, 5),)), (0, ((1, 3),)), (0, ((4, 5),)), *some):
        wanted = chosen(stacked, axis, ranges)
        layer = lay_out_tensors(
            {way: (part_of(record, axis, ranges), torch.float32) for way, record in ways.items()}
        )
        buffer = CpuBackend().host_buffer(layer.nbytes).fill_(0xC3)
        reader.submit(layer, buffer).wait()
        assert all(torch.equal(found, wanted) for found in views(buffer, layer).values()), (
            axis,
            ranges,
        )
        assert axis or layer.read_bytes == len(ways) * wanted.nbytes
    reader.close()
    with pytest.raises(ValueError, match="leaves its axis in the middle"):
        part_of(made(("whole", Move(0, 6, ((2, 12, 12), (12, 1, 1))))), 0, [(0, 1)])
