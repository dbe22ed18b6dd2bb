"""The settings that act on the machine: what they do, if a file says so that the user has not
written.

An adapter's `lema_config.json` has every setting of the run that made it. Most describe the
adapter, or how it was made. Those here open files, write, send away, fetch code or start programs,
or say what the machine of that run had; `lema.lora.consent` says when they may.
"""

from collections.abc import Mapping

from lema.config.lemaconfig import LemaConfig

__all__ = ["ACTING", "LIBRARY_ATTENTION", "OF_TRAINING", "SILENT", "acts"]

LIBRARY_ATTENTION = ("eager", "sdpa")
"""Attention that is code of `transformers` and torch alone; others may fetch kernels of the hub,
or compile.
"""

ACTING: Mapping[str, str] = {
    "gbi_path": "reads weights from any path",
    "attn_implementation": (
        "may fetch code from the hub and run it, or start a compiler, unless it is eager or sdpa"
    ),
    "train_data": "reads any path, walks directories, loads data sets of the hub and of addresses",
    "eval_data": "as train_data",
    "mixture": "names the data sets of train_data",
    "eval_prompts": "reads any path",
    "chat_template": "reads any path, unless it is the Jinja text itself",
    "adapter_name_or_path": "reads any path, or loads from the hub",
    "image_folder": "lets rows name images in any folder",
    "image_urls": "connects to any server that rows name",
    "data_cache": "writes to any path, unless it is true or false",
    "quantize_base_cache": "writes to any path",
    "tower_cache": "writes to any path, unless it is true or false",
    "output_dir": "writes to any path",
    "overwrite_output_dir": "replaces what is in output_dir",
    "offload_dir": "writes to any path",
    "report_to": "starts programs of others, and sends away what a run logs",
    "run_name": "names the run there",
    "push_to_hub": "sends the adapter away, in your name",
    "hub_model_id": "says where to",
    "hub_private_repo": "says who can read it",
    "torch_compile": "starts a compiler",
    "device": "needs a device that may not be here",
    "backend_settings": "are of that device",
    "tensor_parallel_size": "needs as many processes",
    "sequence_parallel": "needs several processes",
    "context_parallel_size": "needs as many processes",
    "shard_weights": "needs several processes",
    "shard_optimizer": "needs several processes",
    "strategy": "may take the memory of the whole model",
    "device_memory": "is another machine's memory",
    "host_memory": "is another machine's memory",
    "page_locked": "locks memory",
    "prefetch_depth": "takes memory",
    "experts_per_slot": "takes memory",
    "modalities": "takes the memory of towers",
    "towers": "says which memory is taken",
    "tower_cache_size": "takes disk",
    "embeddings": "says which memory is taken",
    "head": "says which memory is taken",
    "cache_frozen_prefix": "takes memory or disk",
    "activation_offloading": "takes memory",
    "boundary_activations": "says which memory is taken, or writes to disk",
}
"""The settings that act on the machine, each with what it does."""

OF_TRAINING = frozenset(
    {
        "train_data",
        "eval_data",
        "eval_prompts",
        "mixture",
        "data_cache",
        "image_folder",
        "image_urls",
        "adapter_name_or_path",
        "report_to",
    }
)
OF_TRAINING |= {
    "push_to_hub",
    "hub_model_id",
    "activation_offloading",
    "cache_frozen_prefix",
    "shard_optimizer",
}
"""Those that no command reads which neither trains nor evaluates."""

SILENT = frozenset(
    {"output_dir", "overwrite_output_dir", "run_name", "mixture", "hub_private_repo"}
)
"""Those that mean nothing where no run begins, or without another one: that they are ignored
needs no line.
"""


def acts(name: str, value: object) -> bool:
    """Whether a setting of this value does more than describe an adapter."""
    if name not in ACTING or value == LemaConfig.defaults()[name]:
        return False
    if value is None:  # asks for nothing, but that whole layers are leased
        return name == "experts_per_slot"
    if name == "attn_implementation":
        return value not in LIBRARY_ATTENTION
    if name == "chat_template":
        return not (isinstance(value, str) and ("{{" in value or "{%" in value))
    return name not in ("data_cache", "tower_cache") or not isinstance(value, bool)
