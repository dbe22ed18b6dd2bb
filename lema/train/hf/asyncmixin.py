"""TRL's asynchronous GRPO with a streamed model, which it would open by name.

    class MyTrainer(StreamedAsyncMixin, AsyncGRPOTrainer): ...

    MyTrainer(model, reward, arguments, prompts).train()

TRL's `AsyncGRPOTrainer` takes the name of a model, opens all of it with an attention of its own,
and attaches an adapter. The two functions by which it does that are replaced while the trainer is
made, in the module of the trainer, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from lema.errors import ConfigError
from lema.lora.merge import ADAPTER
from lema.train.hf.peftmodel import StreamedPeftModel

if TYPE_CHECKING:

    class Below:
        """TRL's trainer, which may not be installed."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...
else:
    Below = object

__all__ = ["StreamedAsyncMixin"]

TRAINER = "AsyncGRPOTrainer"
PROBE = 8  # tokens of the row that shows what layers return


class StreamedAsyncMixin(Below):
    """Lets TRL's `AsyncGRPOTrainer` train a model of `lema.streamed`.

    Put it before the trainer in the bases of a class. The trainer hands the adapter alone to a
    vLLM server that was started with `--enable-lora`.

    Args:
        model: a model of `lema.streamed`, with its adapter.
        args: further arguments of the trainer by position.
        kwargs: arguments of the trainer by name, but for `peft_config`.

    Raises:
        ConfigError: the model does not stream, or `peft_config` is given.
        TypeError: the trainer is not among the bases.
    """

    def __init__(self, model: object, *args: object, **kwargs: object) -> None:
        if not isinstance(model, StreamedPeftModel):
            what = f"the model is a {type(model).__name__}, and its layers do not stream"
            raise ConfigError(what, where="model", how="give the result of lema.streamed")
        if kwargs.get("peft_config") is not None:
            what = "the model has its adapter already"
            raise ConfigError(what, where="peft_config", how="give it to lema.streamed")
        module = self._module()
        model.train()
        # Before attention is TRL's, a row shows what layers return.
        model(torch.ones(1, PROBE, dtype=torch.long, device=model.opened.backend.device))
        module.register_tree_attention()
        model.set_attn_implementation(module.TREE_ATTENTION)
        replaced = {
            "create_model_from_path": lambda *_, **__: model.get_base_model(),
            "get_peft_model": lambda *_, **__: model,
        }
        kwargs["peft_config"] = model.peft_config[ADAPTER]
        with _replaced(module, replaced):
            super().__init__(str(model.opened.directory), *args, **kwargs)

    @classmethod
    def _module(cls) -> ModuleType:
        """Return the module of TRL's trainer."""
        for base in cls.__mro__:
            if base.__name__ == TRAINER:
                return import_module(base.__module__)
        raise TypeError(f"{cls.__name__} needs TRL's {TRAINER} after StreamedAsyncMixin")


@contextmanager
def _replaced(module: ModuleType, functions: Mapping[str, object]) -> Iterator[None]:
    """Have functions of a module be others for the length of a `with` block."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
