"""Whose settings act: all of a file that LEMA wrote for this user, and of any other only those
that describe.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clirun import assert_refused, config_writer, lema, write_rows
from ownmodel import imports_seen, write_own_model
from smallrun import opened, peft_adapter, settings, write_model

from lema import LemaConfig
from lema.config.acting import ACTING, OF_TRAINING, SILENT, acts
from lema.convert import merge_adapter
from lema.errors import ConfigError
from lema.lora import consent
from lema.lora.consent import check_code_is_named, save_settings, written_here
from lema.lora.files import read_settings
from lema.storage.manifest import MANIFEST, write_manifest

# A value of each setting that acts, such as a stranger would choose.
CHOSEN: dict[str, Any] = {
    "quantize_base_cache": "elsewhere",
    "gbi_path": "/somewhere/model.safetensors",
    "attn_implementation": "someone/kernel",
    "train_data": {"a": "/**/*.json"},
    "eval_data": "hub:text?data_files=/etc/hostname&cache_dir=/somewhere",
    "mixture": {"a": 1.0},
    "eval_prompts": "/dev/zero",
    "chat_template": "/dev/zero",
    "adapter_name_or_path": "someone/adapter",
    "data_cache": "/somewhere",
    "image_folder": "/somewhere",
    "image_urls": True,
    "output_dir": "/somewhere",
    "overwrite_output_dir": True,
    "offload_dir": "/somewhere",
    "report_to": ["wandb"],
    "run_name": "theirs",
    "push_to_hub": True,
    "hub_model_id": "someone/adapter",
    "hub_private_repo": False,
    "torch_compile": True,
    "device": "nowhere",
    "backend_settings": {"their": 1},
    "tensor_parallel_size": 4,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "shard_weights": True,
    "shard_optimizer": True,
    "strategy": "resident",
    "device_memory": 1,
    "host_memory": 1,
    "page_locked": True,
    "prefetch_depth": 1000,
    "experts_per_slot": None,
    "embeddings": "disk",
    "head": "stream",
    "modalities": "all",
    "towers": "stream",
    "tower_cache": "/somewhere",
    "tower_cache_size": 1,
    "cache_frozen_prefix": True,
    "activation_offloading": True,
    "boundary_activations": "disk",
}
MACHINE = list(CHOSEN)[list(CHOSEN).index("device") :]
WITH = {
    "mixture": "train_data",
    "towers": "modalities",
    "tower_cache": "modalities",
    "tower_cache_size": "modalities",
    "hub_model_id": "push_to_hub",
    "hub_private_repo": "push_to_hub",
}


class Nothing(set[str]):
    """Remembers nothing of what is added."""

    def add(self, element: str) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(consent, "_WRITTEN", Nothing())  # as in a process that has written none
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lema" / "settings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def published(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapter(model, tmp_path_factory.mktemp("published") / "adapter")


@pytest.fixture
def stranger(published: Path, tmp_path: Path) -> Path:
    """An adapter without settings, into which a test writes those of a stranger."""
    return shutil.copytree(published, tmp_path / "stranger")


def say(directory: Path, model: Path, **given: Any) -> Path:
    file = directory / "lema_config.json"
    file.write_text(json.dumps({"model_name_or_path": str(model), **given}))
    return file


def told(directory: Path, **overrides: Any) -> tuple[LemaConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config, _ = read_settings(directory, **overrides)
    return config, [str(one.message) for one in caught]


def test_every_setting_that_acts_has_a_case() -> None:
    assert CHOSEN.keys() == ACTING.keys() <= LemaConfig.model_fields.keys()
    assert ACTING.keys() >= SILENT
    assert all(acts(name, value) for name, value in CHOSEN.items())


@pytest.mark.parametrize("name", CHOSEN)
def test_a_strangers_setting_does_not_act_and_a_line_says_so(
    name: str, stranger: Path, model: Path
) -> None:
    given = {one: CHOSEN[one] for one in (WITH.get(name), name) if one is not None}
    file = say(stranger, model, lora_rank=3, learning_rate=0.5, **given)
    config, lines = told(stranger)
    assert {one: getattr(config, one) for one in given} == {
        one: LemaConfig.defaults()[one] for one in given
    }
    assert (config.lora_rank, config.learning_rate) == (3, 0.5)  # what describes the adapter stays
    named = [one for one in given if one not in SILENT]
    assert len(lines) == bool(named)
    assert all(str(file) in line and ", ".join(named) in line for line in lines)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_implementation", "eager"),
        ("attn_implementation", "sdpa"),
        ("chat_template", "{% for one in messages %}{{ one.content }}{% endfor %}"),
        ("data_cache", False),
        ("device", "cpu"),
        ("torch_compile", False),
        ("report_to", []),
        ("train_data", None),
    ],
)
def test_a_value_that_does_nothing_more_than_describe_is_taken(
    name: str, value: Any, stranger: Path, model: Path
) -> None:
    say(stranger, model, **{name: value})
    config, lines = told(stranger)
    assert getattr(config, name) == value
    assert not lines


def test_what_the_user_gives_acts(stranger: Path, model: Path) -> None:
    say(stranger, model, **CHOSEN)
    mine = {"eval_data": "mine.txt", "offload_dir": "mine", "attn_implementation": "flex_attention"}
    config, (line,) = told(stranger, **mine)
    assert {name: getattr(config, name) for name in mine} == mine
    assert "eval_data" not in line
    assert "torch_compile" in line


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """An adapter that LEMA has saved, with settings that act."""
    given = {
        "eval_data": "mine.txt",
        "train_data": "mine.txt",
        "offload_dir": str(tmp_path / "mine"),
    }
    with opened(settings(model, tmp_path / "out", **given)) as one:
        one.save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def test_a_users_own_settings_act_wherever_they_are_copied(
    own: Path, cache: Path, tmp_path: Path
) -> None:
    for directory in (own, shutil.copytree(own, tmp_path / "copied")):
        config, lines = told(directory)
        assert (config.eval_data, config.train_data) == ("mine.txt", "mine.txt")
        assert config.output_dir == str(tmp_path / "out")
        assert not lines
    assert [file.stat().st_size for file in cache.iterdir()] == [0]
    assert cache.stat().st_mode & 0o077 == 0


def test_so_do_those_of_checkpoints(model: Path, tmp_path: Path) -> None:
    with opened(settings(model, tmp_path / "out", eval_data="mine.txt")) as one:
        one.get_trainer().save_checkpoint(tmp_path / "checkpoint")
    config, lines = told(tmp_path / "checkpoint")
    assert config.eval_data == "mine.txt"
    assert not lines


def test_a_file_that_was_changed_is_a_strangers(own: Path) -> None:
    file = own / "lema_config.json"
    file.write_text(file.read_text().replace("mine.txt", "other.txt"))
    config, (line,) = told(own)
    assert config.eval_data is None
    assert "or was changed since" in line
    assert "ignored are its settings train_data, eval_data, offload_dir. Give" in line
    assert "--train-data VALUE" in line


def test_so_is_what_another_user_noted_in_a_shared_cache(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not written_here(own / "lema_config.json")
    config, _ = told(own)
    assert config.eval_data is None


def test_a_link_in_the_cache_is_no_note(
    stranger: Path, model: Path, cache: Path, tmp_path: Path
) -> None:
    file = say(stranger, model, eval_data="theirs.txt")
    cache.mkdir(parents=True)
    (cache / consent._digest(file)).symlink_to(tmp_path)
    assert not written_here(file)


@pytest.mark.parametrize("place", ["a file", "open to others"])
def test_a_run_that_cannot_note_its_settings_goes_on(
    place: str, model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "a file":  # root may write into any directory
        (tmp_path / "cache").write_text("")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    save_settings(settings(model, tmp_path / "out", eval_data="mine.txt"), tmp_path / "saved")
    assert not written_here(tmp_path / "saved" / "lema_config.json")
    monkeypatch.setattr(consent, "_WRITTEN", set())
    save_settings(settings(model, tmp_path / "out", eval_data="mine.txt"), tmp_path / "saved")
    assert written_here(tmp_path / "saved" / "lema_config.json")  # by the process that wrote it


def test_what_others_may_have_noted_does_not_count(own: Path, cache: Path) -> None:
    assert written_here(own / "lema_config.json")
    cache.chmod(0o777)
    assert not written_here(own / "lema_config.json")


def test_a_user_without_a_home_has_notes_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", _no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save_settings(settings(model, tmp_path / "out", eval_data="mine.txt"), tmp_path / "saved")
    assert written_here(tmp_path / "saved" / "lema_config.json")


def _no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_processes_may_note_at_once_and_notes_are_bounded(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "MOST_NOTED", 20)
    places = [tmp_path / f"saved{number}" for number in range(40)]
    for number, place in enumerate(places[:25]):
        save_settings(settings(model, tmp_path / "out", max_steps=number + 1), place)
        os.utime(cache / consent._digest(place / "lema_config.json"), ns=(number, number))
    assert len(list(cache.iterdir())) <= 20
    assert written_here(places[24] / "lema_config.json")
    assert not written_here(places[0] / "lema_config.json")
    with ThreadPoolExecutor(8) as pool:
        same = settings(model, tmp_path / "out", max_steps=7)
        list(pool.map(partial(save_settings, same), places[25:]))
    assert all(written_here(place / "lema_config.json") for place in places[25:])


def test_eval_reads_and_writes_nothing_that_a_stranger_names(
    stranger: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    evil = tmp_path / "evil"
    text.write_text("a b c\n")
    say(
        stranger,
        model,
        eval_data=f"hub:text?data_files={text}&cache_dir={evil}",
        offload_dir=str(evil),
    )
    with pytest.warns(UserWarning, match="ignored are its settings eval_data, offload_dir"):
        assert_refused(capfd, 3, ["there is no evaluation data", "--data FILE"], "eval", stranger)
    assert not evil.exists()


def test_nothing_of_a_strangers_machine_stops_a_command(
    stranger: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    say(stranger, model, train_data="theirs.txt", **{name: CHOSEN[name] for name in MACHINE})
    rows = write_rows(
        tmp_path / "eval.jsonl", [{"text": "the mill turns and the miller grinds the corn"}]
    )
    ignored = f"ignored are its settings train_data, {', '.join(MACHINE)}"
    with pytest.warns(UserWarning, match=ignored):
        assert lema("eval", stranger, "--data", rows) == 0
    used = [name for name in MACHINE if name not in OF_TRAINING]
    with pytest.warns(UserWarning, match=f"ignored are its settings {', '.join(used)}. Give"):
        assert lema("generate", stranger, "--prompt", "the mill", "--max-new-tokens", 1) == 0
    with pytest.warns(UserWarning, match="ignored are its settings train_data, backend_settings"):
        assert_refused(
            capfd, 2, ["nowhere"], "eval", stranger, "--data", rows, "--set", "device=nowhere"
        )


def test_a_command_says_nothing_of_settings_that_it_never_reads(
    stranger: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Warnings are errors here."""
    say(stranger, model, **{name: CHOSEN[name] for name in OF_TRAINING})
    assert lema("generate", stranger, "--prompt", "the mill", "--max-new-tokens", 1) == 0
    say(stranger, model, **{name: CHOSEN[name] for name in CHOSEN if name != "gbi_path"})
    assert lema("merge", stranger, tmp_path / "merged") == 0
    say(stranger, model, **CHOSEN)
    with pytest.warns(UserWarning, match="ignored are its settings gbi_path. Give"):
        assert lema("merge", stranger, tmp_path / "again") == 0


def test_eval_of_a_users_own_run_goes_on_with_its_own_data(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write = config_writer(model, tmp_path)
    rows = write_rows(
        tmp_path / "eval.jsonl", [{"text": "the mill turns and the miller grinds the corn"}]
    )
    assert lema("train", write(eval_data=str(rows), eval_steps=2)) == 0
    capfd.readouterr()
    assert lema("eval", tmp_path / "out") == 0
    out, err = capfd.readouterr()
    assert "eval_loss" in out
    assert "ignored" not in err
    shutil.rmtree(tmp_path / "cache")
    with pytest.warns(UserWarning, match="ignored are its settings"):
        assert lema("eval", tmp_path / "out", "--eval-data", rows) == 0
    assert "eval_loss" in capfd.readouterr().out
    # Those of the user's own file act, whatever is beside the adapter.
    assert lema("eval", write(eval_data=str(rows), eval_steps=2)) == 0


def test_a_run_is_resumed_with_the_settings_of_the_users_file_alone(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write = config_writer(model, tmp_path)
    evil = tmp_path / "evil"
    assert lema("train", write(max_steps=4, save_steps=2)) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    checkpoint = tmp_path / "out" / "checkpoint-2"
    for file in (checkpoint / "lema_config.json", tmp_path / "out" / "lema_config.json"):
        values = json.loads(file.read_text())
        file.write_text(
            json.dumps(
                {**values, **{name: CHOSEN[name] for name in CHOSEN}, "offload_dir": str(evil)}
            )
        )
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint)
    code = lema("train", write(max_steps=4, save_steps=2), "--resume")
    err = capfd.readouterr().err
    assert code == 0, err
    assert not evil.exists()
    saved = json.loads((tmp_path / "out" / "lema_config.json").read_text())
    assert saved["offload_dir"] is None
    assert saved["attn_implementation"] is None


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with imports_seen(tmp_path, monkeypatch):
        yield write_own_model(tmp_path / "code")


def test_code_runs_only_of_a_model_that_the_user_names(
    own_code: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write = config_writer(own_code, tmp_path)
    assert lema("train", write(), "--trust-remote-code") == 0
    out = tmp_path / "out"
    words = ["-p", "the mill", "--max-new-tokens", 1, "--trust-remote-code"]
    assert lema("generate", out, *words) == 0, capfd.readouterr().err
    shutil.rmtree(tmp_path / "cache")  # it is a stranger's by now
    said = ["only of a model that you name", "--model-name-or-path"]
    assert_refused(capfd, 2, said, "generate", out, *words)
    assert_refused(
        capfd, 2, [*said, "--base"], "merge", out, tmp_path / "merged", "--trust-remote-code"
    )
    with pytest.raises(ConfigError, match="only of a model that you name"):
        check_code_is_named(out / "adapter_config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert lema("generate", out, "--model-name-or-path", own_code, *words) == 0
        assert (
            lema("merge", out, tmp_path / "merged", "--trust-remote-code", "--base", own_code) == 0
        )


def test_an_adapter_is_merged_into_a_base_that_has_moved(
    model: Path, published: Path, tmp_path: Path
) -> None:
    expected = merge_adapter(published, tmp_path / "expected")
    moved = shutil.copytree(model, tmp_path / "moved")
    adapter = shutil.copytree(published, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
        )
    )
    merged = merge_adapter(adapter, tmp_path / "merged", base_dir=moved)
    contents = [
        {one.name: one.read_bytes() for one in place.glob("*.safetensors")}
        for place in (merged, expected)
    ]
    assert contents[0] == contents[1] != {}
