"""A disk that fails, or gives less than it is asked for, under any command: an error with a way
out; no difference.
"""

import errno
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, assert_same_adapter, config_writer, lema, write_rows
from failingdisk import FailingDisk
from faults.diskseam import DiskSeam
from smallrun import write_model

from lema.data import cache, prepare_data
from lema.data.packed import PackedTokens, write_packed
from lema.errors import ReadError
from lema.storage.manifest import check_manifest

WEIGHTS = "adapter_model.safetensors"
PROMPT = ("--prompt", "the miller", "--max-new-tokens", "3")
FAILS = ("the disk failed while the file was read: Input/output error", "fix:   check the disk")
BYTES = re.compile(r"[\d,]+ bytes at [\d,]+")


class Trained:
    """A model, the settings of a run of two steps, and what it left; `words` are what `lema` is
    told, with names.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.model = write_model(place / "model", num_hidden_layers=5)
        self.config = config_writer(self.model, place)(max_steps=2, save_steps=1, lora_dropout=0.1)
        assert lema("train", self.config) == 0
        assert lema("shard", place / "out", place / "shards", "--tp", 2) == 0

    def words(self, command: str, out: Path) -> list[Any]:
        adapter = self.place / "out"
        return {
            "train": ["train", self.config, "--set", f"output_dir={out}"],
            "generate": ["generate", adapter, *PROMPT],
            "eval": ["eval", adapter, "--data", self.place / "data.jsonl"],
            "merge": ["merge", adapter, out],
            "prepare": ["prepare", self.model, out],
            "shard": ["shard", adapter, out, "--tp", 2],
            "consolidate": ["consolidate", self.place / "shards", out],
            "report": ["report", adapter, "--output", out],
            "data": ["data", self.config],
        }[command]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as within:
        yield within


# The file that fails from a byte on; names are told, and the bytes where there are some.
FILES = (
    ("train", "model/model-00001", 0),
    ("train", "model/model-00001", 20_000),
    ("train", "model/config.json", 0),
    ("train", "model.safetensors.index.json", 0),
    ("train", "data.jsonl", 0),
    ("train", "run.yaml", 0),
    ("generate", f"out/{WEIGHTS}", 0),
    ("generate", f"out/{WEIGHTS}", 20_000),
    ("generate", "out/adapter_config.json", 0),
    ("eval", "data.jsonl", 0),
    ("merge", "model/model-00001", 20_000),
    ("merge", f"out/{WEIGHTS}", 20_000),
    ("prepare", "model/model-00001", 20_000),
    ("shard", f"out/{WEIGHTS}", 20_000),
    ("consolidate", "tp_01.safetensors", 0),
    ("report", "out/metrics.jsonl", 0),
    ("data", "data.jsonl", 0),
)


@pytest.mark.parametrize(("command", "name", "begin"), FILES)
def test_a_disk_that_fails_is_named_with_the_bytes_and_nothing_is_left(
    command: str, name: str, begin: int, trained: Trained, patch: pytest.MonkeyPatch, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    disk = FailingDisk(name, begin=begin).install(patch.setattr)
    capfd.readouterr()
    code = lema(*trained.words(command, tmp_path / "out"))
    said = capfd.readouterr().err
    assert code == 6, said
    assert (
        disk.reads
        and name.rpartition("/")[2] in said
        and "Input/output error" in said
        and "fix: " in said
    )
    assert all(text in said for text in FAILS) if not begin else BYTES.search(said)
    assert command == "train" or not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "generate", "merge", "prepare", "consolidate"])
def test_reads_that_return_less_than_they_are_asked_for_change_nothing(
    command: str,
    trained: Trained,
    patch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    capfd.readouterr()
    assert lema(*trained.words(command, whole)) == 0
    printed = capfd.readouterr().out
    disk = FailingDisk(str(trained.place), short=True).install(patch.setattr)
    assert lema(*trained.words(command, parts)) == 0
    assert disk.reads
    if command == "generate":
        assert capfd.readouterr().out == printed
    for file in whole.glob("*.safetensors"):
        assert (parts / file.name).read_bytes() == file.read_bytes()


def read_only(kind: str, path: Path, done: float) -> None:
    """What a disk says, to any change, that is mounted to be read."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


WRITERS = ("train", "merge", "prepare", "shard", "consolidate", "report")


@pytest.mark.parametrize("command", [*WRITERS, "generate", "trace", "data_cache"])
def test_a_disk_that_is_mounted_to_be_read_is_named_and_left_as_it_is(
    command: str,
    trained: Trained,
    patch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (place := tmp_path / "mounted").mkdir()
    words = trained.words(command if command in WRITERS else "train", place / "out")
    if command == "generate":
        words = [*trained.words("generate", place), "--output", place / "texts.jsonl"]
    elif command not in WRITERS:
        words = trained.words("train", tmp_path / "out")
        words += (
            ["--trace", place / "t.json"]
            if command == "trace"
            else ["--set", f"data_cache={place / 'kept'}"]
        )
        patch.setattr(cache, "SMALL", 0)
    DiskSeam(place, read_only).install(patch.setattr)
    assert_refused(capfd, 6, ["Read-only file system", str(place), "fix: "], *words)
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    "command", ["train", "generate", "eval", "merge", "shard", "consolidate", "report", "data"]
)
def test_what_is_read_may_be_on_a_disk_that_is_mounted_to_be_read(
    command: str, trained: Trained, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    DiskSeam(trained.place, read_only).install(patch.setattr)
    assert lema(*trained.words(command, tmp_path / "out")) == 0


def test_a_disk_that_fails_in_a_run_leaves_the_checkpoint_before_and_it_goes_on(
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The layers are read in every step; from the second on one cannot be."""
    out = tmp_path / "out"
    words = [*trained.words("train", out), "--set", "host_memory=100KB"]

    class Later(FailingDisk):
        def allowed(self, offset: int, nbytes: int) -> int:
            self.begin = 0 if (out / "checkpoint-1").exists() else None
            return super().allowed(offset, nbytes)

    with monkeypatch.context() as patch:
        Later("model/model-").install(patch.setattr)
        assert_refused(capfd, 6, ["model-0000", "bytes at", "Input/output error", "fix: "], *words)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    check_manifest(out / "checkpoint-1")
    assert lema(*words, "--resume") == 0
    assert_same_adapter(out, trained.place / "out")


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors", "state.json"])
def test_a_checkpoint_that_cannot_be_read_is_passed_over_for_the_one_before(
    name: str,
    trained: Trained,
    patch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = shutil.copytree(trained.place / "out", tmp_path / "out")
    (out / WEIGHTS).unlink()
    disk = FailingDisk(f"checkpoint-2/{name}", begin=0).install(patch.setattr)
    assert lema(*trained.words("train", out), "--resume") == 0
    said = capfd.readouterr()
    assert disk.reads and "checkpoint-2 is damaged and passed over" in said.out + said.err
    assert_same_adapter(out, trained.place / "out")


def test_rows_of_packed_tokens_are_read_and_not_mapped(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write_packed(range(64), tmp_path, "uint16")
    rows = PackedTokens(file, 16)
    again = pickle.loads(pickle.dumps(rows))
    expected = [row["input_ids"].tolist() for row in rows]
    disk = FailingDisk("train.bin", short=True).install(patch.setattr)
    assert [row["input_ids"].tolist() for row in again] == expected and disk.reads
    disk.begin = 64
    assert rows[1]["input_ids"].tolist() == expected[1]
    with pytest.raises(ReadError, match="reading 32 bytes at 64 failed: Input/output error"):
        rows[2]


def test_kept_tokens_come_in_as_many_reads_as_the_disk_needs(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch.setattr(cache, "SMALL", 0)
    rows = [
        {"input_ids": list(range(number, number + 9)), "labels": list(range(9))}
        for number in range(4)
    ]
    found = prepare_data(
        write_rows(tmp_path / "ids.jsonl", rows), max_length=16, cache=tmp_path / "cache"
    )
    disk = FailingDisk("tokens/", short=True).install(patch.setattr)
    assert [list(row["input_ids"]) for row in found] == [
        row["input_ids"] for row in rows
    ] and disk.reads
    disk.begin = 0
    with pytest.raises(ReadError, match=r"reading \d+ bytes at 0 failed: Input/output error"):
        found[0]
