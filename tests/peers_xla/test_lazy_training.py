"""Training on the CPU device of torch_xla: as many graphs for any number of layers, none later, the CPU's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # three processes, each of which compiles

DEPTHS = (4, 8, 12)
STEPS = 4
# A process for each depth: what one has compiled is not compiled for the next.
RUN = """
import json, sys, warnings
import torch
import torch_xla.debug.metrics as metrics
from transformers import AutoModelForCausalLM, LlamaConfig
import tiny
from lema import LemaConfig, LemaModel

root, depth, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(1)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=depth)).save_pretrained(root)

def train(device, **more):
    settings = dict(output_dir=root + "/out", save_steps=0, lora_rank=4, gradient_checkpointing=True, prefetch_depth=1)
    model = LemaModel(LemaConfig(root, device=device, learning_rate=1e-2, **settings, **more))
    model.initialize_lora()
    trainer = model.get_trainer()
    losses = [trainer.accumulate(tiny.micro_batches(2, lengths=(12, 12))).loss for _ in range(steps)]
    found = [one.detach().cpu() for one in model.get_trainable_parameters()]
    graphs = getattr(getattr(model.backend, "_device", None), "compiles", None)
    model.close()
    return losses, found, graphs and graphs.of_steps

lazy = train("neuron", neuron_runtime="xla")
falls = [name for name in metrics.counter_names() if name.startswith("aten::")]
plain = train("cpu")
apart = max(float((one - other).abs().max()) for one, other in zip(lazy[1], plain[1]))
print(json.dumps({"graphs": lazy[2], "falls": falls, "lazy": lazy[0], "plain": plain[0], "apart": apart}))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What training a model of each depth was like."""
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(here), "HF_HUB_OFFLINE": "1"}
    found = {}
    for depth in DEPTHS:
        root = tmp_path_factory.mktemp(f"depth{depth}")
        line = [sys.executable, "-W", "ignore", "-c", RUN, str(root), str(depth), str(STEPS)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found[depth] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_deeper_model_compiles_no_more_graphs(runs: dict[int, Any]) -> None:
    first = {depth: run["graphs"][0] for depth, run in runs.items()}
    assert len(set(first.values())) == 1, first
    assert 0 < first[DEPTHS[0]] <= 16, first


def test_later_steps_compile_none(runs: dict[int, Any]) -> None:
    assert all(len(run["graphs"]) == STEPS and run["graphs"][2:] == [0, 0] for run in runs.values())
    assert all(run["graphs"][1] <= 2 for run in runs.values())  # an optimizer makes its state in the first


def test_the_numbers_are_those_of_the_cpu(runs: dict[int, Any]) -> None:
    for run in runs.values():
        assert run["lazy"] == pytest.approx(run["plain"], rel=1e-5)
        assert run["apart"] <= 1e-5
        assert run["lazy"][0] != run["lazy"][-1]  # it has trained


def test_no_operation_of_a_layer_goes_through_the_host(runs: dict[int, Any]) -> None:
    """Only numbers are asked for: by the masks' code, and at the end of a step."""
    assert all(set(run["falls"]) <= {"aten::_local_scalar_dense", "aten::median"} for run in runs.values())
