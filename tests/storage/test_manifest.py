"""A manifest tells every change to a directory's files."""

import json
import shutil
from pathlib import Path

import pytest

from lema.errors import AdapterError
from lema.storage.manifest import MANIFEST, check_manifest, write_manifest


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint-3"
    (directory / "below").mkdir(parents=True)
    (directory / "a.safetensors").write_bytes(bytes(range(256)) * 5000)  # more than is read at once
    (directory / "state.json").write_text("{}")
    (directory / "below" / "b.json").write_text("[1]")
    write_manifest(directory)
    return directory


def test_names_size_and_hash_of_every_file(written: Path) -> None:
    said = json.loads((written / MANIFEST).read_text())
    assert said["algorithm"] == "sha256"
    assert sorted(said["files"]) == ["a.safetensors", "below/b.json", "state.json"]
    # printf '{}' | sha256sum
    empty = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert said["files"]["state.json"] == {"size": 2, "sha256": empty}
    check_manifest(written)


@pytest.mark.parametrize("name", ["a.safetensors", "state.json", "below/b.json"])
@pytest.mark.parametrize("fault", ["flip", "cut", "longer", "zero", "delete", "folder"])
def test_every_damage_to_a_file_is_found_and_named(written: Path, name: str, fault: str) -> None:
    file = written / name
    content = bytearray(file.read_bytes())
    if fault == "flip":
        content[-1] ^= 1
    elif fault == "zero":
        content = bytearray(len(content))
    elif fault == "cut":
        del content[-1]
    elif fault == "longer":
        content += b" "
    file.write_bytes(content)
    if fault in ("delete", "folder"):
        file.unlink()
    if fault == "folder":
        file.mkdir()
    with pytest.raises(AdapterError) as caught:
        check_manifest(written)
    assert caught.value.where == str(file)


def test_two_files_of_one_size_that_have_changed_places_are_found(written: Path) -> None:
    (written / "c.json").write_text("[]")
    write_manifest(written)
    check_manifest(written)
    (written / "c.json").write_text("{}")
    (written / "state.json").write_text("[]")
    with pytest.raises(AdapterError, match="a file has changed: its SHA-256 differs"):
        check_manifest(written)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(written: Path) -> None:
    """In JSON as it is written there is none that makes no difference, but in the last end of
    line.
    """
    file = written / MANIFEST
    sound = file.read_bytes()
    for place in range(len(sound) - 1):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(AdapterError):
            check_manifest(written)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"algorithm": "sha256", "files": {}}',
        '{"algorithm": "md5", "files": {"state.json": 1}}',
        "\0",
    ],
)
def test_what_is_no_manifest_is_refused(written: Path, content: str) -> None:
    (written / MANIFEST).write_text(content)
    with pytest.raises(AdapterError) as caught:
        check_manifest(written)
    assert caught.value.where == str(written / MANIFEST)


def test_a_directory_without_a_manifest_was_never_finished(written: Path) -> None:
    (written / MANIFEST).unlink()
    with pytest.raises(AdapterError, match=r"no manifest\.json"):
        check_manifest(written)


@pytest.mark.parametrize(
    "name", ["../out.json", "/etc/hostname", "a//b", "", "below/../../out.json", "a\0b"]
)
def test_a_manifest_names_nothing_outside(written: Path, name: str) -> None:
    said = json.loads((written / MANIFEST).read_text())
    said["files"][name] = said["files"]["state.json"]
    shutil.copy(written / "state.json", written.parent / "out.json")
    (written / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(AdapterError, match="the manifest is damaged at"):
        check_manifest(written)


def test_a_note_of_the_users_may_lie_there_but_no_further_tensors(written: Path) -> None:
    (written / "notes.txt").write_text("good one")
    check_manifest(written)
    (written / "full-00009.safetensors").write_bytes(b"")
    with pytest.raises(
        AdapterError, match="there is a file with tensors that does not belong to the checkpoint"
    ):
        check_manifest(written)
