"""Wherever its tensors lie, a layer read into a slot is those tensors: any offset, any dtype,
several files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_fakes import raw_bytes
from torch import Tensor

from lema.storage.header import TensorRecord
from lema.stream.placement import DTYPES, PAGE, LayerBytes, lay_out_tensors, views
from lema.stream.reader import SEGMENT, LayerReader
from lema_cpu import CpuBackend

FLOATS = ("F64", "F32", "F16", "BF16")
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 30), st.integers(1, 60)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70)),
)
GAPS = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 8, 52, 4095, 4096, 5000])


@dataclass(frozen=True)
class Wanted:
    """One tensor of a layout: its file, the bytes skipped before it, its dtype on disk and in
    the model.
    """

    file: int
    gap: int
    stored: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@st.composite
def wanted(draw: st.DrawFn) -> Wanted:
    stored = draw(st.sampled_from(sorted(DTYPES)))
    cast = stored in FLOATS and draw(st.booleans())
    dtype = DTYPES[draw(st.sampled_from(FLOATS))] if cast else DTYPES[stored]
    return Wanted(draw(st.integers(0, 2)), draw(GAPS), stored, dtype, draw(SHAPES))


def values(want: Wanted, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2 if want.stored == "BOOL" else 100, want.shape, generator=generator)
    return numbers.to(DTYPES[want.stored])


Tensors = dict[str, tuple[TensorRecord, torch.dtype]]


def lay_out(directory: Path, layout: list[Wanted]) -> tuple[Tensors, dict[str, Tensor]]:
    """Write the files of a layout; return where its tensors are, and what they are as the model
    wants them.
    """
    files = [bytearray() for _ in range(3)]
    tensors: Tensors = {}
    expected: dict[str, Tensor] = {}
    for number, want in enumerate(layout):
        name = f"t{number}"
        data = files[want.file]
        content = values(want, number)
        data += b"\xa5" * want.gap
        raw = raw_bytes(content)
        path = directory / f"{want.file}.bin"
        tensors[name] = (
            TensorRecord(name, path, len(data), len(raw), want.stored, want.shape),
            want.dtype,
        )
        expected[name] = content.to(want.dtype)
        data += raw
    for number, data in enumerate(files):
        (directory / f"{number}.bin").write_bytes(data)
    return tensors, expected


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new directory for every layout."""
    root = tmp_path_factory.mktemp("layouts")

    def numbered() -> Iterator[Path]:
        for number in count():
            directory = root / str(number)
            directory.mkdir()
            yield directory

    return numbered()


def read(layer: LayerBytes, direct: bool) -> Tensor:
    buffer = CpuBackend().host_buffer(layer.nbytes)
    buffer.fill_(0xC3)
    reader = LayerReader(threads=2, direct=direct)
    reader.submit(layer, buffer).wait()
    assert reader.bytes_read == layer.read_bytes
    reader.close()
    return buffer


@given(layout=st.lists(wanted(), max_size=8), direct=st.booleans())
def test_the_views_are_the_tensors(
    places: Iterator[Path], layout: list[Wanted], direct: bool
) -> None:
    tensors, expected = lay_out(next(places), layout)
    layer = lay_out_tensors(tensors)
    found = views(read(layer, direct), layer)
    assert list(found) == list(tensors)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert raw_bytes(found[name]) == raw_bytes(tensor)


@given(layout=st.lists(wanted(), min_size=1, max_size=8))
def test_places_do_not_overlap_and_runs_keep_to_their_pages(
    places: Iterator[Path], layout: list[Wanted]
) -> None:
    layer = lay_out_tensors(lay_out(next(places), layout)[0])
    assert layer.nbytes % PAGE == 0
    spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in layer.tensors)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert spans[-1][1] <= layer.nbytes
    for run in layer.runs:
        assert run.slot_offset % PAGE == run.offset % PAGE
    # A read past the page cache writes whole pages: nothing else may lie in the pages of a run.
    written = [(run.slot_offset, run.slot_offset + run.nbytes) for run in layer.runs if run.nbytes]
    written += [
        (cast.target.offset, cast.target.offset + cast.target.nbytes) for cast in layer.casts
    ]
    pages = sorted((start // PAGE, -(-end // PAGE)) for start, end in written if end > start)
    assert all(before[1] <= after[0] for before, after in pairwise(pages))
    assert not pages or pages[-1][1] * PAGE <= layer.nbytes


@given(layout=st.lists(wanted(), max_size=8))
def test_every_byte_is_read_once(places: Iterator[Path], layout: list[Wanted]) -> None:
    tensors, _ = lay_out(next(places), layout)
    assert lay_out_tensors(tensors).read_bytes == sum(
        record.nbytes for record, _ in tensors.values()
    )


def test_tensors_that_follow_each_other_are_one_run_in_whatever_order_they_are_named(
    tmp_path: Path,
) -> None:
    layout = [Wanted(0, 52, "F32", torch.float32, (7, 9))] + [
        Wanted(0, 0, "F32", torch.float32, (5,))
    ] * 4
    tensors, expected = lay_out(tmp_path, layout)
    backwards = dict(reversed(tensors.items()))
    layer = lay_out_tensors(backwards)
    assert len(layer.runs) == 1 and not layer.casts
    assert layer.runs[0].offset == 52 and layer.runs[0].nbytes == 4 * (63 + 20)
    found = views(read(layer, True), layer)
    assert list(found) == list(backwards)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("layout", "runs", "casts"),
    [
        (
            [Wanted(0, 0, "F32", torch.float32, (4,)), Wanted(1, 0, "F32", torch.float32, (4,))],
            2,
            0,
        ),
        (
            [Wanted(0, 0, "F32", torch.float32, (4,)), Wanted(0, 4, "F32", torch.float32, (4,))],
            2,
            0,
        ),
        (
            [Wanted(0, 0, "F32", torch.float32, (4,)), Wanted(1, 16, "F32", torch.float32, (4,))],
            2,
            0,
        ),
        ([Wanted(0, 2, "F32", torch.float32, (4,))], 0, 1),
        ([Wanted(0, 2, "BF16", torch.bfloat16, (4,))], 1, 0),
        (
            [Wanted(0, 0, "BF16", torch.float32, (4,)), Wanted(0, 0, "BF16", torch.bfloat16, (4,))],
            1,
            1,
        ),
        ([], 0, 0),
    ],
)
def test_bytes_are_used_in_place_where_they_can_be(
    tmp_path: Path, layout: list[Wanted], runs: int, casts: int
) -> None:
    layer = lay_out_tensors(lay_out(tmp_path, layout)[0])
    assert (len(layer.runs), len(layer.casts)) == (runs, casts)


def test_one_tensor_under_two_names_is_there_twice(tmp_path: Path) -> None:
    tensors, expected = lay_out(tmp_path, [Wanted(0, 8, "F32", torch.float32, (6, 5))])
    layer = lay_out_tensors({"a": tensors["t0"], "b": tensors["t0"]})
    found = views(read(layer, True), layer)
    assert torch.equal(found["a"], expected["t0"]) and torch.equal(found["b"], expected["t0"])


def test_casts_are_laid_out_in_the_order_of_the_names_so_that_runs_of_a_program_agree(
    tmp_path: Path,
) -> None:
    layout = [Wanted(0, 0, "F32", torch.bfloat16, (3, number + 1)) for number in range(6)]
    tensors, _ = lay_out(tmp_path, layout)
    layer = lay_out_tensors(tensors)
    assert [cast.target.name for cast in layer.casts] == list(tensors)
    assert sorted(layer.tensors, key=lambda tensor: tensor.offset) == list(layer.tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("gap", [0, 4, 4092])
def test_a_tensor_of_many_segments_arrives_whole(tmp_path: Path, direct: bool, gap: int) -> None:
    elements = (2 * SEGMENT + 5000) // 4
    layout = [
        Wanted(0, gap, "F32", torch.float32, (3,)),
        Wanted(0, 0, "F32", torch.float32, (elements,)),
    ]
    tensors, expected = lay_out(tmp_path, layout)
    layer = lay_out_tensors(tensors)
    found = views(read(layer, direct), layer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
