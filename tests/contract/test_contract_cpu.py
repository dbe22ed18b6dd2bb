"""The reference backend keeps the contract: with host buffers as slots, and with slots of its
own that turn to NaN.
"""

from transformers import LlamaConfig, PreTrainedConfig

from lema.backend import Backend
from lema.testing import BackendContract
from lema_cpu import CpuBackend

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


class TestCpu(BackendContract):
    def backend(self) -> Backend:
        return CpuBackend()

    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=8)


class TestPoisonedCpu(BackendContract):
    def backend(self) -> Backend:
        return CpuBackend(poison=True)

    def model_config(self) -> PreTrainedConfig:
        return LlamaConfig(
            **SMALL, num_key_value_heads=2, num_hidden_layers=8, tie_word_embeddings=True
        )
