"""A plugin for pytest that runs tests of PEFT's on streamed models, and on small models made here.

PEFT's tests name models of the hub. Each is made from a configuration of its type instead. What
they attach an adapter to is saved, and opened by `lema.streamed`. `LEMA_PEERS_PEFT=whole` leaves
the models whole.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from limits import LIMITS, NOT_HERE
from peft import LoraConfig, PeftModel
from tinyconfig import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

import lema

WHOLE = os.environ.get("LEMA_PEERS_PEFT") == "whole"
# A word in the name of a model on the hub -> its type; the first that fits.
TYPES = {
    "llama4": "llama4_text",
    "gptoss": "gpt_oss",
    "gpt2": "gpt2",
    "gptj": "gptj",
    "opt": "opt",
    "llama": "llama",
    "qwen2": "qwen2",
    "gemma3": "gemma3_text",
    "mistral": "mistral",
}
VOCABULARY = 128  # more than the tokens that a test names
get_peft_model = peft.get_peft_model
from_pretrained = PeftModel.from_pretrained
load = AutoModelForCausalLM.from_pretrained


@cache
def made(model_id: str) -> str:
    """Return the directory of a small model of the type that a name on the hub has."""
    kind = next(kind for word, kind in TYPES.items() if word in model_id.lower())
    directory = tempfile.mkdtemp(prefix=f"{kind}-")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        config = tiny_config(kind)
        if kind == "gpt_oss":
            config.vocab_size = VOCABULARY
        if kind == "llama":
            config.num_hidden_layers = 2  # of which a test expects no more
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def load_here(model_id: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """Load a model as `from_pretrained` does, but no other than those made here."""
    found: PreTrainedModel = load(
        model_id if Path(model_id).is_dir() else made(model_id), *args, **kwargs
    )
    return found


def streamed(model: PreTrainedModel, adapter: Any) -> Any:
    """Save a model that a test has loaded, and perhaps changed; open it with an adapter."""
    place = tempfile.mkdtemp(prefix="streamed-")
    model.save_pretrained(place)
    seed = int(torch.randint(2**31, (1,)))  # by what the test has seeded
    # because LEMA attaches adapters by PEFT's own functions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft, "get_peft_model", get_peft_model)
        patch.setattr(PeftModel, "from_pretrained", from_pretrained)
        return lema.streamed(place, adapter, device="cpu", dtype=model.dtype, seed=seed)


def attach(model: Any, config: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    """Stand for `get_peft_model`. An adapter of another name is added to a streamed model, and
    the first deleted.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(config, LoraConfig):
        return get_peft_model(model, config, adapter_name, **kwargs)
    config.base_model_name_or_path = None
    if adapter_name == "default":
        found = streamed(model, config)
        # as PEFT fills them in
        config.target_modules = found.peft_config[adapter_name].target_modules
    else:
        # because two adapters with biases are refused
        found = streamed(model, replace(config, bias="none"))
        found.add_adapter(adapter_name, config)
        found.set_adapter(adapter_name)
        found.delete_adapter("default")
    return found


def attach_saved(model: Any, directory: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    """Stand for `PeftModel.from_pretrained`."""
    if not isinstance(model, PreTrainedModel) or isinstance(model, PeftModel):
        return from_pretrained(model, directory, adapter_name, **kwargs)
    found = streamed(model, str(directory))
    if adapter_name != "default":
        found.load_adapter(str(directory), adapter_name)
        found.set_adapter(adapter_name)
        found.delete_adapter("default")
    return found


def pytest_configure() -> None:
    """Put these functions in the places of the others, before the tests import them."""
    AutoModelForCausalLM.from_pretrained = load_here
    if not WHOLE:
        peft.get_peft_model = attach
        PeftModel.from_pretrained = attach_saved


def is_of_lora(item: Any) -> bool:
    """Whether a test is of LoRA: by its parameters, or else by its code."""
    source = inspect.getsource(item.function)
    method = getattr(getattr(item, "callspec", None), "params", {}).get("config_cls")
    return (
        method is LoraConfig if method is not None else bool(re.search(r"\bLoraConfig\b", source))
    )


def limit_of(name: str) -> tuple[str, str] | None:
    """Return the error that a test is to end with, and why, if it is beyond a documented limit."""
    return next((limit for pattern, limit in LIMITS.items() if re.search(pattern, name)), None)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests of LoRA that need nothing but a model."""
    kept = [
        one
        for one in items
        if is_of_lora(one) and not any(re.search(name, one.name) for name in NOT_HERE)
    ]
    config.hook.pytest_deselected(items=[one for one in items if one not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Have a test beyond a limit end in the sentence that says so, and in nothing else."""
    limit = None if WHOLE else limit_of(item.name)
    if limit is None:
        return (yield)
    with pytest.raises(Exception, match=limit[0]):
        yield
    return None
