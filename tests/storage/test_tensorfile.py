"""What the writer leaves is a sound safetensors file, or nothing new at all."""

import errno
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lema.errors import DiskError, ReadError
from lema.storage import GlobalBinaryIndex
from lema.storage.tensorfile import (
    ALIGNMENT,
    PIECE_BYTES,
    TensorSpec,
    read_into,
    read_pieces,
    tensor_file,
)

TENSORS = {
    "z.weight": torch.randn(7, 3),
    "a.bias": torch.randn(5),
    "empty": torch.zeros(0, 2),
    "scalar": torch.tensor(3.0),
}
SPECS: list[TensorSpec] = [(name, "F32", tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def content(name: str) -> bytes:
    return TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()


def write_all(file: Path) -> None:
    with tensor_file(file, SPECS, {"format": "pt"}) as out:
        for name in reversed(TENSORS):
            out.write(name, [content(name)])


def test_the_library_reads_back_what_was_written_in_any_order_of_writing(tmp_path: Path) -> None:
    write_all(tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert loaded.keys() == TENSORS.keys()


def test_the_bytes_lie_in_the_order_announced_and_begin_on_a_page(tmp_path: Path) -> None:
    write_all(tmp_path / "model.safetensors")
    index = GlobalBinaryIndex(tmp_path)
    assert list(index) == list(TENSORS)
    assert next(iter(index.values())).offset % ALIGNMENT == 0
    assert index.metadata[tmp_path / "model.safetensors"] == {"format": "pt"}


def test_a_large_header_still_ends_on_a_page(tmp_path: Path) -> None:
    specs: list[TensorSpec] = [(f"model.layers.{i}.weight", "U8", (1,)) for i in range(500)]
    with tensor_file(tmp_path / "model.safetensors", specs) as out:
        for name, _, _ in specs:
            out.write(name, [b"x"])
    assert GlobalBinaryIndex(tmp_path)["model.layers.0.weight"].offset % ALIGNMENT == 0


def test_an_error_inside_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), tensor_file(file, SPECS) as out:
        out.write("a.bias", [content("a.bias")])
        raise KeyboardInterrupt
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_the_file_is_not_there_before_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with tensor_file(file, SPECS) as out:
        for name in TENSORS:
            out.write(name, [content(name)])
        assert not file.exists()
    assert file.exists() and list(tmp_path.iterdir()) == [file]


def test_permissions_are_those_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    write_all(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    "writes",
    [["a.bias", "a.bias"], ["unknown"], ["z.weight"]],
    ids=["twice", "not announced", "not all"],
)
def test_a_file_that_is_not_as_announced_never_appears(tmp_path: Path, writes: list[str]) -> None:
    with pytest.raises(AssertionError), tensor_file(tmp_path / "model.safetensors", SPECS) as out:
        for name in writes:
            out.write(name, [content(name) if name in TENSORS else b""])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [content("a.bias")[:-1], content("a.bias") + b"x", b""], ids=["few", "many", "none"]
)
def test_too_few_or_too_many_bytes_for_a_tensor_never_appear(tmp_path: Path, wrong: bytes) -> None:
    with pytest.raises(AssertionError), tensor_file(tmp_path / "model.safetensors", SPECS) as out:
        out.write("a.bias", [wrong])
    assert not list(tmp_path.iterdir())


def test_a_tensor_may_be_read_straight_to_its_place(tmp_path: Path) -> None:
    with tensor_file(tmp_path / "model.safetensors", SPECS) as out:
        for name in TENSORS:
            done = 0
            for place in out.space(name):
                place[:] = content(name)[done : done + len(place)]
                done += len(place)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_place_that_was_not_filled_to_its_end_never_appears(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), tensor_file(tmp_path / "model.safetensors", SPECS) as out:
        for name in ("a.bias", "empty", "scalar"):
            out.write(name, [content(name)])
        next(out.space("z.weight"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "ftruncate"])
def test_a_full_disk_is_said_so_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskError, match="disk is full") as caught:
        write_all(file)
    assert (
        caught.value.where == str(file)
        and "space" in caught.value.how
        and caught.value.exit_code == 6
    )
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write_all(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == TENSORS.keys()


FULL_DISK = """
import pathlib, sys
from lema.errors import DiskError
from lema.storage.tensorfile import tensor_file
place = pathlib.Path(sys.argv[1])
try:
    with tensor_file(place / "model.safetensors", [("t", "U8", (1 << 20,))]) as out:
        out.write("t", [bytes(1 << 20)])
except DiskError as error:
    print(error.what, sorted(path.name for path in place.iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    def in_small_disk(command: str) -> "subprocess.CompletedProcess[str]":
        mount = f'mount -t tmpfs -o size=256k none "{tmp_path}" && {command}'
        return subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, check=False
        )

    if sys.platform != "linux" or in_small_disk("true").returncode:
        pytest.skip(
            "mounting a small disk is not allowed here; the fake full disk above was tested"
        )
    (tmp_path.parent / "full.py").write_text(FULL_DISK)
    done = in_small_disk(f'"{sys.executable}" "{tmp_path.parent / "full.py"}" "{tmp_path}"')
    assert done.stdout == "the disk is full: model.safetensors could not be written []\n", (
        done.stderr
    )


def test_a_directory_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file") as caught:
        write_all(tmp_path / "gone" / "model.safetensors")
    assert "gone" in caught.value.where


def test_pieces_are_the_bytes_of_the_tensor_and_bounded(tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, (3 * PIECE_BYTES + 5,), dtype=torch.uint8)
    save_file({"before": torch.ones(3), "t": tensor}, tmp_path / "model.safetensors")
    record = GlobalBinaryIndex(tmp_path)["t"]
    tracemalloc.start()
    sizes = []
    same = True
    for piece in read_pieces(record):
        start = sum(sizes)
        same &= piece == tensor[start : start + len(piece)].numpy().data
        sizes.append(len(piece))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same and sum(sizes) == record.nbytes
    assert peak < PIECE_BYTES * 1.1


def test_a_file_cut_after_its_header_was_read_is_an_error_not_zeros(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    record = GlobalBinaryIndex(tmp_path)["z.weight"]
    os.truncate(record.file, record.offset + 4)
    with pytest.raises(ReadError, match=r"ended inside tensor 'z\.weight'"):
        list(read_pieces(record))
    record.file.unlink()
    with pytest.raises(ReadError, match=r"'z.weight', 84 bytes at 280, could not be read: No such"):
        read_into(record, memoryview(bytearray(4)))
