"""Packed rows train as they train apart; what cannot keep them apart is refused by what it does,
not by its name.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from everytype import opened as opened_type
from everytype import write_model as write_type
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from smallrun import VOCABULARY, logged, opened, run_fit, settings, tokenizer, write_model
from tinyconfig import tiny_config
from whole import gradients_of, whole_of

from lema import LemaConfig
from lema.data.batches import Batches, collate
from lema.engine.head.loss import attended_tokens, trained_tokens
from lema.engine.packing import Packs, check_packing
from lema.errors import ConfigError, DataError
from lema.train.batch import packed
from lema.train.phases.file import read_phase_file
from lema.train.run import load_data

LENGTHS = (5, 40, 7, 3, 22, 9, 61, 4, 12, 3, 30, 8, 1, 17)


def rows_of(lengths: Sequence[int], seed: int = 1) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


ROWS = rows_of(LENGTHS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    gemma = tiny_config("gemma3_text")
    gemma.update(
        {"vocab_size": VOCABULARY, "num_hidden_layers": 8, "layer_types": None, "sliding_window": 5}
    )
    gemma = type(gemma)(
        **{name: one for name, one in gemma.to_dict().items() if name != "layer_types"}
    )
    torch.manual_seed(0)
    written = write_type(gemma, place / "gemma3")
    tokenizer().save_pretrained(written)
    return {"llama": write_model(place / "llama"), "gemma3": written}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packs_have_the_loss_and_gradients_of_their_rows(
    models: dict[str, Path], tmp_path: Path, name: str, attention: str
) -> None:
    config = settings(
        models[name],
        tmp_path,
        packing=True,
        max_length=64,
        attn_implementation=attention,
        batch_size=9,
    )
    with opened(config) as model:
        model.save_pretrained(tmp_path / "adapter")
        packs = packed(ROWS, model.adapter, config)
        assert len(packs) == 4  # 222 tokens in packs of 64
        parts = Batches(packs, 9, shuffle=False, micro_batch_size=2).micro_batches([0])
        assert {tuple(part) for part in parts} == {("input_ids", "labels", "position_ids")}
        loss = model.adapter.loss(parts)
        loss.backward()
        found = gradients_of(model.skeleton)
    packed_whole = whole_of(
        models[name], tmp_path / "adapter", parts, attn_implementation=attention
    )
    assert loss.item() == packed_whole.loss
    assert all(torch.equal(found[key], packed_whole.gradients[key]) for key in found)
    apart = [
        {key: one for key, one in collate([row], untrained=True).items() if key != "rows"}
        for row in ROWS
    ]
    whole = whole_of(models[name], tmp_path / "adapter", apart, attn_implementation=attention)  # type: ignore[arg-type]
    # one of one
    assert (
        trained_tokens(parts) == trained_tokens(apart)
        and attended_tokens(parts) == sum(LENGTHS) - 1
    )
    assert found.keys() == whole.gradients.keys() and loss.item() == pytest.approx(
        whole.loss, rel=1e-6
    )
    for key, gradient in whole.gradients.items():
        assert float((found[key] - gradient).abs().max() / gradient.abs().max()) < 1e-5, key


@limits(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=60),
    length=st.integers(20, 45),
    seed=st.integers(0, 5),
    wrapped=st.booleans(),
)
def test_every_token_is_in_one_pack_and_packs_are_few(
    lengths: list[int], length: int, seed: int, wrapped: bool
) -> None:
    ids = [list(range(100 * number, 100 * number + size)) for number, size in enumerate(lengths)]
    rows = [{"input_ids": one, "labels": [7] * len(one)} for one in ids]
    packs = Packs(rows, length, seed, wrapped=wrapped)
    found = [packs[index] for index in range(len(packs))]
    packed_tokens = sorted(token for pack in found for token in pack["input_ids"])
    assert len(set(packed_tokens)) == len(packed_tokens)
    # one token in a pack of its own, which nothing predicts
    alone = wrapped and sum(lengths) % length == 1
    assert len(packed_tokens) == sum(lengths) - alone
    best = -(-sum(lengths) // length) - alone
    # 11/9 of the fewest
    assert len(packs) == best if wrapped else best <= len(packs) <= max(1, 1.25 * best + 1)
    for index, pack in enumerate(found):
        assert (
            len({len(one) for one in pack.values()}) == 1
            and len(pack["labels"]) == packs.num_tokens(index) <= length
        )
        for token, label, position, before in zip(
            pack["input_ids"],
            pack["labels"],
            pack["position_ids"],
            [-1, *pack["input_ids"]],
            strict=False,
        ):
            assert (
                (position == 0)
                == (label == -100)
                == (token != before + 1 or token % 100 == 0 or position == 0)
            )
            if not wrapped:
                assert position == token % 100
    again = Packs(rows, length, seed, wrapped=wrapped)
    assert [again[index] for index in range(len(again))] == found


def test_many_rows_are_packed_at_once_and_well() -> None:
    lengths = np.random.default_rng(0).lognormal(4.1, 0.9, 20_000).clip(2, 1024).astype(int)

    class Known(list[Any]):
        def num_tokens(self, index: int) -> int:
            return int(lengths[index])

    packs = Packs(Known(range(len(lengths))), 1024, 3)
    assert sum(packs.num_tokens(index) for index in range(len(packs))) == lengths.sum()
    assert lengths.sum() / (1024 * len(packs)) > 0.99
    assert "99% filled" in packs.notes[0] or "100% filled" in packs.notes[0]


def test_packs_in_order_are_those_of_the_strategy_bfd_of_trl() -> None:
    """TRL fills the pack that has had its space for longest, of each thousand rows."""
    lengths = [4, 6, 6, 4, 2, 2, 3]
    rows = [{"input_ids": [row] * size, "labels": [row] * size} for row, size in enumerate(lengths)]
    packs = Packs(rows, 10, 3, in_order=True)
    assert [sorted(set(pack["input_ids"])) for pack in packs] == [[0, 1], [2, 3], [4, 5, 6]]
    many = [{"input_ids": [row], "labels": [row]} for row in range(1003)]
    packs = Packs(many, 600, 3, in_order=True)
    assert [len(pack["input_ids"]) for pack in packs] == [600, 400, 3]


@pytest.mark.parametrize("known", [False, True])
def test_packs_that_train_nothing_are_left_out(known: bool) -> None:
    class Known(list[Any]):
        trained = np.array([2, 5, 9])

    # a long prompt, and two tokens after it
    answer = {
        "input_ids": [*range(40)],
        "labels": [-100] * 38 + [38, 39],
    }
    text = {"input_ids": [*range(100, 106)], "labels": [*range(100, 106)]}
    tail = {"input_ids": [*range(200, 210)], "labels": [*range(200, 210)]}
    rows = [answer, text, tail]
    packs = Packs(Known(rows) if known else rows, 11, 0, wrapped=True)
    found = [packs[number] for number in range(len(packs))]
    assert all(any(label != -100 for label in pack["labels"]) for pack in found)
    every = [token for row in rows for token in row["input_ids"]]
    dropped = set(every) - {token for pack in found for token in pack["input_ids"]}
    # of the prompt, or a token that nothing predicts
    assert dropped and dropped <= {
        *range(40),
        105,
        209,
    }
    assert (
        packs.notes[1]
        == f"packed: {6 - len(packs)} further packs have no token to train on and are left out"
    )
    assert [packs.num_tokens(number) for number in range(len(packs))] == [
        len(pack["input_ids"]) for pack in found
    ]
    with pytest.raises(DataError, match="no pack has a token to train on"):
        Packs([{"input_ids": [1], "labels": [1]}], 11, 0, wrapped=True)


def test_a_row_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(DataError, match="row 6 has 61 tokens, more than the 60 of a pack"):
        Packs(ROWS, 60, 0)
    assert len(Packs(ROWS, 60, 0, wrapped=True)) == -(-sum(LENGTHS) // 60)


@pytest.mark.filterwarnings("ignore:PEFT does not adapt")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", "rows of a pack influence each other in this model: their logits differ by"),
        # short convolutions beside attention
        (
            "lfm2",
            "rows of a pack influence each other in this model: their logits differ by",
        ),
        # it counts positions itself
        (
            "bloom",
            "rows of a pack influence each other in this model: their logits differ by",
        ),
        ("llama", None),
    ],
)
def test_what_carries_something_over_the_end_of_a_row_is_refused(
    tmp_path: Path, kind: str, words: str | None
) -> None:
    torch.manual_seed(0)
    with opened_type(write_type(tiny_config(kind), tmp_path)) as model:
        rows = [row["input_ids"][:6] for row in rows_of([6] * 4)]
        rows = [{"input_ids": [token % 90 + 1 for token in row]} for row in rows]
        if words is None:
            check_packing(model.adapter, rows, 2)
            return
        with pytest.raises(ConfigError, match=words):
            check_packing(model.adapter, rows, 2)


def test_a_run_on_packs_resumes_exactly_and_says_what_it_packs(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {
        "packing": True,
        "max_length": 64,
        "batch_size": 1,
        "num_train_epochs": 2.0,
        "save_steps": 3,
    }
    said: list[str] = []
    run_fit(
        settings(models["llama"], tmp_path / "whole", **options), ROWS, ROWS[:3], say=said.append
    )
    assert "packed: 14 rows in 4 packs of at most 64 tokens, 87% filled" in said
    whole = logged(settings(models["llama"], tmp_path / "whole", **options))
    assert list(whole) == list(range(1, 9))
    config = settings(models["llama"], tmp_path / "whole", **options)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-8", ignore_errors=True)
    run_fit(config, ROWS, ROWS[:3], resume=True, say=said.append)
    assert logged(config) == whole
    with pytest.raises(ConfigError, match="rows"):
        run_fit(
            settings(models["llama"], tmp_path / "whole", **options | {"packing": False}),
            ROWS,
            resume=True,
        )


def test_evaluation_of_packs_is_that_of_the_rows(models: dict[str, Path], tmp_path: Path) -> None:
    with opened(settings(models["llama"], tmp_path, max_length=64)) as model:
        expected = model.get_trainer().evaluate(ROWS)
    with opened(settings(models["llama"], tmp_path, max_length=64, packing=True)) as model:
        found = model.get_trainer().evaluate(ROWS)
    assert found["eval_tokens"] == expected["eval_tokens"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_settings_that_contradict_packing_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="packing must be true, false, wrapped or bfd, not 'tight'"
    ):
        LemaConfig("model", packing="tight")
    with pytest.raises(ConfigError, match="dpo compares rows, which cannot be packed"):
        LemaConfig("model", packing=True, objective="dpo")
    with pytest.raises(ConfigError, match="cuts rows of any length"):
        LemaConfig("model", packing="wrapped", overlong="drop")
    (tmp_path / "phases.yaml").write_text("model_name_or_path: m\npacking: true\nphases: []\n")
    with pytest.raises(ConfigError, match="style: PMD"):
        read_phase_file(tmp_path / "phases.yaml")


def test_a_long_text_is_wrapped_and_nothing_of_it_is_cut_off(
    models: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "book.txt"
    file.write_text("the miller of mill 1 grinds corn by the river " * 40)
    config = settings(
        models["llama"],
        tmp_path,
        packing="wrapped",
        max_length=32,
        train_data=str(file),
        max_steps=1,
    )
    with opened(config) as model:
        rows, _ = load_data(model)
        assert rows.counts.cut_tokens == 0 and rows.counts.tokens > 300
        packs = packed(rows, model.adapter, config)
        assert len(packs) == -(-rows.counts.tokens // 32)
        model.get_trainer().fit(rows)
