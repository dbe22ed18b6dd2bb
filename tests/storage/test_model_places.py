"""A model opens from wherever it lives, is the same model from there, and nothing of it is
sought on a network.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clirun import assert_refused, lema
from hubcache import COMMIT, files_of, write_cache
from smallrun import opened, settings, token_rows, write_model
from torch import Tensor

from lema import LemaModel
from lema.convert.prepare import prepare
from lema.errors import WeightsError

OTHER = "2" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in shards."""
    return write_model(tmp_path_factory.mktemp("models") / "sharded")


@pytest.fixture(scope="module")
def single(model: Path) -> Path:
    """The same in one file."""
    return prepare(model, model.parent / "single").path


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache of our own, and whoever asks the network is told off."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def step(name: str | Path, out: Path, **changes: object) -> Tensor:
    """The gradients of one step of the model called `name`, which is saved and tokenizes as
    well.
    """
    config = settings(Path(name), out, **changes)
    config.model_name_or_path = str(name)
    with opened(config) as model:
        assert model.tokenizer("the miller")["input_ids"]
        ids = torch.tensor([row["input_ids"] for row in token_rows(1)])
        model.adapter.loss([{"input_ids": ids, "labels": ids}]).backward()
        gradients = torch.cat(
            [parameter.grad.flatten() for parameter in model.get_trainable_parameters()]
        )
        model.save_pretrained(out)
    with_adapter = LemaModel.from_pretrained(out)
    with_adapter.close()
    return gradients


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    gradients = step(model, tmp_path_factory.mktemp("out"))
    assert gradients.any()
    return gradients


def in_shards(model: Path, single: Path, home: Path) -> str:
    return str(model)


def by_its_index(model: Path, single: Path, home: Path) -> str:
    return str(model / "model.safetensors.index.json")


def by_its_config(model: Path, single: Path, home: Path) -> str:
    return str(model / "config.json")


def in_one_file(model: Path, single: Path, home: Path) -> str:
    return str(single)


def one_file(model: Path, single: Path, home: Path) -> str:
    return str(single / "model.safetensors")


def one_file_among_others(model: Path, single: Path, home: Path) -> str:
    """The directory has the shards of another model, too."""
    mixed = Path(shutil.copytree(model, home / "mixed"))
    for shard in mixed.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-4])
    shutil.copy(single / "model.safetensors", mixed / "mine.safetensors")
    return str(mixed / "mine.safetensors")


def an_index_beside_another_file(model: Path, single: Path, home: Path) -> str:
    """A whole directory would be read from its `model.safetensors`."""
    mixed = Path(shutil.copytree(model, home / "mixed"))
    (mixed / "model.safetensors").write_bytes(b"not this one")
    return str(mixed / "model.safetensors.index.json")


def one_file_in_the_home_directory(model: Path, single: Path, home: Path) -> str:
    shutil.copytree(single, home / "single")
    return "~/single/model.safetensors"


def relative(model: Path, single: Path, home: Path) -> str:
    return os.path.relpath(model, home)


def behind_a_link(model: Path, single: Path, home: Path) -> str:
    (home / "link").symlink_to(model)
    return str(home / "link")


def a_snapshot(model: Path, single: Path, home: Path) -> str:
    return str(write_cache(home / "cache", files_of(model)))


def a_file_of_a_snapshot(model: Path, single: Path, home: Path) -> str:
    return str(write_cache(home / "cache", files_of(single)) / "model.safetensors")


def a_hub_id(model: Path, single: Path, home: Path) -> str:
    write_cache(home / "cache", files_of(model))
    return "org/tiny"


PLACES = (
    in_shards,
    by_its_index,
    by_its_config,
    in_one_file,
    one_file,
    one_file_among_others,
    an_index_beside_another_file,
    one_file_in_the_home_directory,
    relative,
    behind_a_link,
    a_snapshot,
    a_file_of_a_snapshot,
    a_hub_id,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_model_streams_from_where_it_lives(
    place: Callable[[Path, Path, Path], str],
    model: Path,
    single: Path,
    expected: Tensor,
    tmp_path: Path,
) -> None:
    assert torch.equal(step(place(model, single, tmp_path), tmp_path / "out"), expected)


@pytest.mark.slow
def test_a_revision_chooses_the_snapshot(model: Path, expected: Tensor, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", tie_word_embeddings=True)
    write_cache(tmp_path / "cache", files_of(model), commit=COMMIT, ref="main")
    write_cache(tmp_path / "cache", files_of(other), commit=OTHER, ref="v2")
    found = {
        revision: step("org/tiny", tmp_path / f"{revision}", revision=revision)
        for revision in (None, "main", COMMIT)
    }
    assert all(torch.equal(gradients, expected) for gradients in found.values())
    later = step("org/tiny", tmp_path / "v2", revision="v2")
    assert not torch.equal(later, expected)
    assert torch.equal(later, step("org/tiny", tmp_path / OTHER, revision=OTHER))
    with pytest.raises(WeightsError, match="not in the hub cache"):
        LemaModel(settings(Path("org/tiny"), tmp_path / "out", revision="v3"))


@pytest.mark.slow
def test_a_saved_adapter_remembers_the_revision_of_its_model(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", tie_word_embeddings=True)
    write_cache(tmp_path / "cache", files_of(other), commit=OTHER, ref="v2")
    write_cache(tmp_path / "cache", files_of(model), commit=COMMIT, ref="main")
    step("org/tiny", tmp_path / "out", revision="v2")
    again = LemaModel.from_pretrained(tmp_path / "out")
    assert again.directory.name == OTHER and again.skeleton.config.tie_word_embeddings
    again.close()
    assert lema("merge", tmp_path / "out", tmp_path / "merged") == 0
    assert '"tie_word_embeddings": true' in (tmp_path / "merged" / "config.json").read_text()


def test_prepare_takes_a_revision(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_cache(tmp_path / "cache", files_of(model), commit=OTHER, ref="v2")
    assert_refused(
        capfd, 3, ["org/tiny", "not in the hub cache"], "prepare", "org/tiny", tmp_path / "no"
    )
    assert not (tmp_path / "no").exists()
    assert lema("prepare", "org/tiny", tmp_path / "made", "--revision", "v2") == 0
    assert (tmp_path / "made" / "model.safetensors").stat().st_size > 100_000


def test_a_shard_that_was_not_fetched_is_named(model: Path, tmp_path: Path) -> None:
    files = files_of(model)
    gone = next(name for name in files if name.endswith(".safetensors"))
    write_cache(
        tmp_path / "cache", {name: content for name, content in files.items() if name != gone}
    )
    with pytest.raises(WeightsError, match=gone.replace(".", r"\.")):
        LemaModel(settings(Path("org/tiny"), tmp_path / "out"))


def test_a_link_out_of_the_cache_is_refused(model: Path, tmp_path: Path) -> None:
    """A snapshot is links, but only into the cache's own blobs."""
    snapshot = write_cache(tmp_path / "cache", files_of(model))
    shard = next(snapshot.glob("*.safetensors"))
    outside = shutil.copy(shard, tmp_path / "outside.safetensors")
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(WeightsError, match="link that leaves"):
        LemaModel(settings(Path("org/tiny"), tmp_path / "out"))
