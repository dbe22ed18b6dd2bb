"""Surroundings unlike a desk's: no home, no room to share, another's cache, other encodings, a
dumb terminal.
"""

import errno
import io
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, assert_same_adapter, config_writer, lema, write_rows
from rich.console import Console
from smallrun import same, write_model

from lema.cli.progress import ProgressDisplay
from lema.data import cache, prepare_data
from lema.errors import DiskError
from lema.storage.diskspace import make_private, user_cache
from lema.storage.verify import load_tensors

NAMES = ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "USERNAME", "LNAME")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=2)


@pytest.fixture
def write_config(small: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(small, tmp_path)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user whom the system does not know, as in a container that was given a number."""

    def unknown(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_trains_and_keeps_tokens_with_temporary_files(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALL", 0)
    assert user_cache("tokens") == tmp_path / f"lema-{os.geteuid()}" / "tokens"
    assert lema("train", write_config(data_cache=True)) == 0
    kept = [path for path in user_cache("tokens").iterdir() if path.is_dir()]
    assert len(kept) == 1 and stat.S_IMODE(user_cache("tokens").stat().st_mode) == 0o700


@pytest.mark.parametrize("given", ["", "relative", "~/x"])
def test_a_cache_directory_that_is_not_absolute_is_ignored(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("tokens") == tmp_path / ".cache" / "lema" / "tokens"


def test_a_new_cache_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "lema" / "tokens")
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE(place.stat().st_mode)
        for place in (tmp_path / "lema", tmp_path / "lema" / "tokens")
    ]
    assert modes == [0o700, 0o700]


@pytest.mark.parametrize("place", ["lema", "lema/tokens"])
@pytest.mark.parametrize("how", ["anybody writes", "another owns"])
def test_a_cache_that_others_write_to_is_not_trusted(
    place: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lema" / "tokens").mkdir(parents=True)
    if how == "anybody writes":
        (tmp_path / place).chmod(0o777)
    else:
        real = Path.stat

        def owned(path: Path, **options: Any) -> os.stat_result:
            found = real(path, **options)
            if path != tmp_path / place:
                return found
            return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:10]])

        monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(DiskError, match="other users may write to this cache") as caught:
        make_private(tmp_path / "lema" / "tokens")
    assert caught.value.where == str(tmp_path / place) and "XDG_CACHE_HOME" in caught.value.how


def test_a_users_own_group_may_write_to_a_cache(tmp_path: Path) -> None:
    (tmp_path / "lema" / "tokens").mkdir(parents=True)
    status = (tmp_path / "lema").stat()
    (tmp_path / "lema").chmod(0o775)
    if status.st_uid == status.st_gid:
        make_private(tmp_path / "lema" / "tokens")
    else:
        with pytest.raises(DiskError):
            make_private(tmp_path / "lema" / "tokens")


def test_tokens_in_anothers_cache_are_not_used_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = user_cache("tokens")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    found = prepare_data(rows, max_length=8, cache=folder)
    assert "tokens are not kept" in found.notes[0] and str(folder) in found.notes[0]
    assert not list(folder.iterdir())


def test_without_shared_memory_rows_are_tokenised_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def Lock(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "SMALL", 0)
    monkeypatch.setattr(cache, "get_context", lambda _: Full())
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 9)
    with pytest.warns(
        UserWarning, match="in one process, because /dev/shm cannot be used: No space left"
    ):
        found = prepare_data(rows, max_length=8, cache=tmp_path / "cache")
    assert len(found) == 9 and "by 1 processes" in found.notes[0]


SMALL_SHM = """
import ctypes, os, sys
uid, libc = os.geteuid(), ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000 | (0 if uid == 0 else 0x10000000)) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
    sys.exit(77)
from lema.data import cache, prepare_data
cache.SMALL = 0
cache.os.sched_getaffinity = lambda _: {0, 1}
place = sys.argv[1]
found = prepare_data(f"{place}/ids.jsonl", max_length=8, cache=__import__("pathlib").Path(place, "cache"))
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 65536
sys.exit(0 if len(found) == 9 else 1)
"""


def test_sixty_four_kilobytes_of_shared_memory_are_enough(tmp_path: Path) -> None:
    """Where the system lets a test mount; a container without that right ends with 77, and
    nothing is proved there.
    """
    write_rows(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 9)
    done = subprocess.run(
        [sys.executable, "-c", SMALL_SHM, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 77), done.stderr


NOT_UTF8 = os.fsdecode(b"caf\xe9")


def test_files_whose_names_are_not_utf8_are_read_and_written(
    small: Path, write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place = tmp_path / NOT_UTF8
    place.mkdir()
    shutil.copytree(small, place / "model")
    config = write_config(
        model_name_or_path="model", output_dir="out", train_data="rows.jsonl", save_steps=1
    )
    shutil.move(config, place / "run.yaml")
    shutil.move(tmp_path / "data.jsonl", place / "rows.jsonl")
    monkeypatch.chdir(place)
    adapter = place / "out"
    assert lema("train", place / "run.yaml") == 0
    assert lema("train", place / "run.yaml", "--resume") == 0
    assert (
        lema(
            "generate",
            adapter,
            "--prompt",
            "a",
            "--max-new-tokens",
            2,
            "--output",
            place / "texts.jsonl",
        )
        == 0
    )
    assert lema("eval", adapter, "--data", place / "rows.jsonl") == 0
    assert lema("merge", adapter, place / "merged") == 0
    assert lema("shard", adapter, place / "shards", "--tp", 2) == 0
    assert lema("consolidate", place / "shards", place / "again") == 0
    assert same(
        *(load_tensors(one / "adapter_model.safetensors") for one in (place / "again", adapter))
    )
    assert lema("report", adapter) == 0
    assert r"caf\udce9" in capfd.readouterr().out
    assert_refused(
        capfd, 2, ["not UTF-8", "rename"], "train", "run.yaml", "--set", f"output_dir={place}"
    )


def test_texts_are_utf8_and_names_bytes_where_the_locale_knows_only_ascii(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process of its own, which decides on its encodings as it begins."""
    rows = [{"text": f"değirmenci {number} ĞÜŞİÖÇ öğütür çörek"} for number in range(4)]
    write_rows(tmp_path / "data.jsonl", rows)
    config = write_config()
    assert lema("train", config, "--set", f"output_dir={tmp_path / 'plain'}") == 0
    ascii_only = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    command = [sys.executable, "-m", "lema", "train", config]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, **ascii_only, "TERM": "dumb"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"ended at step 2" in done.stdout
    assert_same_adapter(tmp_path / "out", tmp_path / "plain")
    card = (tmp_path / "plain" / "README.md").read_bytes().replace(b"plain", b"out")
    assert _but_for_times((tmp_path / "out" / "README.md").read_bytes()) == _but_for_times(card)


def _but_for_times(card: bytes) -> list[bytes]:
    return [
        line
        for line in card.splitlines()
        if not line.startswith((b"| train_runtime", b"| train_tokens_per_second"))
    ]


@pytest.mark.parametrize("term", ["dumb", "unknown", "xterm"])
def test_a_terminal_that_draws_nothing_is_told_each_measurement(term: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": term})
    display = ProgressDisplay(console)
    display.start(2)
    display.advance(1)
    display.show({"loss": 2.5})
    shown = out.getvalue()
    display.close()
    assert ("step 1/2  loss 2.5000" in shown and "\x1b" not in out.getvalue()) is (term != "xterm")
