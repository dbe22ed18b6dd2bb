"""Processes that divide the sequence of each row: the loss and every gradient are, to rounding,
those of one process that has whole rows.
"""

from pathlib import Path

import pytest
import tinyconfig
import torch
from dividedrows import Job, step, together
from everytype import write_model
from parity import relative_difference
from tinyconfig import VOCABULARY, tiny_config
from torch import Tensor

NUM_LAYERS = 8
ROUNDING = 1e-6  # of the loss and all gradients in one vector
TYPES = [
    "llama",
    "qwen3",
    "gemma3_text",
    "mistral",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
    "lfm2",
    "falcon_h1",
    "phi3",
]
LAYOUTS = ["plain", "padded", "packed"]


def batches_of(layout: str) -> list[dict[str, Tensor]]:
    """Rows whose lengths no number of processes divides."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for rows, length in ((2, 37), (1, 26)):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, :3] = -100
        batch = {"input_ids": ids, "labels": labels}
        if layout == "padded":
            mask = torch.ones_like(ids)
            mask[0, -5:] = 0
            mask[-1, :2] = 0
            batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
        if layout == "packed":
            cuts = [(11, length), (7, 19, length)][:rows]
            positions = [
                torch.cat([torch.arange(stop - start) for start, stop in zip((0, *cut), cut)])
                for cut in cuts
            ]
            batch["position_ids"] = torch.stack(positions)
        batches.append(batch)
    return batches


@pytest.fixture(autouse=True)
def eight_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyconfig, "NUM_LAYERS", NUM_LAYERS)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_that_of_one_process(model_type: str, count: int, tmp_path: Path) -> None:
    directory = write_model(tiny_config(model_type), tmp_path / "model")
    jobs = [
        Job(directory, batches_of(layout), {"context_parallel_size": count} | settings)
        for layout, settings in [*((layout, {}) for layout in LAYOUTS), ("plain", {"sequence_chunk": 3})]
    ]
    by_rank = together(jobs, count, tmp_path)
    for number, job in enumerate(jobs):
        expected = step(Job(directory, job.batches))
        for results in by_rank:
            found = results[number]
            assert not found.error
            print(model_type, count, number, relative_difference(found.numbers, expected.numbers))
            assert relative_difference(found.numbers, expected.numbers) < ROUNDING
            assert torch.equal(found.numbers, by_rank[0][number].numbers)
            assert found.evaluated[1] == expected.evaluated[1]
            assert found.evaluated[0] == pytest.approx(expected.evaluated[0], rel=1e-6)
