"""`sequence_chunk: auto` is a power of two that fits, or none: the largest with which a step is about
as fast as with any, and the largest of all where seconds do not count. A run keeps it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hollowmodel import write_hollow
from smallrun import settings, write_model
from transformers import LlamaConfig

from lema import LemaConfig, LemaModel
from lema.errors import MemoryLimitError
from lema.model.sequence.chunks import ChunkedRows
from lema.plan import make_plan
from lema.plan.cost import Speeds, seconds
from lema.plan.machine import Machine, profile
from lema.plan.plan import Plan
from lema.plan.planner import Planner
from lema.plan.work import chunk_work
from lema.train.checkpoint.resume import as_begun, settings_then
from lema.train.run import train

LENGTH = 16384


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    shape = LlamaConfig(vocab_size=96, max_position_embeddings=LENGTH, **sizes | heads)
    shape.dtype = torch.bfloat16
    return write_hollow(tmp_path_factory.mktemp("hollow"), shape)


CARD = profile("4090")


def planned(
    directory: Path, limit: str | None, machine: Machine = CARD, **changes: Any
) -> tuple[Plan, Planner]:
    options: dict[str, Any] = {"max_length": LENGTH, "micro_batch_size": 1, "batch_size": 1}
    options |= {"sequence_chunk": "auto", "boundary_activations": "host"}
    options |= {"gradient_checkpointing": True, "device_memory": limit, **changes}
    return make_plan(LemaConfig(str(directory), device="cpu", **options), machine)


def fits(directory: Path, limit: str, chunk: int | None) -> bool:
    try:
        planned(directory, limit, sequence_chunk=chunk)
    except MemoryLimitError:
        return False
    return True


def test_it_is_none_where_whole_rows_fit(hollow: Path) -> None:
    plan, planner = planned(hollow, "auto")
    assert plan.micro_batch.chunk is None
    assert planner.chosen["sequence_chunk"] is None
    assert not any("sequence_chunk" in note for note in plan.notes)
    assert planned(hollow, None)[0].micro_batch.chunk is None


def test_it_is_the_largest_power_of_two_that_fits(hollow: Path) -> None:
    limit = "700MB"
    plan, planner = planned(hollow, limit, deterministic=True)
    chunk = plan.micro_batch.chunk
    assert chunk is not None
    assert chunk & (chunk - 1) == 0
    assert not fits(hollow, limit, None)
    assert fits(hollow, limit, chunk)
    assert not fits(hollow, limit, 2 * chunk)
    assert planner.chosen["sequence_chunk"] == chunk
    assert sum(plan.memory.device.values()) <= 700e6
    assert any(f"chunks of {chunk:,}" in note for note in plan.notes)
    less = planned(hollow, "500MB", deterministic=True)[0].micro_batch.chunk
    assert less is not None
    assert less <= chunk


def test_where_seconds_count_it_is_the_largest_that_is_about_as_fast_as_any(hollow: Path) -> None:
    """With a slow link, so that layers that stay on the device save time."""
    limit = "700MB"
    slow = replace(CARD, speeds=Speeds(1e9, 1e8))
    sizes = [size for size in (2048, 4096, 8192) if fits(hollow, limit, size)]
    plans = {size: planned(hollow, limit, slow, sequence_chunk=size)[0] for size in sizes}
    taken = {
        size: seconds(plan.needs.demand, plan.allocation, slow.speeds)
        for size, plan in plans.items()
    }
    fastest = min(taken.values())
    largest = max(size for size in sizes if 0.98 * taken[size] <= fastest)
    plan = planned(hollow, limit, slow)[0]
    assert plan.micro_batch.chunk == largest


def test_what_large_chunks_take_is_told_by_smaller_ones(
    hollow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of many tokens are not run without values, and neither are large chunks."""
    run = list[int]()
    front = ChunkedRows.front

    def noted(rows: ChunkedRows, chunk: int, *args: Any, **options: Any) -> Any:
        run.append(rows.spans[chunk].stop - rows.spans[chunk].start)
        return front(rows, chunk, *args, **options)

    monkeypatch.setattr(ChunkedRows, "front", noted)
    planner = planned(hollow, None, sequence_chunk=8192)[1]
    assert planner.workload is not None
    assert max(run) == 4096
    scaled = planner.workload.works[0]
    monkeypatch.setattr(chunk_work, "LARGEST", 8192)
    planner = planned(hollow, None, sequence_chunk=8192)[1]
    assert planner.workload is not None
    assert max(run) == 8192
    shown = planner.workload.works[0]
    assert scaled.chunk_bytes == pytest.approx(shown.chunk_bytes, rel=1e-3)
    assert scaled.keys_values_bytes == shown.keys_values_bytes
    assert scaled.recompute == pytest.approx(shown.recompute, rel=1e-6)


def test_of_a_device_without_a_limit_it_goes_by_its_size(hollow: Path) -> None:
    options: dict[str, Any] = {"max_length": LENGTH, "micro_batch_size": 1, "batch_size": 1}
    options |= {"sequence_chunk": "auto", "boundary_activations": "host"}
    options |= {"gradient_checkpointing": True, "device_memory": None}
    config = LemaConfig(str(hollow), device="cpu", **options)
    small = replace(profile("4090"), device_memory=700_000_000)
    plan, _ = make_plan(config, small)
    assert plan.micro_batch.chunk is not None
    assert plan.fits


def test_where_no_chunk_fits_memory_is_what_is_short(hollow: Path) -> None:
    with pytest.raises(MemoryLimitError, match="MB of device memory"):
        planned(hollow, "20MB")


def test_longer_rows_cost_what_shorter_ones_say(hollow: Path) -> None:
    """Rows of 4,096 tokens are run in the place of longer ones."""
    plan, _ = planned(hollow, "auto", sequence_chunk=1024, max_length=LENGTH)
    longer, planner = planned(hollow, "auto", sequence_chunk=1024, max_length=4 * LENGTH)
    work = planner.workload
    assert work is not None
    first = plan.needs.planner.workload
    assert first is not None
    assert work.works[0].keys_values_bytes == 4 * first.works[0].keys_values_bytes
    assert work.hidden_bytes == 4 * first.hidden_bytes
    linear, longer_linear = (
        each.works[0].forward
        + each.works[0].backward
        + each.works[0].recompute
        - each.works[0].square_flops
        for each in (first, work)
    )
    assert longer_linear == pytest.approx(4 * linear, rel=0.01)
    # (L + chunk) / 2 of the tokens are seen
    seen = (4 * LENGTH + 1024) / (LENGTH + 1024)
    square = work.works[0].square_flops / first.works[0].square_flops
    assert square == pytest.approx(4 * seen, rel=0.01)
    assert longer.step.seconds > 4 * plan.step.seconds


Small = Callable[..., LemaConfig]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352}
    model = write_model(
        tmp_path / "model", "llama", dtype=torch.float32, max_position_embeddings=2048, **sizes
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(['{"text": "' + "corn " * 600 + '"}'] * 4))

    def config_of(**changes: Any) -> LemaConfig:
        options: dict[str, Any] = {"batch_size": 1, "max_length": 2048, "device": "cpu"}
        options |= {"train_data": str(rows), "save_steps": 1, "loss_chunk_tokens": 64}
        options |= {"gradient_checkpointing": True, "sequence_chunk": "auto"}
        options |= {"save_total_limit": None, "boundary_activations": "device"}
        return settings(model, tmp_path / "run", **options | changes)

    return config_of


def limit_of(config: LemaConfig) -> int:
    """Return the device memory that a step in chunks of 512 tokens takes."""
    asked = config.model_copy(update={"sequence_chunk": 512, "device_memory": None})
    model = LemaModel(asked)
    model.initialize_lora()
    planner = model.opened
    planner = replace(planner, workload=planner.work(planner.shape.micro_batch))
    nbytes = sum(planner.needs().device.values())
    model.close()
    return nbytes


def test_a_run_takes_it_says_it_and_keeps_it(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = limit_of(small())
    train(small(device_memory=limit, max_steps=1))
    assert "sequence_chunk: auto is 512, for rows of 2,048 tokens" in capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert settings_then(checkpoint)["sequence_chunk"] == 512
    more = small(max_steps=2)  # with which whole rows fit
    assert as_begun(more, checkpoint).sequence_chunk == 512
    assert as_begun(small(sequence_chunk=256), checkpoint).sequence_chunk == 256
    train(more, resume=True)
    assert settings_then(tmp_path / "run" / "checkpoint-2")["sequence_chunk"] == 512


def test_a_run_whose_rows_fit_says_so_and_keeps_that(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small(max_steps=1))
    said = "sequence_chunk: auto is none, because they fit as they are, for rows of 2,048 tokens"
    assert said in capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert settings_then(checkpoint)["sequence_chunk"] is None
    assert as_begun(small(), checkpoint).sequence_chunk is None
