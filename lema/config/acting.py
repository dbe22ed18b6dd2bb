"""The settings that act on the machine: what they do, if a file says so that the user has not written.

An adapter's `lema_config.json` has every setting of the run that made it. Most describe the adapter, or how it was
made. Those here open files, write, send away, fetch code or start programs; `lema.lora.consent` says when they may.
"""

from collections.abc import Mapping
from typing import Any

from lema.config.lemaconfig import LemaConfig

__all__ = ["ACTING", "LIBRARY_ATTENTION", "SILENT", "acts"]

LIBRARY_ATTENTION = ("eager", "sdpa")
"""Attention that is code of `transformers` and torch alone; others may fetch kernels of the hub, or compile."""

ACTING: Mapping[str, str] = {
    "gbi_path": "reads weights from any path",
    "attn_implementation": "may fetch code from the hub and run it, or start a compiler, unless it is eager or sdpa",
    "train_data": "reads any path, walks directories, loads data sets of the hub and of addresses",
    "eval_data": "as train_data",
    "mixture": "names the data sets of train_data",
    "eval_prompts": "reads any path",
    "chat_template": "reads any path, unless it is the Jinja text itself",
    "adapter_name_or_path": "reads any path, or loads from the hub",
    "data_cache": "writes to any path, unless it is true or false",
    "output_dir": "writes to any path",
    "overwrite_output_dir": "replaces what is in output_dir",
    "offload_dir": "writes to any path",
    "report_to": "starts programs of others, and sends away what a run logs",
    "run_name": "names the run there",
    "push_to_hub": "sends the adapter away, in your name",
    "hub_model_id": "says where to",
    "hub_private_repo": "says who can read it",
    "torch_compile": "starts a compiler",
}
"""The settings that act on the machine, each with what it does."""

SILENT = frozenset({"output_dir", "overwrite_output_dir", "run_name", "mixture", "hub_private_repo"})
"""Those that mean nothing where no run begins, or without another one: that they are ignored needs no line."""


def acts(name: str, value: Any) -> bool:
    """Whether a setting of this value does more than describe an adapter."""
    if name not in ACTING or value in (None, LemaConfig.defaults()[name]):
        return False
    if name == "attn_implementation":
        return value not in LIBRARY_ATTENTION
    if name == "chat_template":
        return not (isinstance(value, str) and ("{{" in value or "{%" in value))
    return name != "data_cache" or not isinstance(value, bool)
