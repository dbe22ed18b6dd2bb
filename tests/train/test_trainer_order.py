"""`shuffle: transformers` draws the rows of each step as `transformers.Trainer` does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import run_fit, same, settings, write_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from lema import LemaConfig
from lema.backend import Alone
from lema.config.problems import SettingsError
from lema.data.mixing.order import DataOrder, SeededOrder, TrainerOrder, row_order
from lema.train.sampler import StepSampler

LONG = 64


class NumberedRows(Dataset[dict[str, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"labels": index}


class Recorder(nn.Module):
    """A model of one weight that keeps which rows each forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches: list[list[int]] = []

    def forward(self, labels: Tensor) -> dict[str, Tensor]:
        self.batches.append(labels.tolist())
        return {"loss": self.weight * labels.float().mean()}


def trained(tmp_path: Path, count: int, resumed: str | None = None, **options: Any) -> Recorder:
    """Return the model of a Trainer that has run."""
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, **options
    )
    model = Recorder()
    Trainer(model, arguments, train_dataset=NumberedRows(count)).train(resumed)
    return model


def sampler_of(count: int, **options: Any) -> StepSampler:
    rows = [
        {"input_ids": [1] * (1 + row % 7), "labels": [row] * (1 + row % 7)} for row in range(count)
    ]
    config = LemaConfig("model", **{"shuffle": "transformers", **options})
    return StepSampler(rows, config, Alone())


def batches_of_steps(sampler: StepSampler, first: int = 0) -> list[list[int]]:
    """Return the rows of every micro-batch, which are the labels of the rows above."""
    return [
        part["labels"].max(dim=1).values.tolist()
        for step in range(first, sampler.num_steps)
        for part in sampler.micro_batches(step)
    ]


CASES = [
    # rows, rows of a batch, batches of a step, epochs, steps, seed, seed of the data
    (23, 4, 1, 3, None, 42, None),
    (23, 4, 3, 2.5, None, 7, None),
    (16, 4, 2, 2, None, 42, 11),
    (5, 8, 4, 3, None, 0, None),
    (30, 1, 7, 1, None, 42, None),
    (23, 4, 4, 1, 11, 3, None),
]


@pytest.mark.parametrize(("count", "rows", "batches", "epochs", "steps", "seed", "data"), CASES)
def test_micro_batches_are_those_of_a_trainer(
    tmp_path: Path,
    count: int,
    rows: int,
    batches: int,
    epochs: float,
    steps: int | None,
    seed: int,
    data: int | None,
) -> None:
    theirs = trained(
        tmp_path,
        count,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batches,
        num_train_epochs=epochs,
        max_steps=steps or -1,
        seed=seed,
        data_seed=data,
        save_strategy="no",
    )
    ours = sampler_of(
        count,
        batch_size=rows,
        gradient_accumulation_steps=batches,
        num_train_epochs=float(epochs),
        max_steps=steps,
        seed=seed,
        data_seed=data,
    )
    assert batches_of_steps(ours) == theirs.batches
    assert [row for step in range(ours.num_steps) for row in ours.rows(step)] == [
        row for batch in theirs.batches for row in batch
    ]


def test_sequential_batches_are_those_of_a_trainer(tmp_path: Path) -> None:
    options = {"num_train_epochs": 2.0, "gradient_accumulation_steps": 3}
    strategy = {"train_sampling_strategy": "sequential", "save_strategy": "no"}
    theirs = trained(tmp_path, 22, per_device_train_batch_size=4, **strategy, **options)
    ours = sampler_of(22, shuffle="sequential", batch_size=4, **options)
    assert batches_of_steps(ours) == theirs.batches


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_trainer_that_is_resumed_draws_what_the_sampler_has_from_that_step_on(
    tmp_path: Path, step: int
) -> None:
    options = {"num_train_epochs": 3.0, "gradient_accumulation_steps": 2, "seed": 5}
    theirs = {**options, "per_device_train_batch_size": 4, "save_steps": 1}
    trained(tmp_path, 23, **theirs)
    resumed = trained(tmp_path, 23, str(tmp_path / f"checkpoint-{step}"), **theirs)
    ours = sampler_of(23, batch_size=4, **options)
    assert ours.num_steps == 9
    assert batches_of_steps(ours, step) == resumed.batches


@pytest.mark.slow
def test_a_run_that_is_resumed_in_an_epoch_equals_one_that_was_not_stopped(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    rows = [
        {"input_ids": list(range(1, 4 + row % 5)), "labels": list(range(1, 4 + row % 5))}
        for row in range(11)
    ]
    options = {
        "shuffle": "transformers",
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2.0,
        "save_steps": 2,
        "lr_scheduler_type": "constant",
    }
    _, whole = run_fit(settings(model, tmp_path / "whole", **options), rows)
    run_fit(settings(model, tmp_path / "parts", **options, max_steps=2), rows)
    _, parts = run_fit(settings(model, tmp_path / "parts", **options), rows, resume=True)
    assert same(whole, parts)


def test_orders_are_by_the_setting() -> None:
    assert row_order(9, 1, "transformers") == TrainerOrder(9, 1)
    assert row_order(9, 1, True) == SeededOrder(9, 1)
    assert row_order(9, 1, False) == row_order(9, 1, "sequential") == DataOrder(9)
    assert sorted(TrainerOrder(9, 1)(3)) == list(range(9))
    assert list(TrainerOrder(9, 1)(3)) != list(TrainerOrder(9, 1)(2))


@pytest.mark.parametrize(
    "setting", [{"group_by_length": True}, {"tokens_per_step": 99}, {"micro_batch_tokens": 99}]
)
def test_batches_that_a_trainer_does_not_have_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="shuffle: transformers takes as many rows"):
        LemaConfig("model", shuffle="transformers", **setting)
