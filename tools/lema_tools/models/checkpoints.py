"""Public checkpoints by name: their type, the form in which they are published, and the sizes in
their config.json.

The sizes are copied from the publishers' config.json; nothing is downloaded. If `transformers`
documents the class of a config with the checkpoint, its defaults are the sizes, and `sizes` has
only the differences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

__all__ = ["CHECKPOINTS", "NEAR", "PARAMETERS", "Checkpoint", "config_of", "named"]


OWNERS = {  # by how names begin
    "MiniMax": "MiniMaxAI",
    "MiMo": "XiaomiMiMo",
    "Qwen": "Qwen",
    "Llama": "meta-llama",
    "gemma": "google",
    "phi": "microsoft",
    "O": "allenai",
    "SmolLM": "HuggingFaceTB",
    "Seed": "ByteDance-Seed",
    "DeepSeek": "deepseek-ai",
    "GLM": "zai-org",
    "Nemotron": "nvidia",
    "Mi": "mistralai",
    "Devstral": "mistralai",
    "ERNIE": "baidu",
    "LFM": "LiquidAI",
    "Kimi": "moonshotai",
    "gpt-oss": "openai",
}
HUB_NAMES = {
    "Llama-4-Scout-17B-16E": "Llama-4-Scout-17B-16E-Instruct",
    "Qwen3-Coder-30B-A3B": "Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Coder-480B-A35B": "Qwen3-Coder-480B-A35B-Instruct",
    "Qwen3-Next-80B-A3B": "Qwen3-Next-80B-A3B-Instruct",
    "Nemotron-3-Nano-30B-A3B": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Mixtral-8x7B-Instruct": "Mixtral-8x7B-Instruct-v0.1",
    "ERNIE-4.5-21B-A3B": "ERNIE-4.5-21B-A3B-PT",
    "Kimi-Linear-48B-A3B": "Kimi-Linear-48B-A3B-Instruct",
    "OLMoE-1B-7B": "OLMoE-1B-7B-0924",
    "Devstral-2-123B": "Devstral-2-123B-Instruct-2512",
}
VOCABULARIES = {  # by how names begin, where they are not the defaults of the class
    "Qwen2.5": 152064,
    "DeepSeek-R1-Distill-Qwen": 152064,
    "DeepSeek-R1-Distill-Llama": 128256,
    "Llama-3": 128256,
    "phi-4": 100352,
    "Olmo-3": 100278,
    "Kimi-K2": 163840,
    "MiniMax-M2": 200064,
    "Devstral-2": 131072,
}
# in billions, as their publishers count them; `tests/model/test_coverage_page.py` compares the
# sizes
PARAMETERS = {
    "Qwen3-8B": 8.2,
    "Qwen3-32B": 32.8,
    "Qwen2.5-7B-Instruct": 7.6,
    "Qwen2.5-72B-Instruct": 72.7,
    "Qwen3.5-27B": 27,
    "Qwen3.6-27B": 27,
    "Qwen3.8-27B": 27,
    "Llama-3.1-8B-Instruct": 8.0,
    "Llama-3.3-70B-Instruct": 70.6,
    "gemma-3-27b-it": 27.4,
    "phi-4": 14.7,
    "Olmo-3-7B-Instruct": 7.3,
    "Olmo-3-32B-Think": 32.2,
    "SmolLM3-3B": 3.1,
    "Seed-OSS-36B-Instruct": 36.2,
    "DeepSeek-R1-Distill-Qwen-32B": 32.8,
    "DeepSeek-R1-Distill-Llama-70B": 70.6,
    "Qwen3-8B-FP8": 8.2,
    "Devstral-2-123B": 123,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Mixtral-8x7B-Instruct": 46.7,
    "OLMoE-1B-7B": 6.9,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-Coder-30B-A3B": 30.5,
    "Qwen3-30B-A3B-FP8": 30.5,
    "ERNIE-4.5-21B-A3B": 21.8,
    "GLM-4.7-Flash": 30,
    "Qwen3.5-35B-A3B": 35,
    "Qwen3-235B-A22B": 235,
    "Llama-4-Scout-17B-16E": 109,
    "GLM-4.5-Air": 106,
    "GLM-4.6": 355,
    "GLM-4.7": 355,
    "DeepSeek-V3": 671,
    "DeepSeek-R1": 671,
    "DeepSeek-V3.1": 671,
    "DeepSeek-V4-Flash": 284,
    "Qwen3-Coder-480B-A35B": 480,
    "Qwen3-Next-80B-A3B": 80,
    "Nemotron-3-Nano-30B-A3B": 31.6,
}
# how far the count of a checkpoint's sizes may be from its publisher's, which is rounded
NEAR = 0.02


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint.

    Attributes:
        name: its usual name.
        model_type: the type in its `config.json`, or the one that makes it stream, as `needs` says.
        form: how its weights are published: a key of `FORMS`.
        sizes: settings of the part that reads text. Empty: the defaults of its config's class.
            None: the sizes are not known, and no bytes are computed.
        needs: what a user must do first.
    """

    name: str
    model_type: str
    form: str = "bf16"
    sizes: Mapping[str, Any] | None = field(default=None, hash=False)
    needs: str = ""

    @property
    def hub_id(self) -> str:
        """Its name on the hub."""
        owner = next(owner for start, owner in OWNERS.items() if self.name.startswith(start))
        return f"{owner}/{HUB_NAMES.get(self.name, self.name)}"


def dense(
    hidden: int, layers: int, wide: int, heads: int, shared: int, width: int = 128
) -> dict[str, Any]:
    """The settings of a model without experts."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": width,
        "layer_types": None,
    }


def moe(
    hidden: int, layers: int, wide: int, experts: int, heads: int, shared: int, **overrides: Any
) -> dict[str, Any]:
    """The settings of a model with experts."""
    settings = dense(hidden, layers, wide, heads, shared) | {
        "moe_intermediate_size": wide,
        "num_experts": experts,
    }
    return settings | overrides


LLAMA_70B = dense(8192, 80, 28672, 64, 8)
GLM_4_6 = moe(
    5120,
    92,
    1536,
    160,
    96,
    8,
    n_routed_experts=160,
    intermediate_size=12288,
    first_k_dense_replace=3,
) | {
    "attention_bias": True,
    "use_qk_norm": True,
}
KIMI_K2 = {
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "first_k_dense_replace": 1,
}
# of layers, as config.json writes their order
_KINDS = {
    "M": "linear_attention",
    "E": "moe",
    "*": "full_attention",
}
NEMOTRON_3_NANO = {
    "hidden_size": 2688,
    "layers_block_type": [
        _KINDS[letter] for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    ],
    "intermediate_size": 1856,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
QWEN3_5_27B = dense(5120, 64, 17408, 24, 4, 256) | {"linear_num_value_heads": 48}
TYPE_OF_K2 = (
    'model_type "deepseek_v3" in its config.json, because transformers has no type "kimi_k2"'
)
CHECKPOINTS = (
    Checkpoint("Qwen3-8B", "qwen3", sizes=dense(4096, 36, 12288, 32, 8)),
    Checkpoint("Qwen3-32B", "qwen3", sizes=dense(5120, 64, 25600, 64, 8)),
    Checkpoint("Qwen2.5-7B-Instruct", "qwen2", sizes=dense(3584, 28, 18944, 28, 4)),
    Checkpoint("Qwen2.5-72B-Instruct", "qwen2", sizes=dense(8192, 80, 29568, 64, 8)),
    Checkpoint("Qwen3.5-27B", "qwen3_5", sizes=QWEN3_5_27B),
    Checkpoint("Qwen3.6-27B", "qwen3_5", sizes=QWEN3_5_27B),
    Checkpoint("Qwen3.8-27B", "qwen3_5", sizes=QWEN3_5_27B),
    Checkpoint("Llama-3.1-8B-Instruct", "llama", sizes=dense(4096, 32, 14336, 32, 8)),
    Checkpoint("Llama-3.3-70B-Instruct", "llama", sizes=LLAMA_70B),
    Checkpoint("gemma-3-27b-it", "gemma3", sizes=dense(5376, 62, 21504, 32, 16)),
    Checkpoint("gemma-4-31B-it", "gemma4"),
    Checkpoint("phi-4", "phi3", sizes=dense(5120, 40, 17920, 40, 10)),
    Checkpoint("Olmo-3-7B-Instruct", "olmo3", sizes=dense(4096, 32, 11008, 32, 32)),
    Checkpoint("Olmo-3-32B-Think", "olmo3", sizes=dense(5120, 64, 27648, 40, 8)),
    Checkpoint("SmolLM3-3B", "smollm3", sizes=dense(2048, 36, 11008, 16, 4)),
    Checkpoint("Seed-OSS-36B-Instruct", "seed_oss", sizes=dense(5120, 64, 27648, 80, 8)),
    Checkpoint("DeepSeek-R1-Distill-Qwen-32B", "qwen2", sizes=dense(5120, 64, 27648, 40, 8)),
    Checkpoint("DeepSeek-R1-Distill-Llama-70B", "llama", sizes=LLAMA_70B),
    Checkpoint("Qwen3.5-35B-A3B", "qwen3_5_moe", "bf16, experts fused", {}),
    Checkpoint("Qwen3.6-35B-A3B", "qwen3_5_moe", "bf16, experts fused"),
    Checkpoint("Qwen3.5-122B-A10B", "qwen3_5_moe", "bf16, experts fused"),
    Checkpoint("Qwen3.5-397B-A17B", "qwen3_5_moe", "bf16, experts fused"),
    Checkpoint("gemma-4-26B-A4B-it", "gemma4"),
    Checkpoint("Llama-4-Scout-17B-16E", "llama4", sizes={}),
    Checkpoint("Qwen3-30B-A3B", "qwen3_moe", sizes=moe(2048, 48, 768, 128, 32, 4)),
    Checkpoint("Qwen3-235B-A22B", "qwen3_moe", sizes=moe(4096, 94, 1536, 128, 64, 4)),
    Checkpoint("Qwen3-Coder-30B-A3B", "qwen3_moe", sizes=moe(2048, 48, 768, 128, 32, 4)),
    Checkpoint("Qwen3-Coder-480B-A35B", "qwen3_moe", sizes=moe(6144, 62, 2560, 160, 96, 8)),
    Checkpoint("Qwen3-Next-80B-A3B", "qwen3_next", sizes={}),
    Checkpoint("GLM-4.5-Air", "glm4_moe", sizes={"head_dim": 128, "attention_bias": True}),
    Checkpoint("GLM-4.6", "glm4_moe", sizes=GLM_4_6),
    Checkpoint("GLM-4.7", "glm4_moe", sizes=GLM_4_6),
    Checkpoint("GLM-4.7-Flash", "glm4_moe_lite", sizes={}),
    Checkpoint("GLM-5", "glm_moe_dsa", sizes={}),
    Checkpoint("GLM-5.1", "glm_moe_dsa", sizes={}),
    Checkpoint("GLM-5.2", "glm_moe_dsa", sizes={}),
    Checkpoint("Nemotron-3-Nano-30B-A3B", "nemotron_h", sizes=NEMOTRON_3_NANO),
    Checkpoint("Mixtral-8x7B-Instruct", "mixtral", sizes={}),
    Checkpoint("ERNIE-4.5-21B-A3B", "ernie4_5_moe", sizes={}),
    Checkpoint("MiniMax-M3", "minimax_m3_vl", sizes={}),
    Checkpoint("LFM2-8B-A1B", "lfm2_moe"),
    Checkpoint("Kimi-Linear-48B-A3B", "kimi_linear", sizes={}),
    Checkpoint("OLMoE-1B-7B", "olmoe", sizes={"intermediate_size": 1024}),
    Checkpoint("Qwen3-8B-FP8", "qwen3", "fp8 in blocks", dense(4096, 36, 12288, 32, 8)),
    Checkpoint("Qwen3-30B-A3B-FP8", "qwen3_moe", "fp8 in blocks", moe(2048, 48, 768, 128, 32, 4)),
    Checkpoint("DeepSeek-V3", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-R1", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-V3.1", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-V3.2", "deepseek_v32", "fp8 in blocks", {}),
    Checkpoint("Kimi-K2-Instruct", "deepseek_v3", "fp8 in blocks", KIMI_K2, TYPE_OF_K2),
    Checkpoint(
        "MiniMax-M2",
        "minimax_m2",
        "fp8 in blocks",
        moe(3072, 62, 1536, 256, 48, 8, num_local_experts=256),
    ),
    Checkpoint("MiMo-V2-Flash", "mimo_v2_flash", "fp8 in blocks", {}),
    Checkpoint("GLM-5.3", "glm_moe_dsa", "fp8 in blocks"),
    Checkpoint("GLM-5.3-Flash", "glm5_next", "fp8 in blocks", {}),
    Checkpoint("Mistral-Medium-3.5-128B", "mistral3", "fp8 per tensor"),
    Checkpoint("Devstral-2-123B", "ministral3", "fp8 per tensor", dense(12288, 88, 28672, 96, 8)),
    Checkpoint("DeepSeek-V4-Flash", "deepseek_v4", "fp4 experts, fp8", {}),
    Checkpoint("DeepSeek-V4-Pro", "deepseek_v4", "fp4 experts, fp8"),
    Checkpoint(
        "gpt-oss-20b",
        "gpt_oss",
        "mxfp4",
        {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None},
    ),
    Checkpoint("gpt-oss-120b", "gpt_oss", "mxfp4", {}),
    Checkpoint("Kimi-K2-Thinking", "deepseek_v3", "int4 experts", KIMI_K2, TYPE_OF_K2),
    Checkpoint("Kimi-K2.5", "kimi_k25", "int4 experts", KIMI_K2),
    Checkpoint("Kimi-K2.6", "kimi_k25", "int4 experts", KIMI_K2),
    Checkpoint("Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2", "gptq", dense(3584, 28, 18944, 28, 4)),
    Checkpoint("Qwen3-30B-A3B-GPTQ-Int4", "qwen3_moe", "gptq", moe(2048, 48, 768, 128, 32, 4)),
    Checkpoint("Qwen2.5-72B-Instruct-AWQ", "qwen2", "awq", dense(8192, 80, 29568, 64, 8)),
    Checkpoint("Qwen3-32B-AWQ", "qwen3", "awq", dense(5120, 64, 25600, 64, 8)),
    Checkpoint("Qwen3.8-Flash-Next", "qwen4_exp"),
    Checkpoint("Kimi-K3", "kimi_k3", "mxfp4"),
)


def named(name: str) -> Checkpoint | None:
    """Return the checkpoint with this name or hub id, in upper or lower case; None: it is not
    known.
    """
    lowered = name.lower()
    return next(
        (
            checkpoint
            for checkpoint in CHECKPOINTS
            if lowered in (checkpoint.name.lower(), checkpoint.hub_id.lower())
        ),
        None,
    )


def config_of(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the config of a checkpoint with known sizes; `KeyError`: `transformers` has no such
    type.
    """
    kind = CONFIG_MAPPING[checkpoint.model_type]
    default = kind()
    text = default.get_text_config()
    words = next(
        (size for start, size in VOCABULARIES.items() if checkpoint.name.startswith(start)),
        text.vocab_size,
    )
    sizes = {**(checkpoint.sizes or {}), "vocab_size": words}
    # Some classes, such as Qwen3Moe and Glm4Moe, read `head_dim` from config.json without declaring
    # it.
    text_sizes = {
        name: size for name, size in sizes.items() if name == "head_dim" or hasattr(text, name)
    }
    arguments = text_sizes if text is default else {"text_config": text.to_dict() | text_sizes}
    config: PreTrainedConfig = kind(**arguments)
    return config
