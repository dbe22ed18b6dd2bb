"""What is opened by name: regular files of bounded size to read, and nothing that is read or is
no file to write.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lema.errors import ConfigError, DataError, WeightsError
from lema.storage.atomic import replace_file
from lema.storage.regular import append, check_separate, open_regular, read_regular


def pipe(place: Path) -> None:
    os.mkfifo(place)


def device(place: Path) -> None:
    place.symlink_to("/dev/zero")


def directory(place: Path) -> None:
    place.mkdir()


def link(place: Path) -> None:
    (place.parent / "target").write_text("of another")
    place.symlink_to(place.parent / "target")


@pytest.mark.parametrize("make", [pipe, device, directory])
def test_what_is_no_regular_file_is_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "notes.json")
    with pytest.raises(DataError, match=rf"notes\.json is a {make.__name__}, not a regular file"):
        open_regular(tmp_path / "notes.json")


def test_a_link_out_of_a_directory_that_was_handed_over_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "own").write_text("text")
    (tmp_path / "run" / "card.md").symlink_to(tmp_path / "own")
    assert read_regular(tmp_path / "run" / "card.md") == b"text"
    with pytest.raises(WeightsError, match=r"card\.md is a link that leaves"):
        read_regular(tmp_path / "run" / "card.md", inside=True)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(DataError, match=r"notes\.json is larger than the 1,000 bytes"):
        read_regular(file, 1000)
    file.write_bytes(b"x" * 1000)
    assert len(read_regular(file, 1000)) == 1000


@pytest.mark.parametrize("write", [replace_file, append])
@pytest.mark.parametrize("make", [pipe, device, directory, link])
def test_nothing_is_written_through_or_over_what_is_no_regular_file(
    make: Callable[[Path], None], write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    make(tmp_path / "out.json")
    before = (tmp_path / "out.json").lstat()
    with pytest.raises(
        ConfigError, match=r"out\.json is a (pipe|link|directory), and nothing is written"
    ):
        write(tmp_path / "out.json", b"{}")
    assert (tmp_path / "out.json").lstat() == before
    if make is link:
        assert (tmp_path / "target").read_text() == "of another"


def test_a_target_is_known_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("weights")
    (tmp_path / "linked").symlink_to(model / "weights")
    (tmp_path / "model2").symlink_to(model)
    os.link(model / "weights", tmp_path / "hard")
    monkeypatch.chdir(model)
    targets = [
        "linked",
        "hard",
        "model",
        "model2",
        "model/weights",
        "model2/weights",
        "model/../linked",
    ]
    for target in [*(tmp_path / name for name in targets), Path("weights"), Path()]:
        with pytest.raises(ConfigError, match="would write over what it reads"):
            check_separate(target, [model])
    for target in (
        model / "new",
        tmp_path / "model2" / "deep" / "new",
        tmp_path / "linked" / ".." / "model" / "new",
    ):
        with pytest.raises(ConfigError, match="would write into a directory that it reads"):
            check_separate(target, [model])
    check_separate(model / "new", [model], below=False)
    for target in (tmp_path / "other", tmp_path):
        check_separate(target, [model])
