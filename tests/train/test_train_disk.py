"""A disk that fills up, or refuses, costs the run and nothing that was saved before."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clirun import (
    assert_refused,
    assert_same_adapter,
    config_writer,
    lema,
)
from smallrun import write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def write_config(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(llama, tmp_path)


@contextmanager
def small_files(directory: Path) -> Iterator[None]:
    """Let no file grow beyond the size of the metrics and settings: the disk refuses the rest of
    a longer one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Fill the file system of `directory` but for what a line of metrics needs."""
    ballast = directory / "ballast"
    with ballast.open("wb") as out:
        try:
            while True:
                out.write(bytes(1 << 16))
                out.flush()
        except OSError:
            out.truncate(out.tell() // 4096 * 4096 - (8 << 10))
    try:
        yield
    finally:
        ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if sys.platform != "linux":
        pytest.skip("mounting is Linux's here")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield directory
    libc.umount2(os.fsencode(directory), 2)


def assert_survives(
    failing: Callable[[Path], Any],
    words: list[str],
    out: Path,
    write_config: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A checkpoint that cannot be written costs the run, and nothing that was there before."""
    shared = {
        "output_dir": str(out),
        "save_steps": 1,
        "lr_scheduler_type": "constant",
        "batch_size": 2,
    }
    straight = write_config(
        **{**shared, "output_dir": str(out.parent / "straight"), "max_steps": 3}
    )
    assert lema("train", straight) == 0
    config = write_config(**shared, max_steps=1)
    assert lema("train", config) == 0
    before = {path: path.read_bytes() for path in (out / "checkpoint-1").iterdir()}
    with failing(out):
        assert_refused(capfd, 6, words, "train", config, "--resume", "--set", "max_steps=3")
    assert [path.name for path in out.glob("*checkpoint*")] == ["checkpoint-1"]
    assert [path.name for path in out.glob(".*")] == []
    assert {path: path.read_bytes() for path in (out / "checkpoint-1").iterdir()} == before
    assert lema("train", config, "--resume", "--set", "max_steps=3") == 0
    assert_same_adapter(out, out.parent / "straight")


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint(
    small_disk: Path, write_config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["the disk is too full for a checkpoint", "earlier files are untouched"]
    assert_survives(full_disk, words, small_disk / "out", write_config, capfd)


@pytest.mark.slow
def test_a_limit_on_files_costs_no_checkpoint(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["the checkpoint could not be written", "File too large", "checkpoint-2"]
    assert_survives(small_files, words, tmp_path / "out", write_config, capfd)


@pytest.mark.slow
@pytest.mark.picture
def test_an_adapter_that_cannot_be_written_leaves_the_one_before(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("train", write_config(max_steps=1)) == 0
    before = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    again = write_config(max_steps=2, overwrite_output_dir=True)
    # The picture of the loss is smaller than the limit, so a folder stands in its place. It is
    # not worth the adapter: it is only warned of.
    (tmp_path / "out" / "loss.png").unlink()
    (tmp_path / "out" / "loss.png").mkdir()
    with (
        small_files(tmp_path),
        pytest.warns(UserWarning, match=r"cannot draw loss\.png: .*is a directory"),
    ):
        assert_refused(capfd, 6, ["the adapter could not be written"], "train", again)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
