"""Processes that divide the sequence of each row: the loss and every gradient are, to rounding,
those of one process that has whole rows.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tinyconfig
import torch
from dividedrows import Job, Taken, step, together, whole
from everytype import write_model
from parity import relative_difference
from tinyconfig import EXCEPTIONS, VOCABULARY, tiny_config
from torch import Tensor

NUM_LAYERS = 8
ROUNDING = 1e-6  # of the loss and all gradients in one vector
# A delta rule rounds much: whole rows, too, are farther from fp64 than that.
DELTA_NETS = ["qwen3_next"]
ATTENTION = ["llama", "qwen3", "gemma3_text", "mistral", "gpt_oss", "deepseek_v3", "phi3"]
STATES = ["mamba2", "lfm2", "falcon_h1"]
LENGTHS = ((2, 37), (1, 26))  # rows and tokens, which no number of processes divides
LAYOUTS = ["plain", "padded", "packed", "short"]

PARTLY_ADAPTED = pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")


def batches_of(layout: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    # of the short ones no process gets two tokens
    for rows, length in LENGTHS if layout != "short" else ((1, 3), (2, 9)):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, :2] = -100
        batch = {"input_ids": ids, "labels": labels}
        if layout == "padded":
            mask = torch.ones_like(ids)
            mask[0, -5:] = 0
            mask[-1, :2] = 0
            batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
        if layout == "packed":
            ends = [(0, 11, length), (0, 7, 19, length)][:rows]
            positions = [
                torch.cat([torch.arange(stop - start) for start, stop in pairwise(of_row)])
                for of_row in ends
            ]
            batch["position_ids"] = torch.stack(positions)
        batches.append(batch)
    return batches


@pytest.fixture(autouse=True)
def eight_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyconfig, "NUM_LAYERS", NUM_LAYERS)
    changed = {"lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)}}
    monkeypatch.setattr(tinyconfig, "EXCEPTIONS", {**EXCEPTIONS, **changed})


def jobs_of(model_types: list[str], count: int, directory: Path) -> dict[tuple[str, str], Job]:
    """Return a step of every type in every layout, and one in chunks of three tokens."""
    jobs = {}
    for model_type in model_types:
        model = write_model(tiny_config(model_type), directory / model_type)
        for layout in LAYOUTS:
            settings = {"context_parallel_size": count}
            jobs[model_type, layout] = Job(model, batches_of(layout), settings)
        settings = {"context_parallel_size": count, "sequence_chunk": 3}
        jobs[model_type, "in chunks"] = Job(model, batches_of("plain"), settings)
    return jobs


def assert_equal(
    jobs: dict[tuple[str, str], Job],
    by_rank: list[list[Taken]],
    is_close: Callable[[Job, Taken, Taken], bool],
) -> None:
    for number, (name, job) in enumerate(jobs.items()):
        expected = step(Job(job.directory, job.batches))
        for results in by_rank:
            taken = results[number]
            assert not taken.error, name
            assert is_close(job, taken, expected), name
            # all processes take the same step, bit for bit
            assert torch.equal(taken.numbers, by_rank[0][number].numbers), name
            assert taken.evaluated[1] == expected.evaluated[1], name
            assert taken.evaluated[0] == pytest.approx(expected.evaluated[0], rel=1e-6), name


def by_rounding(job: Job, taken: Taken, expected: Taken) -> bool:
    return relative_difference(taken.numbers, expected.numbers) < ROUNDING


def as_far(job: Job, taken: Taken, expected: Taken) -> bool:
    """Whether a step is about as far from that in double precision as whole rows are."""
    exact = whole(job)
    farthest = 2 * relative_difference(expected.numbers, exact)
    return relative_difference(taken.numbers, exact) < farthest


@PARTLY_ADAPTED
@pytest.mark.parametrize(
    ("model_types", "count"),
    [
        (["llama", "lfm2"], 2),
        pytest.param(ATTENTION, 2, marks=pytest.mark.slow),
        pytest.param(ATTENTION, 4, marks=pytest.mark.slow),
        pytest.param(STATES, 2, marks=pytest.mark.slow),
        pytest.param(STATES, 4, marks=pytest.mark.slow),
    ],
    ids=["few-2", "attention-2", "attention-4", "states-2", "states-4"],
)
def test_a_step_is_that_of_one_process(model_types: list[str], count: int, tmp_path: Path) -> None:
    jobs = jobs_of(model_types, count, tmp_path)
    assert_equal(jobs, together(list(jobs.values()), count, tmp_path), by_rounding)


@pytest.mark.slow
@PARTLY_ADAPTED
@pytest.mark.parametrize("count", [2, 4])
def test_a_delta_net_is_as_far_from_double_precision_as_in_one_process(
    count: int, tmp_path: Path
) -> None:
    jobs = jobs_of(DELTA_NETS, count, tmp_path)
    assert_equal(jobs, together(list(jobs.values()), count, tmp_path), as_far)
