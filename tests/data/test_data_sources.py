"""Data sets of the hub are read as the files that `datasets` keeps; data sets give rows in the shares that are set."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.ipc
import pytest

from lema import LemaConfig
from lema.config.problems import SettingsError
from lema.data import load_rows, prepare_data
from lema.data.files import find_files
from lema.data.read import mixed
from lema.errors import ConfigError, DataError


def config_of(**settings):
    return LemaConfig(model_name_or_path="model", **settings)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for `datasets`, which keeps two rows of whatever it is asked for, and what it was asked for."""
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        if path == "org/none":
            raise FileNotFoundError("there is no org/none on the hub")
        table, file = (
            pa.Table.from_pylist([{"text": "the river"}, {"text": f"the mill of {path}"}]),
            tmp_path / "x.arrow",
        )
        with pa.ipc.new_stream(str(file), table.schema) as out:
            out.write_table(table)
        return SimpleNamespace(cache_files=[{"filename": str(file)}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_data_set_of_the_hub_is_asked_for_as_it_is_named(hub, make_tokenizer):
    config = config_of(train_data={"path": "org/rivers", "name": "long", "split": "a+b", "revision": "v1"})
    assert LemaConfig(**config.to_dict()).train_data == config.train_data  # as a checkpoint keeps it
    data = prepare_data(config.train_data, make_tokenizer(), max_length=64)
    path, options = hub[0]
    assert (path, options.pop("keep_in_memory")) == ("org/rivers", False)
    assert options == {"name": "long", "split": "a+b", "revision": "v1"}
    assert len(data) == 2 and data.origin(1).endswith("x.arrow:2")
    several = config_of(train_data=["own.jsonl", {"path": "org/rivers"}]).train_data
    assert several == ["own.jsonl", "hub:org/rivers"] and len(load_rows(several[1])) == 2
    assert hub[-1][1]["split"] == "train"


def test_what_cannot_be_had_of_the_hub_is_named(hub, monkeypatch):
    with pytest.raises(DataError, match="there is no org/none on the hub"):
        find_files("hub:org/none")
    with pytest.raises(DataError, match="has no file of its own"):
        find_files("hub:org/rivers?split=train[:5]")
    with pytest.raises(SettingsError, match="has 'subset'"):
        config_of(train_data={"path": "org/rivers", "subset": "long"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"lema\[datasets\]"):
        find_files("hub:org/rivers")


@pytest.fixture
def three(write, make_tokenizer):
    """A config with three data sets of 10, 40 and 25 rows in two files, and their rows."""
    files = {
        "few": str(write("few.jsonl", [{"text": f"few {n}"} for n in range(10)])),
        "many": [str(write(f"many{k}.jsonl", [{"text": f"many {k} {n}"} for n in range(20)])) for k in range(2)],
        "some": str(write("some.jsonl", [{"text": f"some {n}"} for n in range(25)])),
    }

    def make(**rates):
        config = config_of(train_data=files, mixture=rates)
        return config, prepare_data(find_files(config.train_data), make_tokenizer(), max_length=64)

    return make


def test_shares_are_held_and_no_row_is_lost(three):
    config, rows = three(few=0.5, many=0.3, some=0.2)
    found = mixed(config, rows)
    origins = [found.origin(index) for index in range(len(found))]
    names = [origin.rsplit("/", 1)[1][:4] for origin in origins]
    assert {name: names.count(name) for name in ("few.", "many", "some")} == {"few.": 67, "many": 40, "some": 27}
    assert set(origins) == {rows.origin(index) for index in range(len(rows))}
    times = [origins.count(rows.origin(index)) for index in range(10)]
    assert set(times) == {6, 7}  # of 10 rows in 67
    first = names[: len(names) // 2]
    assert 20 < first.count("few.") < 47  # they are in no order of their data sets
    assert "few 67 rows, each 6.7 times" in found.notes[-1]
    changed = LemaConfig(**{**config.to_dict(), "seed": 7})
    assert mixed(changed, rows).fingerprint() != mixed(config, rows).fingerprint() == found.fingerprint()


def test_what_is_held_back_is_in_no_share(three):
    config, rows = three(few=0.8, many=0.1, some=0.1)
    train, held = rows.split(12, seed=1)
    kept = mixed(config, train)
    assert {kept.origin(n) for n in range(len(kept))}.isdisjoint(held.origin(n) for n in range(len(held)))


def test_shares_that_cannot_be_held_are_refused(three, write, make_tokenizer):
    config, rows = three(few=0.5, many=0.3, some=0.3)
    with pytest.raises(ConfigError, match=r"sum to 1\.1"):
        mixed(config, rows)
    with pytest.raises(SettingsError, match="these are others"):
        three(few=0.5, many=0.5)
    with pytest.raises(SettingsError, match="takes no shares"):
        config_of(train_data={"a": "a.jsonl"}, mixture={"a": 1.0}, objective="dpo")
    one = str(write("one.jsonl", [{"text": "few"}]))
    twice = config_of(train_data={"a": one, "b": [one]}, mixture={"a": 0.5, "b": 0.5})
    with pytest.raises(ConfigError, match="in two data sets"):
        mixed(twice, rows)
    config, rows = three(few=0.5, many=0.3, some=0.2)
    with pytest.raises(DataError, match="'few' has no rows"):
        mixed(config, rows.select(range(10, 75)))
