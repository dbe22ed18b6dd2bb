"""Checkpoints of adapters that train: PEFT's files, the optimizer, generators and the state of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.lora import save_adapter
from lema.lora.checks import check_base, write_base
from lema.lora.files import check_same_adapter, load_weights
from lema.model.partition import whole_adapter
from lema.storage import GlobalBinaryIndex
from lema.train.checkpoint.format import (
    Writer,
    about_run,
    nbytes_of,
    optimizer_state,
    read_state,
    restore_optimizer,
    write_checkpoint,
)
from lema.train.checkpoint.rng import states_of_all

__all__ = ["adapters_nbytes", "leave_adapter", "read_adapters", "write_adapters"]


def adapters_nbytes(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of a checkpoint's tensors; the moments of an AdamW count before its first step, too."""
    moments = nbytes_of(one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one))
    if not moments and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        moments = 2 * nbytes_of(parameters)
    return nbytes_of(parameters) + moments


def leave_adapter(
    directory: Path,
    backend: Backend,
    adapters: PeftModel,
    config: LemaConfig,
    base: str,
    writers: Sequence[Writer] = (),
) -> None:
    """Write PEFT's files and the settings, and what `writers` add; arguments otherwise as `write_adapters`.

    Processes that hold the model together all call this, and the first of all writes.

    Raises:
        DiskError: a file could not be written.
    """
    whole = whole_adapter(adapters, backend.parallel)

    def write() -> None:
        save_adapter(adapters, directory, config.model_name_or_path, config.revision, whole, writers)
        config.save_pretrained(directory)
        write_base(directory, base)

    if whole is None:
        write()
    else:
        first_alone(backend.replicas, write)


def write_adapters(
    directory: Path,
    backend: Backend,
    adapters: PeftModel,
    optimizer: Optimizer,
    about: Mapping[str, Any],
    config: LemaConfig,
    base: str,
    writers: Iterable[Writer] = (),
) -> None:
    """Write a checkpoint of PEFT's `adapters` and an `optimizer` over them: whole, or not at all; the first process
    writes.

    All call this. `base` is the fingerprint of the model below. Errors are as `write_checkpoint`'s, in every process.
    """
    kept, whole = optimizer_state(optimizer, backend.parallel), whole_adapter(adapters, backend.parallel)
    state = {**about_run(config, "adapters", base), **states_of_all(backend), **about}
    trained = [parameter for parameter in adapters.parameters() if parameter.requires_grad]
    nbytes = nbytes_of(trained if whole is None else whole.values())
    adapter = partial(save_adapter, adapters, base=config.model_name_or_path, revision=config.revision, whole=whole)
    every: list[Writer] = [adapter, config.save_pretrained, partial(write_base, fingerprint=base), *writers]
    first_alone(backend.replicas, partial(write_checkpoint, directory, kept, state, every, nbytes))


def read_adapters(
    directory: Path,
    backend: Backend,
    adapters: PeftModel,
    optimizer: Optimizer | None,
    gbi: GlobalBinaryIndex,
    layers_name: str,
) -> dict[str, Any]:
    """Load adapters, and the optimizer unless it is None; return the checkpoint's state.

    Raises `AdapterError` where it is damaged or of another optimizer or model, `ConfigError` of other settings.
    """
    state = read_state(directory)
    check_same_adapter(adapters, directory)
    check_base(directory, gbi)
    load_weights(adapters, directory, layers_name, backend.parallel)
    if optimizer is not None:
        restore_optimizer(optimizer, directory, state["optimizer"], backend.parallel)
    return state
