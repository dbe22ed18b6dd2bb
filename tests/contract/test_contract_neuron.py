"""The Neuron backend without a device keeps the contract, in one process and in two that hold a
model together.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Backend, BackendOptions
from lema.testing import BackendContract
from lema_neuron.backend import NeuronBackend


@pytest.fixture(scope="module", autouse=True)
def joined() -> Iterator[None]:
    """Join the processes once, where there are several: what gloo leaves with them confuses a
    second time.
    """
    dist: Any = torch.distributed
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


class TestEmulated(BackendContract):
    def backend(self) -> Backend:
        return NeuronBackend(options=BackendOptions(settings={"neuron_runtime": "emulated"}))

    def model_config(self) -> PreTrainedConfig:
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
        }
        return LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=8)


IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # before pytest was


@pytest.mark.slow
def test_two_processes_keep_it_too(tmp_path: Path) -> None:
    """But for the step: each has its part of every gradient, which tests/neuron/test_divided.py
    compares.
    """
    which = "TestEmulated and not training_step"
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-W",
        IMPORTED,
        "-k",
        which,
        __file__,
    ]
    done = run_program(arguments, 2, tmp_path, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    count = len([name for name in dir(TestEmulated) if name.startswith("test_")]) - 1
    assert done.stdout.count(f"{count} passed") == 2, done.stdout
