"""SGLang's own reader of adapters, without the rest of SGLang.

SGLang as it is published imports CUDA's libraries when it is imported, so it is installed without
what it needs, and its module of adapters is read alone: empty modules stand for those of its
imports that its reader does not call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

__all__ = ["read_by_sglang"]

PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.layers",
    "sglang.srt.lora",
    "sglang.srt.lora.backend",
    "sglang.srt.utils",
    "sglang.srt.model_executor",
    "sglang.srt.model_loader",
    "sglang.srt.configs",
)
NOT_CALLED = (
    "sglang.srt.configs.load_config",
    "sglang.srt.lora.backend.base_backend",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.model_loader.loader",
    "sglang.srt.utils.hf_transformers_utils",
)


@contextmanager
def _alone() -> Iterator[None]:
    """Have SGLang's packages without what they import."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES:
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            patch.setitem(sys.modules, name, package)
        for name in NOT_CALLED:
            patch.setitem(sys.modules, name, MagicMock())
        for name in ("lora", "lora_config", "utils"):
            patch.delitem(sys.modules, f"sglang.srt.lora.{name}", raising=False)
        yield


def read_by_sglang(model: Path, adapter: Path) -> tuple[dict[str, Tensor], float]:
    """Return what SGLang's reader makes of an adapter.

    Args:
        model: a directory of the base.
        adapter: an exported adapter.

    Returns:
        Its tensors by the names that SGLang gives them, where matrices of one product are stacked
        along their rows; and the scale of all products.
    """
    with _alone():
        from sglang.srt.lora.lora import LoRAAdapter
        from sglang.srt.lora.lora_config import LoRAConfig

        config: Any = AutoConfig.from_pretrained(model)
        reader = LoRAAdapter(
            "exported", LoRAConfig(str(adapter)), config.get_text_config(), MagicMock(), MagicMock()
        )
        reader.initialize_weights_from_tensors(load_file(adapter / "adapter_model.safetensors"))
    tensors = {name: tensor for layer in reader.layers for name, tensor in layer.weights.items()}
    return tensors, reader.scaling
