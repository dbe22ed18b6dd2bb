"""What is copied from where, seen without bytes, is what the same operations do to tensors that
have them.
"""

import random
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema.errors import ConfigError
from lema.model.conversions import CopyTrace
from lema.storage.header import TensorRecord, read_header
from lema.storage.quantized.formats import move_elements
from lema.storage.slices import AssembledRecord, Move, Piece, simplest
from lema.stream.placement import PAGE, lay_out_tensors, rank_share, views
from lema.stream.reader import LayerReader
from lema_cpu import CpuBackend


def rearranged(sources: Sequence[Tensor], seed: int) -> Tensor:
    """Stack, concatenate, split and turn over equal matrices, in ways that the seed chooses."""
    draw = random.Random(seed)
    made = list(sources)
    while len(made) > 1 or draw.random() < 0.5:
        way = draw.choice(["stack", "cat", "transpose", "chunk", "reshape", "clone"])
        same = len({tensor.shape for tensor in made}) == 1
        if way == "stack" and same and made[0].ndim < 4:
            made = [torch.stack(made, draw.randrange(made[0].ndim + 1))]
        elif way == "cat" and same:
            made = [torch.cat(made, draw.randrange(made[0].ndim))]
        elif way == "transpose":
            made = [tensor.transpose(0, -1).contiguous() for tensor in made]
        elif way == "chunk":
            made = [
                torch.chunk(tensor, 2, draw.randrange(tensor.ndim))[0].contiguous()
                for tensor in made
            ]
        elif way == "reshape" and made[0].ndim > 1:
            made = [tensor.flatten(0, 1) for tensor in made]
        elif way == "clone":
            made = [tensor.clone() for tensor in made]
    return made[0]


def traced(
    sources: Sequence[Tensor], seed: int
) -> tuple[tuple[int, ...], list[tuple[int, Move]] | None]:
    trace = CopyTrace()
    stand_ins = [
        trace.source(number, source.shape, source.dtype) for number, source in enumerate(sources)
    ]
    with trace:
        result = rearranged(stand_ins, seed)
    return tuple(result.shape), trace.moves(result)


def test_moves_do_what_the_operations_do() -> None:
    followed = 0
    for seed in range(400):
        draw = random.Random(seed)
        rows = 2 * draw.randrange(1, 5)
        columns = 2 * draw.randrange(1, 5)
        sources = [torch.randn(rows, columns) for _ in range(draw.randrange(1, 5))]
        expected = rearranged(sources, seed)
        shape, moves = traced(sources, seed)
        assert shape == tuple(expected.shape)
        if moves is None:
            continue
        followed += 1
        found = torch.full(shape, torch.nan)
        for number, move in moves:
            move_elements(sources[number], move, found)
        assert torch.equal(found, expected), seed
    # what is not followed is computed at the lease, which is right but slower
    assert followed > 380


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.to(torch.float64),
        lambda x: torch.cat([x, x * 2]),
        torch.zeros_like,
    ],
)
def test_what_is_computed_is_found_out(compute: object) -> None:
    trace = CopyTrace()
    source = trace.source(0, (2, 3), torch.float32)
    with trace:
        assert callable(compute)
        result = compute(source)
    assert trace.moves(result) is None


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["w", "a name of another length"])
def test_pieces_are_read_to_their_places_and_nothing_beside_them(
    tmp_path: Path, wanted: torch.dtype, direct: bool, name: str
) -> None:
    # Pieces of a page and more and less, neighbours in the file and not, at places as in the file
    # and elsewhere.
    shapes = [(3, 700), (3, 1024), (3, 333), (3, 1500), (3, 1), (3, 5)]
    tensors = {f"{name} {number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "weights.safetensors")
    records = read_header(tmp_path / "weights.safetensors")[1]
    for seed in range(6):
        draw = random.Random(seed)
        layer = {}
        expected = {}
        for number in range(4):
            chosen = draw.sample(sorted(tensors), draw.randrange(1, 5))
            whole = torch.cat([tensors[one].flatten() for one in chosen])
            pieces = list[Piece]()
            done = 0
            for one in chosen:
                pieces.append(Piece(records[one], Move(0, done, ((tensors[one].numel(), 1, 1),))))
                done += tensors[one].numel()
            record = AssembledRecord(f"{number}", (done,), tuple(pieces))
            layer[f"{number}"], expected[f"{number}"] = (record, wanted), whole.to(wanted)
        placed = lay_out_tensors(layer)
        assert placed.nbytes < sum(prod(shape) for shape in shapes) * 4 * 8 + 16 * PAGE
        buffer = CpuBackend().host_buffer(placed.nbytes).fill_(0xC3)
        reader = LayerReader(threads=4, direct=direct)
        reader.submit(placed, buffer).wait()
        reader.close()
        found = views(buffer, placed)
        assert all(torch.equal(found[one], tensor) for one, tensor in expected.items())
        covered = torch.zeros(placed.nbytes, dtype=torch.bool)
        for tensor in placed.tensors:
            covered[tensor.offset : tensor.offset + tensor.nbytes] = True
        assert bool((buffer[~covered] == 0xC3).all())


@pytest.mark.parametrize("size", [2, 3])
def test_processes_read_the_parts_of_a_layer_of_pieces(tmp_path: Path, size: int) -> None:
    tensors = {f"{number}": torch.randn(5, 301) for number in range(8)}
    save_file(tensors, tmp_path / "weights.safetensors")
    records = read_header(tmp_path / "weights.safetensors")[1]
    stacked = AssembledRecord(
        "s", (8, 5, 301), tuple(_whole(records[f"{one}"], one * 1505) for one in range(8))
    )
    turned = Piece(records["0"], Move(0, 0, ((5, 301, 1), (301, 1, 5))))
    layer = lay_out_tensors({"s": (stacked, torch.float32)})
    parts = []
    for rank in range(size):
        share = rank_share(layer, rank, size)
        reader = LayerReader(threads=2)
        parts.append(CpuBackend().host_buffer(share.nbytes))
        reader.submit(share, parts[-1]).wait()
        reader.close()
    assert torch.equal(
        views(torch.cat(parts), layer)["s"], torch.stack([tensors[f"{one}"] for one in range(8)])
    )
    with pytest.raises(ConfigError, match="lema prepare"):
        rank_share(
            lay_out_tensors({"t": (AssembledRecord("t", (301, 5), (turned,)), torch.float32)}),
            0,
            size,
        )


def _whole(record: TensorRecord, write: int) -> Piece:
    return Piece(record, Move(0, write, ((prod(record.shape), 1, 1),)))


def test_one_range_of_a_tensor_is_a_plain_record() -> None:
    record = TensorRecord("w", Path("file"), 100, 96, "F32", (4, 6))
    part = simplest("half", (2, 6), (Piece(record, Move(12, 0, ((12, 1, 1),))),))
    assert isinstance(part, TensorRecord) and (part.offset, part.nbytes, part.shape) == (
        148,
        48,
        (2, 6),
    )
