"""One conversion is made while another is written, if both fit in memory; order, bytes and errors are as without."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from roundtrip import published, roundtrip
from transformers import MixtralConfig

from lema.convert import tensors as rewrite
from lema.convert import transfer
from lema.convert.prepare import prepare
from lema.errors import ReadError
from lema.model.weight_names import Conversion
from lema.storage.header import TensorRecord
from lema.storage.tensorfile import read_into


def mixtral() -> MixtralConfig:
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    return MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=5)


class Making:
    """Names of conversions in the order they were begun, and by which thread."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.by: list[str] = []

    def __call__(self, conversion: Any) -> dict[str, torch.Tensor]:
        self.begun.append(conversion)
        self.by.append(threading.current_thread().name)
        if conversion == "bad":
            raise ReadError("the disk failed")
        return {conversion: torch.zeros(1)}


def ahead(names: list[str], both_fit: bool) -> tuple[Any, Making]:
    making = Making()
    given: Any = names
    return transfer._made_ahead(given, making, lambda written, made: both_fit), making


@pytest.mark.parametrize("both_fit", [True, False])
def test_conversions_come_in_order_and_nothing_is_made_before_it_is_wanted(both_fit: bool) -> None:
    made, making = ahead(["a", "b", "c"], both_fit)
    assert making.begun == []
    assert [list(next(made)) for _ in range(3)] == [["a"], ["b"], ["c"]]
    assert making.begun == ["a", "b", "c"]
    assert [name.startswith("lema-convert") for name in making.by] == [False, both_fit, both_fit]


def test_at_most_one_is_made_ahead() -> None:
    made, making = ahead(["a", "b", "c"], both_fit=True)
    next(made)
    made.close()  # waits for what is under way
    assert making.begun == ["a", "b"]


def test_what_does_not_fit_beside_what_is_written_waits() -> None:
    made, making = ahead(["a", "b"], both_fit=False)
    next(made)
    made.close()
    assert making.begun == ["a"]


@pytest.mark.parametrize("both_fit", [True, False])
def test_a_failure_is_raised_where_its_result_is_wanted(both_fit: bool) -> None:
    made, _ = ahead(["a", "bad", "c"], both_fit)
    next(made)
    with pytest.raises(ReadError, match="the disk failed"):
        next(made)


@pytest.mark.parametrize("room", [0, 1 << 40])
def test_the_file_is_the_same_whether_or_not_two_conversions_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    threads: set[str] = set()
    real: Callable[..., Any] = Conversion.run

    def watched(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return real(*arguments)

    monkeypatch.setattr(transfer, "_largest_layer", lambda *_: room)
    monkeypatch.setattr(Conversion, "run", watched)
    roundtrip(mixtral(), tmp_path)
    assert ("lema-convert" in threads) == bool(room)


def test_a_source_that_fails_under_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = published(mixtral(), tmp_path / "model")

    def failing(record: TensorRecord, buffer: memoryview, start: int = 0) -> None:
        if ".layers.1.block_sparse_moe.experts.3.w2" in record.name:
            raise ReadError("the disk failed")
        read_into(record, buffer, start)

    monkeypatch.setattr(rewrite, "read_into", failing)
    before = set(threading.enumerate())  # other tests may have left theirs to the garbage collector
    with pytest.raises(ReadError, match="the disk failed"):
        prepare(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("lema-")]
