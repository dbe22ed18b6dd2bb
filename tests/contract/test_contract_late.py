"""The CUDA backend's code keeps the contract where its copies come as late as they may, or at
any moment.
"""

from latedevice import LateDevice
from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Backend
from lema.testing import BackendContract


class _Late(BackendContract):
    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=8,
        )


class TestAsLateAsCanBe(_Late):
    def backend(self) -> Backend:
        return LateDevice()


class TestAtAnyMoment(_Late):
    def backend(self) -> Backend:
        return LateDevice(seed=4)
