"""What a plan tells of rows in chunks: their share of attention, what they take, and how long they
may become.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import lema
from hollowmodel import write_hollow
from transformers import LlamaConfig

from lema import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan import make_plan
from lema.plan.lengths import LongRows
from lema.plan.machine import profile

LENGTH = 16384
LIMIT = 400_000_000


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    shape = LlamaConfig(vocab_size=96, max_position_embeddings=LENGTH, **sizes | heads)
    shape.dtype = torch.bfloat16
    return write_hollow(tmp_path_factory.mktemp("hollow"), shape)


def rows_of(directory: Path, length: int, **changes: Any) -> LongRows | None:
    options: dict[str, Any] = {"max_length": length, "micro_batch_size": 1, "batch_size": 1}
    options |= {"sequence_chunk": 256, "device_memory": LIMIT, **changes}
    options |= {"gradient_checkpointing": True, "prefetch_depth": 1}
    options = {"keys_values": "device", **options}
    plan, _ = make_plan(LemaConfig(str(directory), device="cpu", **options), profile("4090"))
    return plan.long_rows


def test_the_longest_row_that_fits_is_the_longest(hollow: Path) -> None:
    rows = rows_of(hollow, LENGTH)
    assert rows is not None
    assert rows.longest > LENGTH
    assert rows.reason.startswith("device memory is short of longer ones: a token takes")
    again = rows_of(hollow, int(0.95 * rows.longest))
    assert again is not None
    assert again.longest == pytest.approx(rows.longest, rel=0.05)
    longer = int(1.1 * rows.longest)
    with pytest.raises(MemoryLimitError) as refused:
        rows_of(hollow, longer)
    assert "tokens fit: device memory is short" in refused.value.how


def test_attention_is_more_of_longer_rows(hollow: Path) -> None:
    rows, longer = (rows_of(hollow, factor * LENGTH) for factor in (1, 2))
    assert rows is not None
    assert longer is not None
    assert 0.3 < rows.attention < longer.attention < 1
    # with n tokens each of which sees n / 2: 12 products of n / 2 x width for each layer's 9
    assert rows.layer["keys and values of a layer"] == 2 * 2 * 64 * 2 * LENGTH
    assert rows.layer["the sums of their gradients"] == 2 * 2 * 64 * 4 * LENGTH


def test_rows_that_go_through_as_they_are_have_none(hollow: Path) -> None:
    assert rows_of(hollow, 2048, sequence_chunk=None) is None
    assert rows_of(hollow, 256) is None


def test_the_command_plans_for_a_length(
    hollow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    options = f"device_memory: {LIMIT}\nbatch_size: 1\n"
    config.write_text(f"model_name_or_path: {hollow}\noutput_dir: {tmp_path}/out\n{options}")
    words = ["plan", str(config), "--profile", "4090", "--max-length", str(LENGTH), "--json"]
    assert lema(*words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["micro_batch"]["length"] == LENGTH
    assert plan["micro_batch"]["chunk"] == plan["long_rows"]["chunk"] < LENGTH
    assert 0 < plan["long_rows"]["attention"] < 1
    assert plan["long_rows"]["longest"] > LENGTH
    assert plan["memory"]["disk"].keys() >= {"boundaries"}
    assert lema(*words[:-1]) == 0
    printed = capsys.readouterr().out
    assert "of all operations attention" in printed
    assert "tokens that would fit" in printed
    config.write_text(f"{config.read_text()}keys_values: device\n")
    assert lema(*words[:-2], 100 * LENGTH) == 4
    assert "tokens fit" in capsys.readouterr().err
