"""What servers take of an adapter, read in the sources of one release of each.

A server that does not know a part of an adapter drops it in silence, refuses it at the first
request, or computes something else. So what it does not take is said here, before training
(`lora_serving`) and when an adapter is exported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from peft import LoraConfig

__all__ = ["SERVERS", "Server", "ServerName", "not_factors", "unserved"]

ServerName = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Server:
    """One release of a server."""

    title: str
    release: str
    date: str  # on which its files were built
    sources: tuple[str, ...]
    ranks: tuple[int, ...] = ()  # of which the smallest that is large enough is chosen; empty: any
    has_patterns: bool = True  # modules may have ranks and scales of their own
    has_routers: bool = True  # the matrix that chooses experts may have an adapter
    # Modules that it reads only beside another of the same owner.
    partners: Mapping[str, str] = field(default_factory=dict)
    # Classes whose experts it has in one tensor for all, and reads as PEFT writes them.
    stacked: frozenset[str] = field(default_factory=frozenset)
    # Classes for which it takes no adapter.
    without_adapters: frozenset[str] = field(default_factory=frozenset)
    # Classes that it runs by the code of `transformers`, for which it reads no adapter of experts.
    without_experts: frozenset[str] = field(default_factory=frozenset)
    # Modules of classes of which it makes something else, and what.
    misread: Mapping[str, tuple[frozenset[str], str]] = field(default_factory=dict)


ANOTHER_ORDER = (frozenset({"k_proj", "q_proj"}), "whose rows it has in another order")
SERVERS: dict[ServerName, Server] = {
    "vllm": Server(
        "vLLM",
        "0.32.0",
        "2026-10-20",
        (
            "vllm/config/lora.py",
            "vllm/lora/peft_helper.py",
            "vllm/lora/lora_model.py",
            "vllm/lora/model_manager.py",
        ),
        ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        stacked=frozenset(
            {
                "GptOssForCausalLM",
                "InternS1ProForConditionalGeneration",
                "Qwen3OmniMoeForConditionalGeneration",
                "Qwen3VLMoeForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            }
        ),
        without_adapters=frozenset(
            {
                "AriaForConditionalGeneration",
                "BloomForCausalLM",
                "Cohere2MoeForCausalLM",
                "Cohere2VisionForConditionalGeneration",
                "Cosmos3EdgeForConditionalGeneration",
                "DbrxForCausalLM",
                "DeepseekV4ForCausalLM",
                "FalconForCausalLM",
                "FalconMambaForCausalLM",
                "GPT2LMHeadModel",
                "GPTJForCausalLM",
                "Gemma3nForCausalLM",
                "KimiLinearForCausalLM",
                "LlavaOnevisionForConditionalGeneration",
                "Mamba2ForCausalLM",
                "MambaForCausalLM",
                "MiMoV2FlashForCausalLM",
                "MiniMaxM3SparseForConditionalGeneration",
                "PaddleOCRVLForConditionalGeneration",
                "StableLmForCausalLM",
                "Step3p7ForConditionalGeneration",
                "Zamba2ForCausalLM",
            }
        ),
        without_experts=frozenset(
            {
                "AXK2ForCausalLM",
                "Dots1ForCausalLM",
                "FlexOlmoForCausalLM",
                "HunYuanMoEV1ForCausalLM",
                "MellumForCausalLM",
                "MiniMaxForCausalLM",
                "Mistral4ForCausalLM",
                "PhimoeForCausalLM",
                "SolarOpenForCausalLM",
                "ZayaForCausalLM",
            }
        ),
        misread={
            "GPTBigCodeForCausalLM": (frozenset({"c_attn"}), "which it leaves out"),
            "Glm4ForCausalLM": (frozenset({"gate_up_proj"}), "which it knows as two modules"),
            "Llama4ForCausalLM": ANOTHER_ORDER,
            "Llama4ForConditionalGeneration": ANOTHER_ORDER,
            "Phi4MultimodalForCausalLM": (
                frozenset({"qkv_proj"}),
                "which it knows as three modules",
            ),
        },
    ),
    "sglang": Server(
        "SGLang",
        "0.5.23",
        "2026-10-30",
        (
            "sglang/srt/lora/lora_config.py",
            "sglang/srt/lora/lora.py",
            "sglang/srt/lora/lora_manager.py",
            "sglang/srt/lora/mem_pool.py",
        ),
        has_patterns=False,
        has_routers=False,
        partners={"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj"},
    ),
}
# Ways to begin that change the base's weights; an adapter alone is not what was trained.
CHANGES_BASE = ("corda", "loftq", "olora", "pissa")


def not_factors(config: LoraConfig) -> Iterator[str]:
    """Yield what an adapter trains that is no product of two factors, each a part of a sentence.

    Args:
        config: PEFT's of the adapter.
    """
    if config.use_dora:
        yield "DoRA (lora_use_dora)"
    if config.lora_bias:
        yield "biases of B (lora_lora_bias)"
    if config.bias != "none":
        yield f"trained biases (lora_bias: {config.bias})"
    if config.modules_to_save:
        names = ", ".join(sorted(config.modules_to_save))
        yield f"modules that train whole (lora_modules_to_save: {names})"
    if config.trainable_token_indices:
        yield "trained rows of embeddings (lora_trainable_token_indices)"
    if config.layer_replication:
        yield "repeated layers"


def unserved(server: Server, config: LoraConfig, modules: Collection[str]) -> Iterator[str]:
    """Yield what a server does not take of an adapter, each a part of a sentence.

    Args:
        server: the release.
        config: PEFT's of the adapter.
        modules: the names of the adapted modules.
    """
    yield from not_factors(config)
    begin = config.init_lora_weights
    if isinstance(begin, str) and begin.lower().startswith(CHANGES_BASE):
        yield f"a beginning that changes the base's weights (lora_init: {begin})"
    leaves = {name.rpartition(".")[2] for name in modules}
    outer = sorted(leaves & {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"})
    if outer:
        yield f"adapters of embeddings and the head ({', '.join(outer)})"
    yield from _alone(server, modules)
    ranks = {config.r, *(config.rank_pattern or {}).values()}
    if server.ranks and max(ranks) > server.ranks[-1]:
        yield f"a rank of {max(ranks)}, of at most {server.ranks[-1]}"
    if not server.has_patterns:
        if config.rank_pattern or config.alpha_pattern:
            yield "ranks and scales by module (lora_rank_pattern, lora_alpha_pattern)"
        if config.use_rslora:
            yield "rsLoRA's scale (lora_use_rslora)"


def _alone(server: Server, modules: Collection[str]) -> Iterator[str]:
    """Yield the first module without the one beside which the server reads it."""
    names = set(modules)
    for name in sorted(names):
        owner, dot, leaf = name.rpartition(".")
        partner = server.partners.get(leaf)
        if partner is not None and f"{owner}{dot}{partner}" not in names:
            yield f"an adapter of {leaf} without {partner} ({name})"
            return
