"""Weights that are not finite are refused where they are first read, by name, element and file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema.errors import NonFiniteError
from lema.storage.header import read_header
from lema.stream import reader
from lema.stream import weightcheck as baseguard
from lema.stream.placement import DTYPES, PAGE, LayerBytes, lay_out_tensors, rank_share
from lema.stream.reader import LayerReader
from lema.stream.weightcheck import BaseGuard, first_non_finite
from lema_cpu import CpuBackend

FLOATS = sorted(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
    ),
    key=str,
)


def test_every_floating_type_that_is_read_is_looked_at() -> None:
    assert set(baseguard.KINDS) == {dtype for dtype in DTYPES.values() if dtype.is_floating_point}


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_every_bit_pattern_of_the_short_types_is_told_as_torch_tells_it(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    every = torch.arange(256**width, dtype=torch.int64)
    patterns = every.to(torch.uint8 if width == 1 else torch.uint16).view(dtype)
    finite = patterns.float().isfinite()
    for index in (~finite).nonzero().flatten()[:: 1 if width == 1 else 97].tolist():
        assert first_non_finite(patterns[index : index + 1].view(torch.uint8), dtype) == 0
    assert first_non_finite(patterns[finite].view(torch.uint8), dtype) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_element_is_found_wherever_it_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseguard, "CHUNK", 64)
    largest = torch.finfo(dtype).max
    for index in (0, 7, 8, 63, 64, 65, 98):
        values = torch.full((99,), -largest, dtype=torch.float64)
        assert first_non_finite(values.to(dtype).view(torch.uint8), dtype) is None
        values[index:] = torch.nan
        assert first_non_finite(values.to(dtype).view(torch.uint8), dtype) == index
    assert first_non_finite(torch.empty(0, dtype=torch.uint8), dtype) is None


def written(
    path: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None
) -> tuple[LayerBytes, BaseGuard]:
    """Write a layer; return it as bytes, and a guard that knows its tensors by longer names."""
    save_file(tensors, path)
    records = read_header(path)[1]
    layer = lay_out_tensors(
        {name: (record, dtype or tensors[name].dtype) for name, record in records.items()}
    )
    return layer, BaseGuard({f"layers.3.{name}": record for name, record in records.items()})


def read(layer: LayerBytes, guard: BaseGuard | None) -> None:
    one = LayerReader(threads=3, guard=guard)
    try:
        one.submit(layer, CpuBackend().host_buffer(layer.nbytes)).wait()
    finally:
        one.close()


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(33, 65) for name in ("a", "b", "c")} | {
        "mask": torch.ones(5, 3, dtype=torch.int64)
    }


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_weight_is_named_with_its_element_and_file_however_reads_are_cut(
    name: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SEGMENT", PAGE)
    tensors = weights()
    tensors[name][32, 64] = value
    layer, guard = written(tmp_path / "one.safetensors", tensors)
    with pytest.raises(
        NonFiniteError, match=f"a weight of the model is NaN or infinite: layers.3.{name}"
    ) as caught:
        read(layer, guard)
    assert (
        caught.value.where == f"{tmp_path / 'one.safetensors'} (stored as {name}), element [32, 64]"
    )
    assert caught.value.exit_code == 5
    read(layer, None)


def test_what_was_looked_at_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, guard = written(tmp_path / "one.safetensors", weights())
    looked: list[int] = []
    look = baseguard.first_non_finite

    def counted(memory: Tensor, dtype: torch.dtype) -> int | None:
        looked.append(memory.numel())
        return look(memory, dtype)

    monkeypatch.setattr(baseguard, "first_non_finite", counted)
    read(layer, guard)
    assert sum(looked) == layer.read_bytes
    read(layer, guard)
    assert sum(looked) == layer.read_bytes


@pytest.mark.parametrize("rank", range(3))
def test_the_parts_of_several_processes_are_looked_at_too(rank: int, tmp_path: Path) -> None:
    tensors = weights()
    tensors["b"][20, 1] = torch.nan
    layer, guard = written(tmp_path / "one.safetensors", tensors)
    (run,) = layer.runs
    records = read_header(tmp_path / "one.safetensors")[1]
    at = run.slot_offset + records["b"].offset + (20 * 65 + 1) * 4 - run.offset
    part = rank_share(layer, rank, 3)
    if at // part.nbytes == rank:
        with pytest.raises(NonFiniteError, match=r"layers\.3\.b"):
            read(part, guard)
    else:
        read(part, guard)


def test_a_weight_too_large_for_the_type_it_is_cast_to_is_refused(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(4, 4), "large": torch.full((4, 4), 1e5)}
    layer, guard = written(tmp_path / "one.safetensors", tensors, torch.float16)
    with pytest.raises(NonFiniteError, match=r"layers\.3\.large, as float16"):
        read(layer, guard)
    read(*written(tmp_path / "two.safetensors", {"small": torch.ones(4, 4)}, torch.float16))
