"""Adapters: attached and drawn as PEFT does, saved in PEFT's files, merged, and divided among
processes.

docs/internals/full-training.md describes how whatever trains becomes real, and
docs/internals/processes.md the shards.
"""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.lora.attach import count_lora_params, inject_lora_params, param_filter
    from lema.lora.files import save_adapter
    from lema.lora.merge import merge_lora_params

__all__ = [
    "count_lora_params",
    "inject_lora_params",
    "merge_lora_params",
    "param_filter",
    "save_adapter",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(("count_lora_params", "inject_lora_params", "param_filter"), "attach")
    | {"merge_lora_params": "merge", "save_adapter": "files"},
)
