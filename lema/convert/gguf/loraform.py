"""An adapter as llama.cpp's converter reads it: PEFT's format, by the names of published files,
with one alpha for all modules.

The converter reads one `lora_alpha`, and llama.cpp multiplies what a pair of factors adds by it and
divides by their rank. Where a module's scale is another, as with rsLoRA or `alpha_pattern`, the
second factor is multiplied by what is missing, so that the product is what was trained.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from lema.convert.serving.export import export_adapter
from lema.errors import ConfigError
from lema.lora.files import CONFIG, WEIGHTS
from lema.lora.serving.servers import Server, unserved
from lema.lora.shards import PREFIX

__all__ = ["LLAMA_CPP", "check_taken", "write_lora"]

LLAMA_CPP = Server(
    "llama.cpp",
    "of llama-cpp-python 0.3.36",
    "2026-11",
    ("convert_lora_to_gguf.py", "src/llama-adapter.cpp"),
)
SECOND = ".lora_B.weight"


def check_taken(config: LoraConfig, modules: list[str]) -> None:
    """Make sure that llama.cpp takes an adapter.

    Args:
        config: PEFT's of the adapter.
        modules: the names of the adapted modules.

    Raises:
        ConfigError: it does not; all that it does not take is named.
    """
    if problems := list(unserved(LLAMA_CPP, config, modules)):
        what = f"an adapter in GGUF cannot have {'; '.join(problems)}"
        how = "leave out --adapter: the merged model has all that was trained"
        raise ConfigError(what, where="--adapter", how=how)


def write_lora(
    adapter_dir: str | os.PathLike[str],
    out: Path,
    *,
    base_dir: str | os.PathLike[str] | None,
    trust_remote_code: bool,
    note: Callable[[str], object],
) -> None:
    """Write an adapter for the converter.

    Args:
        adapter_dir: a saved adapter.
        out: a new directory.
        base_dir: where its base is by now; None: where the adapter says.
        trust_remote_code: whether code beside the base may run.
        note: takes a sentence on what was found.

    Raises:
        ConfigError, AdapterError, DiskError: those of `export_adapter`.
    """
    export_adapter(
        adapter_dir,
        out,
        "per-expert",
        base_dir=base_dir,
        trust_remote_code=trust_remote_code,
        note=note,
    )
    config: dict[str, Any] = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(out / WEIGHTS)
    alpha = with_one_alpha(tensors, config)
    changed = {"lora_alpha": alpha, "alpha_pattern": {}, "use_rslora": False}
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    text = json.dumps(config | changed, indent=2) + "\n"
    (out / CONFIG).write_text(text, encoding="utf-8", newline="\n")


def with_one_alpha(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> float:
    """Multiply second factors so that all modules have the scale `alpha / rank` with one alpha, and
    return that: the one of the first module.

    Args:
        tensors: factors by PEFT's names, `[rank, in]` and `[out, rank]`; changed in place.
        config: of the adapter, as JSON.
    """
    alpha: float | None = None
    for name in sorted(tensors):
        if not name.endswith(SECOND):
            continue
        rank = tensors[name].shape[1]
        module = name.removeprefix(PREFIX).removesuffix(SECOND)
        module_alpha = _pattern(config["alpha_pattern"], module, config["lora_alpha"])
        scale = module_alpha / (rank**0.5 if config["use_rslora"] else rank)
        alpha = scale * rank if alpha is None else alpha
        factor = scale * rank / alpha if alpha else 1.0
        if abs(factor - 1) > 1e-12:
            tensors[name] = tensors[name] * factor
    return float(config["lora_alpha"]) if alpha is None else alpha


def _pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    return next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)),
        default,
    )
