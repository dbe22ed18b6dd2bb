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

from lema.backend.contextgroup import ContextGroup
from lema.model.sequence.division import RowDivision
from lema.model.sequence.states import Span

NUM_LAYERS = 8
ROUNDING = 1e-6  # of the loss and all gradients in one vector
# A delta rule rounds much: whole rows, too, are farther from fp64 than that.
DELTA_NETS = ["qwen3_next"]
# those of a list in one start of processes
TYPES = [
    ["llama", "qwen3", "gemma3_text"],
    ["mistral"],
    ["gpt_oss"],
    ["deepseek_v3"],
    ["phi3"],
    ["lfm2", "mamba2"],
    ["falcon_h1"],
]
LENGTHS = ((2, 37), (1, 26))  # rows and tokens, which no number of processes divides
DEEPER = {**EXCEPTIONS, "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)}}
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


def jobs_of(model_types: list[str], count: int, directory: Path) -> dict[tuple[str, str], Job]:
    """Return a step of every type in every layout, and one in chunks of three tokens."""
    jobs = {}
    for model_type in model_types:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tinyconfig, "NUM_LAYERS", NUM_LAYERS)
            patch.setattr(tinyconfig, "EXCEPTIONS", DEEPER)
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
@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("model_types", TYPES, ids=" ".join)
def test_a_step_is_that_of_one_process(model_types: list[str], count: int, tmp_path: Path) -> None:
    jobs = jobs_of(model_types, count, tmp_path)
    assert_equal(jobs, together(list(jobs.values()), count, tmp_path), by_rounding)


@pytest.mark.slow
@pytest.mark.whole
@PARTLY_ADAPTED
@pytest.mark.parametrize("count", [2, 4])
def test_a_delta_net_is_as_far_from_double_precision_as_in_one_process(
    count: int, tmp_path: Path
) -> None:
    jobs = jobs_of(DELTA_NETS, count, tmp_path)
    assert_equal(jobs, together(list(jobs.values()), count, tmp_path), as_far)


def test_a_step_of_two_processes_and_what_they_send(tmp_path: Path) -> None:
    """Keys and values of each layer go to the other process once in the forward and, but for the
    top layer, once in the backward; gradients of those that the other has made go there once."""
    count = 2
    all_jobs = jobs_of(["llama"], count, tmp_path)
    jobs = {name: job for name, job in all_jobs.items() if name[1] in ("padded", "in chunks")}
    by_rank = together(list(jobs.values()), count, tmp_path)
    assert_equal(jobs, by_rank, by_rounding)
    config = tiny_config("llama")
    token = 2 * config.num_key_value_heads * config.head_dim * 4  # bytes
    for number, chunk in enumerate([None, 3]):
        rows = [
            (rows, rounds)
            for rows, length in LENGTHS
            for rounds in RowDivision(group_of(0, count), chunk).of(length).rounds
        ]
        for rank, results in enumerate(by_rank):
            sent = results[number].sent
            # as many as the longest chunk of a round has, because messages are equally long
            longest = sum(rows * max(map(size_of, spans)) for rows, spans in rows)
            visits = 2 * NUM_LAYERS - 1
            assert sent["keys and values"] == visits * (count - 1) * longest * token
            others = sum(
                rows * size_of(span)
                for rows, spans in rows
                for other, span in enumerate(spans)
                if other != rank
            )
            assert sent["their gradients"] == NUM_LAYERS * others * token


def size_of(span: Span) -> int:
    return span.stop - span.start


def group_of(rank: int, count: int) -> ContextGroup:
    return ContextGroup(rank, range(count), lambda value: [value])


@pytest.mark.parametrize("chunk", [None, 2, 7])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("length", [8, 9, 23, 64, 101])
def test_each_token_is_in_one_chunk_and_late_ones_are_shared_out(
    length: int, count: int, chunk: int | None
) -> None:
    rows = [RowDivision(group_of(rank, count), chunk).of(length) for rank in range(count)]
    tokens = sorted(
        token for row in rows for span in row.spans for token in range(span.start, span.stop)
    )
    assert tokens == list(range(length))
    for row in rows:
        assert all(size_of(span) >= 2 for span in row.spans)
        assert chunk is None or all(size_of(span) <= max(chunk, 3) for span in row.spans)
    if length > 60:
        attended = [
            sum((span.start + span.stop) * size_of(span) / 2 for span in row.spans) for row in rows
        ]
        assert max(attended) < 1.2 * min(attended)


def test_rows_are_cut_as_their_chunks_are() -> None:
    numbers = torch.arange(37).repeat(2, 1)
    parts = [RowDivision(group_of(rank, 4)).cut(numbers) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim=1).sort(dim=1).values, numbers)
