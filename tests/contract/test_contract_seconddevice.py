"""The class of all accelerators keeps the contract on a device that is not the CPU, in both forms
of memory.

The second device's streams are late, its memory is filled with NaN, and work that lacks a wait is
an error there.
"""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import seconddevice
from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Backend, BackendOptions
from lema.testing import BackendContract
from lema_accelerator import AcceleratorBackend

pytestmark = pytest.mark.seconddevice


@pytest.fixture(autouse=True)
def second() -> Iterator[seconddevice.SecondDevice]:
    seconddevice.built_or_skipped()
    device = seconddevice.install()
    with device.course():
        yield device


class TestOwnMemory(BackendContract):
    tolerance: ClassVar[float] = 1e-6

    def backend(self) -> Backend:
        return AcceleratorBackend("second")

    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=8,
        )


class TestPageable(TestOwnMemory):
    def backend(self) -> Backend:
        return AcceleratorBackend("second", BackendOptions(page_locked=False))


class TestHostMemory(TestOwnMemory):
    def backend(self) -> Backend:
        return AcceleratorBackend("second", unified=True)
