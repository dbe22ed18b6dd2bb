"""Makes docs/coverage.md: what becomes of named public checkpoints, tried on tiny models in their published layout.

    PYTHONPATH=.:backends python tests/support/coveragepage.py > docs/coverage.md

Nothing is downloaded. A checkpoint is its model type, its published form and, where they are known, its sizes. A tiny
model of the type is written in that form and opened: names, dtypes and scales are mapped, and the model is run up to
its layers and from them to its logits. Bytes are those of the tiny model's tensors, by their names, for the real sizes.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from publishedforms import write_published
from tinyconfig import tiny_config
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from lema.errors import LemaError
from lema.model import meta_model, read_config
from lema.model.skeleton import find_layers
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex
from lema.storage.slices import AssembledRecord
from lema_tools.survey.attempt import try_model

__all__ = ["CHECKPOINTS", "Checkpoint", "Found", "page", "try_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint.

    Attributes:
        name: as people call it.
        model_type: of its `config.json`, or the one that makes it stream, as `needs` says.
        form: how its weights are published: a key of `FORMS`.
        sizes: settings of the part that reads text; empty: those that the class of its config has by default; None:
            not known here, and no bytes are told.
        needs: what must be done first.
    """

    name: str
    model_type: str
    form: str = "bf16"
    sizes: Mapping[str, Any] | None = field(default=None, hash=False)
    needs: str = ""


@dataclass(frozen=True)
class Found:
    """What becomes of it: `refused` says why it does not stream, `how` what is done to what is read."""

    refused: str = ""
    how: str = ""
    wire: float = 0.0
    slot: float = 0.0


def dense(hidden: int, layers: int, wide: int, heads: int, shared: int, width: int = 128) -> dict[str, Any]:
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


def moe(hidden: int, layers: int, wide: int, experts: int, heads: int, shared: int, **others: Any) -> dict[str, Any]:
    """The settings of a model with experts."""
    made = dense(hidden, layers, wide, heads, shared) | {"moe_intermediate_size": wide, "num_experts": experts}
    return made | others


LLAMA_70B = dense(8192, 80, 28672, 64, 8)
GLM_4_6 = moe(5120, 92, 1536, 160, 96, 8, n_routed_experts=160, intermediate_size=12288, first_k_dense_replace=3)
KIMI_K2 = {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1}
TYPE_OF_K2 = 'model_type "deepseek_v3" in its config.json, for transformers has none called "kimi_k2"'
CHECKPOINTS = (
    Checkpoint("Qwen3-8B", "qwen3", sizes=dense(4096, 36, 12288, 32, 8)),
    Checkpoint("Qwen3-32B", "qwen3", sizes=dense(5120, 64, 25600, 64, 8)),
    Checkpoint("Qwen2.5-7B-Instruct", "qwen2", sizes=dense(3584, 28, 18944, 28, 4)),
    Checkpoint("Qwen2.5-72B-Instruct", "qwen2", sizes=dense(8192, 80, 29568, 64, 8)),
    Checkpoint("Qwen3.5-27B", "qwen3_5", sizes={}),
    Checkpoint("Qwen3.6-27B", "qwen3_5"),
    Checkpoint("Qwen3.8-27B", "qwen3_5"),
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
    Checkpoint("GLM-4.5-Air", "glm4_moe", sizes={}),
    Checkpoint("GLM-4.6", "glm4_moe", sizes=GLM_4_6),
    Checkpoint("GLM-4.7", "glm4_moe", sizes=GLM_4_6),
    Checkpoint("GLM-4.7-Flash", "glm4_moe_lite", sizes={}),
    Checkpoint("GLM-5", "glm_moe_dsa", sizes={}),
    Checkpoint("GLM-5.1", "glm_moe_dsa", sizes={}),
    Checkpoint("GLM-5.2", "glm_moe_dsa", sizes={}),
    Checkpoint("Nemotron-3-Nano-30B-A3B", "nemotron_h", sizes={}),
    Checkpoint("Mixtral-8x7B-Instruct", "mixtral", sizes={}),
    Checkpoint("ERNIE-4.5-21B-A3B", "ernie4_5_moe", sizes={}),
    Checkpoint("MiniMax-M3", "minimax_m3_vl", sizes={}),
    Checkpoint("LFM2-8B-A1B", "lfm2_moe"),
    Checkpoint("Kimi-Linear-48B-A3B", "kimi_linear", sizes={}),
    Checkpoint("OLMoE-1B-7B", "olmoe", sizes={}),
    Checkpoint("Qwen3-8B-FP8", "qwen3", "fp8 in blocks", dense(4096, 36, 12288, 32, 8)),
    Checkpoint("Qwen3-30B-A3B-FP8", "qwen3_moe", "fp8 in blocks", moe(2048, 48, 768, 128, 32, 4)),
    Checkpoint("DeepSeek-V3", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-R1", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-V3.1", "deepseek_v3", "fp8 in blocks", {}),
    Checkpoint("DeepSeek-V3.2", "deepseek_v32", "fp8 in blocks", {}),
    Checkpoint("Kimi-K2-Instruct", "deepseek_v3", "fp8 in blocks", KIMI_K2, TYPE_OF_K2),
    Checkpoint("MiniMax-M2", "minimax_m2", "fp8 in blocks", moe(3072, 62, 1536, 256, 48, 8, num_local_experts=256)),
    Checkpoint("MiMo-V2-Flash", "mimo_v2_flash", "fp8 in blocks", {}),
    Checkpoint("GLM-5.3", "glm_moe_dsa", "fp8 in blocks"),
    Checkpoint("GLM-5.3-Flash", "glm5_next", "fp8 in blocks", {}),
    Checkpoint("Mistral-Medium-3.5-128B", "mistral3", "fp8 per tensor"),
    Checkpoint("Devstral-2-123B", "ministral3", "fp8 per tensor", dense(12288, 88, 28672, 96, 8)),
    Checkpoint("DeepSeek-V4-Flash", "deepseek_v4", "fp4 experts, fp8", {}),
    Checkpoint("DeepSeek-V4-Pro", "deepseek_v4", "fp4 experts, fp8"),
    Checkpoint(
        "gpt-oss-20b", "gpt_oss", "mxfp4", {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None}
    ),
    Checkpoint("gpt-oss-120b", "gpt_oss", "mxfp4", {}),
    Checkpoint("Kimi-K2-Thinking", "deepseek_v3", "int4 experts", KIMI_K2, TYPE_OF_K2),
    Checkpoint("Kimi-K2.5", "kimi_k25", "int4 experts", KIMI_K2),
    Checkpoint("Kimi-K2.6", "kimi_k25", "int4 experts", KIMI_K2),
    Checkpoint("Qwen3.8-Flash-Next", "qwen4_exp"),
    Checkpoint("Kimi-K3", "kimi_k3", "mxfp4"),
)


@cache
def _tried(model_type: str, form: str) -> tuple[str, str, dict[str, float]]:
    """Return why a tiny model is refused, what is done to what is read, and the bytes per element by kind of name."""
    if model_type not in CONFIG_MAPPING:
        return f"transformers {version('transformers')} has no type {model_type!r}", "", {}
    with tempfile.TemporaryDirectory() as directory:
        published = write_published(tiny_config(model_type), form, Path(directory))
        model = meta_model(read_config(published), torch.float32)
        try:
            names = map_names(model, GlobalBinaryIndex(published))
        except LemaError as error:
            return error.what.replace("\n", " ")[:200], "", {}
    stored = names.stored.items()
    widths = {_kind(name): record.nbytes / max(1, prod(record.shape)) for name, record in stored}
    row = try_model(model, model_type)
    assembled = any(isinstance(record, AssembledRecord) for _, record in stored)
    how = ", pieces put together as they are read" * assembled + ", expanded when it is leased" * bool(names.quantized)
    return row.reason if row.streams is False else "", how, widths


@cache  # the page and its test ask for each
def try_checkpoint(checkpoint: Checkpoint) -> Found:
    """Try a tiny model of a checkpoint, and count bytes for its sizes."""
    refused, how, widths = _tried(checkpoint.model_type, checkpoint.form)
    if refused or checkpoint.sizes is None:
        return Found(refused, how)
    default = CONFIG_MAPPING[checkpoint.model_type]()
    text = default.get_text_config()
    wanted = {name: size for name, size in checkpoint.sizes.items() if hasattr(text, name)}
    own = wanted if text is default else {"text_config": text.to_dict() | wanted}
    model = meta_model(CONFIG_MAPPING[checkpoint.model_type](**own), torch.bfloat16)
    name, layers = find_layers(model)
    counts, sizes = [], []
    for number, layer in enumerate(layers):
        inside = [(f"{name}.{number}.{own_name}", one.numel()) for own_name, one in layer.named_parameters()]
        counts.append(sum(count for _, count in inside))
        sizes.append(sum(count * widths.get(_kind(full), 2.0) for full, count in inside))
    return Found("", how, sum(sizes) / sum(counts), max(sizes) / 1e9)


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    rows = [(checkpoint, try_checkpoint(checkpoint)) for checkpoint in CHECKPOINTS]
    streaming = sum(not found.refused and not checkpoint.needs for checkpoint, found in rows)
    needing = sum(not found.refused and bool(checkpoint.needs) for checkpoint, found in rows)
    made_with = ", ".join(f"{package} {version(package).partition('+')[0]}" for package in ("transformers", "peft"))
    yield "# Published checkpoints"
    yield ""
    yield f"Made by `python tests/support/coveragepage.py > docs/coverage.md`, with {made_with}."
    yield ""
    yield from INTRODUCTION.splitlines()
    yield ""
    refused = len(rows) - streaming - needing
    yield f"{len(rows)} in all: {streaming} stream as published, {needing} need something first, {refused} are refused."
    yield ""
    yield "| checkpoint | model type | form | becomes | wire, bytes per parameter | largest slot, GB |"
    yield "|---|---|---|---|---|---|"
    for checkpoint, found in rows:
        answer = f"streams as published{found.how}"
        if checkpoint.needs:
            answer = f"needs {checkpoint.needs}"
        if found.refused:
            answer = f"refused: {found.refused}"
        sizes = (f"{found.wire:.2f}", f"{found.slot:.2f}") if found.wire else ("", "")
        cells = (checkpoint.name, f"`{checkpoint.model_type}`", checkpoint.form, answer, *sizes)
        yield f"| {' | '.join(cells)} |"


INTRODUCTION = """\
What was checked is a tiny model of the type in the published layout: `transformers` writes it under the names it reads,
the weights are quantised as the publisher's are, with their scales and `quantization_config`, and LEMA opens it, maps
every tensor, and runs the model up to its layers and from them to its logits. `tests/model/test_published_forms.py`
trains one model of each form for two steps: loss and gradients are bitwise those of PEFT on the weights that
`transformers` dequantises. No published file was read, and which linears a publisher left unquantised was not looked up
for each.

Bytes are those of the decoder layers, without embeddings and head: what a tensor of that name takes in the tiny model,
for the sizes of the checkpoint. Where no bytes are told, its sizes are not known here; where the class of its config
is documented with the checkpoint, the sizes are its defaults. The largest slot is the largest layer as it crosses to
the device; what is quantised takes its expanded size there as well while it is leased.

Not in the table, because no config of theirs is known here: DeepSeek-V4.1-Flash (a V4 with Engram tables) and
Mistral-Large-3. That Qwen3.8-Flash-Next is of the type it has here is told by the name of its table alone (95 GiB in
one layer, of which rows are read).
"""


def main() -> None:
    """Print the page."""
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = list(page())
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
