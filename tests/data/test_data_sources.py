"""Data sets of the hub are read as the files that `datasets` keeps; data sets give rows in the
shares that are set.
"""

import sys
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import torch
from transformers import LlamaConfig

from lema import LemaConfig
from lema.config.problems import SettingsError
from lema.data import load_rows, needs_tokenizer, prepare_data
from lema.data.read import mixed
from lema.data.sets.sources import find_files
from lema.errors import ConfigError, DataError
from lema.train.batch import as_rows


def config_of(**settings):
    return LemaConfig(model_name_or_path="model", **settings)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for `datasets`, which keeps two rows of whatever it is asked for, and what it
    was asked for.
    """
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        if path == "org/none":
            raise FileNotFoundError("there is no org/none on the hub")
        table = pa.Table.from_pylist([{"text": "the river"}, {"text": f"the mill of {path}"}])
        file = tmp_path / "x.arrow"
        with pa.ipc.new_stream(str(file), table.schema) as out:
            out.write_table(table)
        return SimpleNamespace(cache_files=[{"filename": str(file)}])

    def load_dataset_builder(path, **options):
        def as_streaming_dataset(split):
            return Stream(asked, ({"text": f"{split} {n}"} for n in range(5_000)))

        assert "streaming" not in options
        version = f"kept/{path}/{len(asked) if path == 'org/moves' else 'a'}"
        return SimpleNamespace(cache_dir=version, as_streaming_dataset=as_streaming_dataset)

    fake = SimpleNamespace(load_dataset=load_dataset, load_dataset_builder=load_dataset_builder)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


class Stream:
    """A stand-in for `datasets.IterableDataset`, which tells what is read of it."""

    def __init__(self, asked, rows):
        self.asked = asked
        self.rows = rows

    def __iter__(self):
        for row in self.rows:
            self.asked.append(row)
            yield row

    def take(self, count):
        return Stream(self.asked, islice(self.rows, count))


def test_a_data_set_of_the_hub_is_asked_for_as_it_is_named(hub, make_tokenizer):
    config = config_of(
        train_data={"path": "org/rivers", "name": "long", "split": "a+b", "revision": "v1"}
    )
    # as a checkpoint keeps it
    assert LemaConfig(**config.to_dict()).train_data == config.train_data
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
    with pytest.raises(DataError, match="is no part of a split"):
        find_files("hub:org/rivers?split=train[5]")
    with pytest.raises(DataError, match="has no rows: train has 2 rows"):
        find_files("hub:org/rivers?split=train[5:]")
    for wrong in ("cache_dir=/somewhere", "data_files=/etc/hostname", "trust_remote_code=true"):
        with pytest.raises(DataError, match="of the hub has no option"):
            find_files(f"hub:text?{wrong}")
    with pytest.raises(SettingsError, match="unknown setting 'subset'"):
        config_of(train_data={"path": "org/rivers", "subset": "long"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"lema-lora\[datasets\]"):
        find_files("hub:org/rivers")


def test_of_a_stream_the_first_rows_alone_are_read_once(hub, make_tokenizer, tmp_path):
    """Nothing is downloaded beforehand, nothing after `max_train_samples` is read, and kept
    tokens need no row.
    """
    source = {"path": "org/rivers", "split": "test", "streaming": True}
    config = config_of(train_data=source, max_train_samples=700)
    assert config.train_data == "hub:org/rivers?split=test&streaming=true"
    assert (
        config_of(train_data=source | {"streaming": False}).train_data
        == "hub:org/rivers?split=test"
    )
    files = find_files(config.train_data, config.max_train_samples)
    assert not hub  # a name costs no network
    made, again = (
        prepare_data(files, make_tokenizer(), max_length=64, cache=tmp_path / "tokens")
        for _ in range(2)
    )
    assert len(hub) == 700 and hub[-1] == {"text": "test 699"}
    assert made.num_rows_of() == {"hub:org/rivers?split=test&streaming=true&take=700": 700}
    rows = prepare_data(
        [{"text": f"test {n}"} for n in range(700)], make_tokenizer(), max_length=64
    )
    assert again.fingerprint() == made.fingerprint() == rows.fingerprint()
    assert prepare_data(files, make_tokenizer(), max_length=64).fingerprint() == rows.fingerprint()
    assert needs_tokenizer(files)
    assert len(hub) == 1400  # by the data set that was kept nowhere


def test_streams_have_shares_and_stand_beside_files(hub, make_tokenizer, write):
    sources = {
        "far": {"path": "org/rivers", "streaming": True},
        "own": str(write("own.txt", "one\ntwo\n")),
    }
    config = config_of(train_data=sources, mixture={"far": 0.5, "own": 0.5}, max_train_samples=10)
    rows = prepare_data(find_files(config.train_data, 10), make_tokenizer(), max_length=64)
    assert len(rows) == 12 and len(mixed(config, rows)) == 20


def test_a_stream_that_moves_while_it_is_read_or_that_breaks_off_is_named(
    hub, make_tokenizer, tmp_path, monkeypatch
):
    moving = find_files("hub:org/moves?streaming=true", 20)
    with pytest.raises(
        DataError, match="the data or the tokenizer's files changed while LEMA read them"
    ):
        prepare_data(moving, make_tokenizer(), max_length=64, cache=tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("*/tokens"))
    with pytest.raises(DataError, match="streaming is 'maybe'"):
        find_files("hub:org/rivers?streaming=maybe")

    def broken(stream):
        raise ConnectionResetError("the other side is gone")
        yield

    monkeypatch.setattr(Stream, "__iter__", broken)
    with pytest.raises(DataError, match=r"the other side is gone\n.*org/rivers"):
        load_rows("hub:org/rivers?streaming=true")
    monkeypatch.setattr(Stream, "__iter__", lambda stream: iter(()))
    with pytest.raises(DataError, match="holds no rows"):
        load_rows("hub:org/rivers?streaming=true")


@pytest.fixture
def three(write, make_tokenizer):
    """A config with three data sets of 10, 40 and 25 rows in two files, and their rows."""
    files = {
        "few": str(write("few.jsonl", [{"text": f"few {n}"} for n in range(10)])),
        "many": [
            str(write(f"many{k}.jsonl", [{"text": f"many {k} {n}"} for n in range(20)]))
            for k in range(2)
        ],
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
    assert {name: names.count(name) for name in ("few.", "many", "some")} == {
        "few.": 67,
        "many": 40,
        "some": 27,
    }
    assert set(origins) == {rows.origin(index) for index in range(len(rows))}
    times = [origins.count(rows.origin(index)) for index in range(10)]
    assert set(times) == {6, 7}  # of 10 rows in 67
    first = names[: len(names) // 2]
    assert 20 < first.count("few.") < 47  # they are in no order of their data sets
    assert "few 67 rows, each 6.7 times" in found.notes[-1]
    changed = LemaConfig(**{**config.to_dict(), "seed": 7})
    assert (
        mixed(changed, rows).fingerprint()
        != mixed(config, rows).fingerprint()
        == found.fingerprint()
    )


def test_what_is_held_back_is_in_no_share(three):
    config, rows = three(few=0.8, many=0.1, some=0.1)
    train, held = rows.split(12, seed=1)
    kept = mixed(config, train)
    assert {kept.origin(n) for n in range(len(kept))}.isdisjoint(
        held.origin(n) for n in range(len(held))
    )


def test_shares_that_cannot_be_held_are_refused(three, write, make_tokenizer):
    config, rows = three(few=0.5, many=0.3, some=0.3)
    with pytest.raises(ConfigError, match=r"sum to 1\.1"):
        mixed(config, rows)
    with pytest.raises(SettingsError, match="are not those of the data sets"):
        three(few=0.5, many=0.5)
    with pytest.raises(SettingsError, match="does not allow a mixture"):
        config_of(train_data={"a": "a.jsonl"}, mixture={"a": 1.0}, objective="dpo")
    one = str(write("one.jsonl", [{"text": "few"}]))
    twice = config_of(train_data={"a": one, "b": [one]}, mixture={"a": 0.5, "b": 0.5})
    with pytest.raises(ConfigError, match="in two data sets"):
        mixed(twice, rows)
    config, rows = three(few=0.5, many=0.3, some=0.2)
    with pytest.raises(DataError, match="'few' has no rows"):
        mixed(config, rows.select(range(10, 75)))


@pytest.mark.parametrize(
    "wrapped", [bool, np.bool_, np.array, torch.tensor], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("kind", ["tokens", "text", "messages"])
def test_rows_that_say_not_to_be_trained_on_are_left_out_of_what_fit_is_given(
    make_tokenizer, templates, kind, wrapped
):
    """Also where they are token ids with labels, which are taken as they are if they say nothing;
    and where a data set of the library gives arrays or tensors (`with_format`)."""
    rows = [
        {
            "tokens": {"input_ids": [5, 6, 7, number], "labels": [-100, 6, 7, number]},
            "text": {"text": f"the river {number}"},
            "messages": {
                "messages": [
                    {"role": "user", "content": "a?"},
                    {"role": "assistant", "content": f"{number}"},
                ]
            },
        }[kind]
        for number in range(8)
    ]
    files = SimpleNamespace(config=LlamaConfig(), tokenizer=make_tokenizer(templates["plain"]))
    config = config_of(device="cpu")
    said = []
    whole = as_rows(rows, config, files, said.append)
    assert len(whole) == 8 and (whole is rows) == (kind == "tokens")
    flagged = [
        row | ({"train": wrapped(number not in (2, 5))} if number else {})
        for number, row in enumerate(rows)
    ]
    found = as_rows(flagged, config, files, said.append)
    kept = [number for number in range(8) if number not in (2, 5)]
    assert [found[at]["labels"] for at in range(6)] == [whole[number]["labels"] for number in kept]
    assert "2 left out because of train: false" in said[-1] and found.origin(2) == "rows:4"
    if kind == "messages":  # and a message of a row
        rows[3]["messages"][1] |= {"train": wrapped(False)}
        assert len(as_rows(rows, config, files, said.append)) == 7 and "1 left out" in said[-1]
