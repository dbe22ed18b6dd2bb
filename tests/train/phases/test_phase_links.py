"""A run that begins at a model elsewhere has it under its own name where a system has links to
directories, where it has those of files alone, and where it has none."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from lema.train.phases.places import MODEL, PhasePaths, Start, begin_at
from phaseruns import two

from lema.errors import DiskError

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "sub/more.json": b"[]"}


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as a user has it: nothing says which files belong to it."""
    for name, content in FILES.items():
        (file := tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o600)
    return tmp_path / "model"


@pytest.fixture
def places(tmp_path: Path) -> PhasePaths:
    return PhasePaths(tmp_path / "run", two())


def begin(places: PhasePaths, model: Path) -> Path:
    begin_at(Start(1, None, {0: model}), places)
    return places.directory / "whole" / MODEL


def of_model(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in FILES}


def test_the_directory_is_linked_where_it_can_be(places: PhasePaths, model: Path) -> None:
    place = begin(places, model)
    assert place.readlink() == model and places.has_model(0)


@pytest.mark.parametrize(
    "links", [True, False], ids=["files can be linked", "nothing can be linked"]
)
def test_else_its_files_are_linked_or_copied(
    links: bool, places: PhasePaths, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "symlink", refuse)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    place = begin(places, model)
    assert not place.is_symlink() and of_model(place) == FILES == of_model(model)
    assert {(place / name).samefile(model / name) for name in FILES} == {links}
    assert {(model / name).stat().st_mode & 0o777 for name in FILES} == {0o600}, (
        "a user's files stay as they are"
    )
    # A run that goes on finds a model there: what the run's own phases leave has a manifest, and so
    # has this one.
    assert places.has_model(0)
    assert begin(places, model) == place and of_model(place) == FILES, (
        "a beginning that came to nothing is taken up"
    )
    assert [one.name for one in place.parent.iterdir()] == [MODEL], "nothing is left beside it"


def test_another_model_under_that_name_is_not_taken_for_it(
    places: PhasePaths, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "symlink", refuse)
    place = begin(places, model)
    monkeypatch.setattr(os, "link", refuse)
    (model / "more.safetensors").write_bytes(b"more")
    with pytest.raises(DiskError, match="the model cannot be linked: File exists") as raised:
        begin(places, model)
    assert raised.value.where == f"{place} -> {model}"
    assert of_model(place) == FILES
