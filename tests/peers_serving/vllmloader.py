"""vLLM's own loaders of models and of adapters, in this process, without a server.

vLLM multiplies the adapters of experts with kernels of Triton, which has no CPU, so no server on a
CPU takes such an adapter: making the layer fails for want of a kernel. Everything before the
kernel is vLLM's here: the file is read, names are mapped, experts are stacked, and the layer's
tensors are filled. Only what the layer asks of its kernel is left out.

Images need torchvision, which this environment has not. An empty module stands for it while a
model's class is imported, and nothing of it is called.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_lora

__all__ = ["added", "loading", "registry", "supports_lora", "weights"]


class _Empty(ModuleType):
    """A module with every name."""

    __path__: list[str] = []  # noqa: RUF012  # a package has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Stand(MetaPathFinder, Loader):
    """Finds an empty module for torchvision and all below it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "torchvision":
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _without_kernel(self: Any, base_layer: Any) -> None:
    """What the constructor of vLLM's layer does, but for its kernel."""
    BaseLayerWithLoRA.__init__(self)
    self.base_layer = base_layer
    self.moe_config = base_layer.moe_config
    self._shared_experts = base_layer._shared_experts
    self.tp_size = 1
    self.tp_rank = 0
    self.device = torch.device("cpu")
    self._enable_aux_cuda_stream = False
    self._init_lora_stream_context()
    self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
    self.enable_moe_shared_loras = False
    self.n_slices = self.local_num_experts * (self._w13_slices + 1)


@contextmanager
def loading(rendezvous: Path) -> Iterator[None]:
    """Have vLLM load in this process while the block runs.

    Args:
        rendezvous: a file that does not exist, by which its one process finds itself.
    """
    stand = _Stand()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedMoEWithLoRA, "__init__", _without_kernel)
        patch.setattr(FusedMoEWithLoRA, "set_mapping", BaseLayerWithLoRA.set_mapping)
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        patch.setattr(sys, "meta_path", [*sys.meta_path, stand])
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _opened(directory: Path) -> tuple[Any, Any]:
    """Return vLLM's settings of a model, and its model with the weights, which are as they are in
    memory before any kernel arranges them anew."""
    arguments = EngineArgs(
        model=str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        enable_lora=True,
        max_lora_rank=16,
        skip_tokenizer_init=True,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.destroy_model_parallel()  # which a model without experts makes without theirs
        parallel_state.initialize_model_parallel(1, 1)
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return config, model


def weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of a model by vLLM's names."""
    _, model = _opened(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def added(directory: Path, adapter: Path) -> dict[str, Tensor]:
    """Return what an adapter adds to each weight that may have one: the products of the layers'
    tensors after vLLM has put the adapter into them.

    Args:
        directory: of the model.
        adapter: an exported adapter.

    Returns:
        By vLLM's names of weights, tensors of their shapes.
    """
    config, model = _opened(directory)
    modules = getattr(model, "embedding_modules", {})
    worker = WorkerLoRAManager(config, torch.device("cpu"), modules)
    with set_current_vllm_config(config):
        worker.create_lora_manager(model, config)
    assert worker.add_adapter(LoRARequest("exported", 1, str(adapter)))
    manager = worker._adapter_manager
    products = dict[str, Tensor]()
    for name, layer in manager.modules.items():
        if isinstance(layer, FusedMoEWithLoRA):
            for weight in ("w13", "w2"):
                pairs = zip(
                    getattr(layer, f"{weight}_lora_a_stacked"),
                    getattr(layer, f"{weight}_lora_b_stacked"),
                    strict=True,
                )
                whole = torch.cat([b[0] @ a[0] for a, b in pairs], dim=1)
                products[f"{name}.routed_experts.{weight}_weight"] = whole
        elif isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            pairs = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            products[f"{name}.weight"] = torch.cat([b[0, 0] @ a[0, 0] for a, b in pairs])
    return products
