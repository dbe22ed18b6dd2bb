"""Steps and micro-batches of so many tokens: the rows they take, that nothing else changes, that
the plan holds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_program
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from recorder import Recorder
from ruamel.yaml import YAML
from safetensors.torch import load_file
from smallrun import VOCABULARY, adapter_of, logged, opened, run_fit, same, settings, write_model
from transformers import TrainerCallback
from transformers.trainer_pt_utils import get_length_grouped_indices
from whole import gradients_of, whole_of

from lema import LemaConfig
from lema.backend import Alone
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.data import Batches
from lema.data.batches import dealt
from lema.data.dataset import grouped_by_length, shuffled
from lema.engine.padding import Padding
from lema.errors import ConfigError
from lema.plan.plan import make_plan
from lema.plan.work.step import step_shape
from lema.train.sampler import StepSampler, batches_of

LENGTHS = (5, 40, 7, 3, 22, 9, 61, 4, 12, 3, 30, 8, 2, 17, 2, 26, 33, 6, 11, 50)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def rows_of(lengths: Sequence[int], seed: int = 1) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


ROWS = rows_of(LENGTHS)
Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=50)


@limits(deadline=None, max_examples=60)
@given(lengths=Lengths, tokens=st.integers(1, 200), grouped=st.booleans(), seed=st.integers(0, 9))
def test_a_step_takes_the_next_rows_until_one_more_would_pass_its_tokens(
    lengths: list[int], tokens: int, grouped: bool, seed: int
) -> None:
    rows = rows_of(lengths)
    batches = Batches(rows, 1, seed, tokens=tokens, per_step=grouped)
    step = 0
    for epoch in range(3):
        assert batches.before(epoch) == step
        taken: list[list[int]] = []
        while batches.position(step)[0] == epoch:
            assert batches.position(step) == (epoch, len(taken))
            taken.append(batches.rows(step))
            step += 1
        assert sorted(row for one in taken for row in one) == list(range(len(rows)))
        for one, following in zip(taken, [*taken[1:], []], strict=True):
            size = sum(lengths[row] for row in one)
            assert one and (size <= tokens or len(one) == 1)
            assert not following or size + lengths[following[0]] > tokens
        assert batches.num_batches(epoch + 1) == step
    # without looking at those before
    direct = Batches(rows, 1, seed, tokens=tokens, per_step=grouped)
    assert direct.rows(step - 1) == taken[-1]
    assert direct.num_batches(0.001) == 1


@limits(deadline=None, max_examples=60)
@given(lengths=Lengths, tokens=st.integers(1, 200), size=st.integers(1, 5))
def test_micro_batches_stay_below_their_tokens_and_pad_at_most_a_quarter(
    lengths: list[int], tokens: int, size: int
) -> None:
    groups = dealt(lengths, tokens=tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    computed = [len(group) * max(lengths[place] for place in group) for group in groups]
    for group, positions in zip(groups, computed, strict=True):
        assert positions <= tokens or len(group) == 1
        assert 4 * sum(lengths[place] for place in group) >= 3 * positions
    assert computed == sorted(computed, reverse=True)
    # The same ones over several processes, of which none has more than another but for a
    # micro-batch.
    assert [dealt(lengths, rank, size, tokens=tokens) for rank in range(size)] == [
        groups[n::size] for n in range(size)
    ]
    assert sum(computed[::size]) <= sum(computed) / size + computed[0]


@pytest.mark.parametrize("per_step", [1, 2, 3, 20])
def test_grouping_by_length_is_that_of_transformers(
    per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.array([*LENGTHS, *LENGTHS[::-1]])
    order = shuffled(len(lengths), 5, 0)
    monkeypatch.setattr(torch, "randperm", lambda count, generator=None: torch.from_numpy(order))
    expected = get_length_grouped_indices(lengths.tolist(), per_step)
    assert grouped_by_length(order, lengths, per_step).tolist() == expected
    spread = [
        np.ptp(lengths[Batches(rows_of(lengths.tolist()), 4, 5, per_step=grouped).rows(3)])
        for grouped in (0, 1)
    ]
    assert spread[1] < spread[0]


@pytest.mark.parametrize("changes", [{"tokens_per_step": 128}, {"batch_size": 8}])
def test_loss_and_gradients_are_peft_s_over_the_same_micro_batches(
    llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = settings(
        llama, tmp_path, **{"batch_size": 8, "max_length": 64, "micro_batch_tokens": 70} | changes
    )
    with opened(config) as model:
        model.save_pretrained(tmp_path / "adapter")
        sampler = StepSampler(ROWS, config, model.backend.replicas, model.adapter.padding)
        parts = sampler.micro_batches(0)
        loss = model.adapter.loss(parts)
        loss.backward()
        found = gradients_of(model.skeleton)
    assert len(parts) > 1
    whole = whole_of(llama, tmp_path / "adapter", parts)
    assert found and loss.item() == whole.loss
    assert found.keys() == whole.gradients.keys()
    assert all(torch.equal(found[name], whole.gradients[name]) for name in found)
    # The same rows, each alone: the loss is a mean over tokens, whatever is put together.
    alone = [
        {name: torch.tensor([ROWS[row][name]]) for name in ("input_ids", "labels")}
        for row in sampler.rows(0)
    ]
    assert whole_of(llama, tmp_path / "adapter", alone).loss == pytest.approx(loss.item(), rel=1e-6)


class Crash(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.covered(1)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    llama: Path, tmp_path: Path, grouped: bool
) -> None:
    def config(name: str) -> LemaConfig:
        options: dict[str, Any] = {
            "tokens_per_step": 100,
            "group_by_length": grouped,
            "num_train_epochs": 2.5,
        }
        return settings(
            llama,
            tmp_path / name,
            lora_dropout=0.1,
            save_steps=3,
            batch_size=8,
            max_length=64,
            **options,
        )

    straight = Recorder()
    whole = None
    _, whole = run_fit(config("straight"), ROWS, ROWS[:5], [straight])
    with pytest.raises(KeyboardInterrupt):
        run_fit(config("broken"), ROWS, ROWS[:5], [Crash(4)])
    _, resumed = run_fit(config("broken"), ROWS, ROWS[:5], resume=True)
    assert same(resumed, whole)
    for key in ("loss", "learning_rate", "epoch", "eval_loss", "tokens"):
        assert logged(config("broken"), key) == logged(config("straight"), key), key
    steps = max(logged(config("straight")))
    sampler = StepSampler(ROWS, config("straight"), Alone(), Padding())
    assert steps == sampler.num_steps == sampler._batches.num_batches(2.5)
    epochs = logged(config("straight"), "epoch")
    rates = logged(config("straight"), "learning_rate")
    assert 2 < epochs[steps] <= 3 and [epoch for epoch in epochs.values() if epoch == int(epoch)]
    # linear, down to 0 after the last of these steps
    assert rates[steps] == pytest.approx(1e-2 / steps)
    tokens = logged(config("straight"), "tokens")
    assert tokens[sampler._batches.before(2)] == 2 * sum(LENGTHS)
    with pytest.raises(ConfigError, match=r"tokens_per_step.*100 -> 120|tokens_per_step: 100"):
        run_fit(
            config("broken").model_copy(update={"tokens_per_step": 120}),
            ROWS,
            ROWS[:5],
            resume=True,
        )


def written(place: Path, name: str, model: Path, **changes: Any) -> Path:
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    base: dict[str, Any] = {
        "model_name_or_path": str(model),
        "device": "cpu",
        "output_dir": str(place / name),
        "train_data": str(place / "train.jsonl"),
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-2,
        "gradient_checkpointing": True,
        "max_length": 64,
        "save_steps": 2,
    }
    file = place / f"{name}.yaml"
    with file.open("w") as out:
        YAML(typ="safe", pure=True).dump(base | changes, out)
    return file


def test_two_processes_take_the_steps_of_one(llama: Path, tmp_path: Path) -> None:
    found = []
    for name, count in (("one", 1), ("two", 2)):
        config = written(tmp_path, name, llama, tokens_per_step="0.15k", save_steps=0)
        if count == 1:
            assert run(app, ["train", str(config)]) == 0
        else:
            done = run_program(["-m", "lema", "train", str(config)], count, tmp_path)
            assert done.returncode == 0, done.stderr[-4000:]
        of = LemaConfig.from_yaml(config)
        found.append(
            (
                load_file(tmp_path / name / "adapter_model.safetensors"),
                logged(of),
                logged(of, "tokens"),
            )
        )
    (one, losses, tokens), (two, others, counted) = found
    assert len(losses) > 2 and tokens == counted and losses == pytest.approx(others, rel=1e-5)
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.parametrize(
    "changes", [{"tokens_per_step": 150}, {"tokens_per_step": 40}, {"batch_size": 6}]
)
def test_what_the_plan_takes_for_the_largest_micro_batch_and_step_holds(
    llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    for micro in (64, 100, 400):
        options = {
            "max_length": 64,
            "micro_batch_tokens": micro,
            "num_train_epochs": 3.0,
            **changes,
        }
        config = LemaConfig("m", output_dir=str(tmp_path), **options)
        shape = step_shape(config, 128)
        size = Padding(1, 128)
        sampler = StepSampler(ROWS, config, Alone(), size)
        steps = [sampler.micro_batches(step) for step in range(sampler.num_steps)]
        assert (
            max(part["input_ids"].numel() for parts in steps for part in parts)
            <= shape.micro_batch.tokens
        )
        assert max(part["input_ids"].numel() for parts in steps for part in parts) <= micro
        assert (
            max(sum(part["input_ids"].numel() for part in parts) for parts in steps) <= shape.tokens
        )
    with pytest.raises(ConfigError, match="a row may have 64 tokens, and a micro-batch 63"):
        step_shape(LemaConfig("m", max_length=64, micro_batch_tokens=63), 128)


def test_rows_count_as_they_are_padded_to_a_multiple(llama: Path, tmp_path: Path) -> None:
    config = settings(
        llama,
        tmp_path,
        batch_size=8,
        max_length=64,
        tokens_per_step=192,
        pad_to_multiple_of=64,
        micro_batch_tokens=128,
    )
    with opened(config) as model:
        sampler = StepSampler(ROWS, config, Alone(), model.adapter.padding)
        assert [len(sampler.rows(step)) for step in range(sampler.num_steps)] == [
            3,
            3,
            3,
            3,
            3,
            3,
            2,
        ]
        assert [len(part["input_ids"]) for part in sampler.micro_batches(0)] == [2, 1]


def test_the_plan_knows_the_steps_of_the_run(llama: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "run", llama, tokens_per_step=100, num_train_epochs=2)
    config = LemaConfig.from_yaml(file)
    plan, _ = make_plan(config)
    assert plan.epoch is not None and plan.tokens <= 4 / 3 * 100 + 64
    sampler = StepSampler(ROWS, config, Alone(), Padding())
    assert (
        plan.epoch.run_steps == sampler.num_steps and plan.epoch.steps == sampler._batches.before(1)
    )


def test_auto_is_a_number_by_the_plan_and_stays_it(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LemaConfig.from_yaml(written(tmp_path, "run", llama, tokens_per_step="auto"))
    plan, planner = make_plan(config)
    tokens = planner.config.tokens_per_step
    assert isinstance(tokens, int) and tokens % 64 == 0 and f"auto is {tokens:,}" in plan.notes[0]
    if plan.room.crossover is not None:
        assert tokens >= plan.room.crossover * 0.9 or not plan.measured
    with opened(config, adapter=False) as model:
        model.initialize_lora()
        with pytest.raises(ConfigError, match="tokens_per_step: auto needs the plan of a run"):
            batches_of(ROWS, config)
        trainer = model.get_trainer()
        chosen = trainer.config.tokens_per_step
        trainer.fit(ROWS)
        first = adapter_of(model.skeleton)
    assert isinstance(chosen, int) and chosen >= 64 and chosen % 64 == 0
    assert f"steps of {chosen:,} tokens at most: 1" in capsys.readouterr().out or chosen < sum(
        LENGTHS
    )
    saved = json.loads((tmp_path / "run" / "lema_config.json").read_text())
    assert saved["tokens_per_step"] == chosen
    # A run that is gone on with has the number it began with, whatever would be measured now.
    edited = config.model_copy(
        update={"tokens_per_step": 128, "output_dir": str(tmp_path / "other")}
    )
    run_fit(edited.model_copy(update={"max_steps": 2, "num_train_epochs": 1.0}), ROWS)
    again = edited.model_copy(update={"tokens_per_step": "auto", "max_steps": 3})
    with opened(again) as model:
        trainer = model.get_trainer()
        assert trainer.config.tokens_per_step == 128
        trainer.fit(ROWS, resume=True)
        assert trainer.global_step == 3 and not same(first, adapter_of(model.skeleton))
    assert max(logged(edited)) == 3


def test_settings_that_say_how_much_twice_are_refused() -> None:
    assert LemaConfig("m", tokens_per_step="16k").tokens_per_step == 16_000
    for changes, said in (
        (
            {"tokens_per_step": 100, "batch_size": 4},
            "tokens_per_step counts tokens, and batch_size counts rows",
        ),
        (
            {"tokens_per_step": 100, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps counts rows",
        ),
        ({"tokens_per_step": 100, "micro_batch_size": 2}, "micro_batch_size counts rows"),
        ({"micro_batch_tokens": 2000, "micro_batch_size": 2}, "micro_batch_size counts rows"),
        ({"tokens_per_step": 100, "objective": "dpo"}, "counts examples, not tokens"),
        ({"tokens_per_step": "many"}, "must be a number of tokens, such as 16k, or auto"),
        ({"group_by_length": True, "shuffle": False}, "keeps the rows in the order of the data"),
        ({"group_by_length": True, "packing": True}, "packs have about the same length"),
    ):
        with pytest.raises(ConfigError, match=said):
            LemaConfig("m", **changes)
