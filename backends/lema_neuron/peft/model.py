"""PEFT's models over parallel layers. Their adapters are attached, saved and loaded as those of
the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import PeftType
from torch import Tensor, nn

from lema.errors import ConfigError
from lema_neuron.comm import Comm, Solo
from lema_neuron.gradients import mark, parts
from lema_neuron.peft.base import describe, kind_of
from lema_neuron.peft.draw import common_seed, seeded
from lema_neuron.peft.files import read_adapter
from lema_neuron.peft.lora import NeuronLoraModel
from lema_neuron.peft.refusals import check_config

__all__ = ["NeuronPeftModel", "NeuronPeftModelForCausalLM", "get_peft_model"]


class NeuronPeftModel(PeftModel):
    """A model with an adapter over parallel layers.

    Args:
        model: with parallel layers.
        peft_config: LoRA's.
        adapter_name: of the adapter.
        autocast_adapter_dtype: factors in half precision become fp32.
        kwargs: PEFT's.

    Raises:
        ConfigError: what is asked for is not exact under sharding; it is named.
    """

    def __init__(
        self,
        model: nn.Module,
        peft_config: PeftConfig,
        adapter_name: str = "default",
        autocast_adapter_dtype: bool = True,
        **kwargs: Any,
    ) -> None:
        check_config(peft_config)
        with _our_lora():
            super().__init__(
                model,
                peft_config,
                adapter_name,
                autocast_adapter_dtype=autocast_adapter_dtype,
                **kwargs,
            )
        self.comm = comm_in(model)
        mark(self, self.comm)

    def add_adapter(
        self, adapter_name: str, peft_config: PeftConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Add another adapter."""
        check_config(peft_config)
        super().add_adapter(adapter_name, peft_config, *args, **kwargs)
        mark(self, self.comm)

    def adapter_state(self, adapter_name: str | None = None) -> dict[str, Tensor]:
        """Return all adapters' parameters and others that train, or one adapter's, all whole; every
        rank calls it.

        Raises:
            DataError: copies differ from rank to rank.
        """
        part_by_name = parts(self, self.comm)
        state = {}
        for name, parameter in self.named_parameters():
            part = part_by_name[name]
            adapter = ".lora_" in name or ".modules_to_save." in name
            mine = (
                adapter or parameter.requires_grad
                if adapter_name is None
                else f".{adapter_name}" in name
            )
            if mine and part is not None:
                state[name] = part.consolidate(parameter, self.comm)
        return state

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Take this rank's shares of whole parameters, named as `adapter_state` names them.

        Raises:
            ConfigError: the model has no parameter of such a name.
        """
        part_by_name = parts(self, self.comm)
        parameters = dict(self.named_parameters())
        if unknown := sorted(state.keys() - parameters.keys()):
            raise ConfigError(
                f"the model has no parameter {unknown[0]}", how="use the names of the whole model"
            )
        with torch.no_grad():
            for name, full in state.items():
                part = part_by_name[name]
                parameters[name].copy_(full if part is None else part.shard(full, self.comm.rank))

    @classmethod
    def from_pretrained(  # type: ignore[override] # each rank has its share
        cls,
        model: nn.Module,
        model_id: str,
        adapter_name: str = "default",
        is_trainable: bool = False,
        config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> NeuronPeftModel:
        """Attach an adapter from PEFT's files; each rank takes its shares of it.

        Args:
            model: with parallel layers.
            model_id: a directory, or an id of the hub.
            adapter_name: its name here.
            is_trainable: whether it continues to train.
            config: PEFT's; None: the one in the files.
            kwargs: options for reading the weights.

        Raises:
            ConfigError: the adapter is not exact under sharding, or does not fit the model.
        """
        peft_config = PeftConfig.from_pretrained(model_id) if config is None else config
        peft_config.inference_mode = not is_trainable
        peft_model = get_peft_model(model, peft_config, adapter_name)
        peft_model.load_adapter_state(read_adapter(model_id, adapter_name, **kwargs))
        return peft_model

    def load_adapter(  # type: ignore[override] # each rank has its share
        self, model_id: str, adapter_name: str, is_trainable: bool = False, **kwargs: Any
    ) -> None:
        """Add an adapter from PEFT's files; each rank takes its shares of it.

        Raises:
            ConfigError: the adapter is not exact under sharding, or does not fit the model.
        """
        peft_config = PeftConfig.from_pretrained(model_id)
        peft_config.inference_mode = not is_trainable
        if adapter_name not in self.peft_config:
            self.add_adapter(adapter_name, peft_config)
        self.load_adapter_state(read_adapter(model_id, adapter_name, **kwargs))

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:  # type: ignore[override] # each rank has its share
        """Write PEFT's own files of the whole adapter; the first rank writes, every rank calls
        it.
        """
        state = self.adapter_state()
        if self.comm.rank == 0:
            super().save_pretrained(
                save_directory, state_dict={**_buffers(self), **state}, **kwargs
            )
        self.comm.barrier()


class NeuronPeftModelForCausalLM(NeuronPeftModel, PeftModelForCausalLM):
    """A causal language model with an adapter over parallel layers."""


def get_peft_model(
    model: nn.Module,
    peft_config: PeftConfig,
    adapter_name: str = "default",
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
    *,
    seed: int | None = None,
) -> NeuronPeftModel:
    """Attach an adapter to a model with parallel layers; every rank calls it.

    Initial values come from the seed and each module's name, so that they are the same for any
    number of ranks.

    Args:
        model: one from `lema_neuron.parallelize`, or one with neuronx-distributed's layers.
        peft_config: LoRA's.
        adapter_name: of the adapter.
        mixed: refused.
        autocast_adapter_dtype: factors in half precision become fp32.
        revision: the base model's, kept in the config.
        low_cpu_mem_usage: leave the factors on `meta`.
        seed: for the initial values; None: that of the first rank's generator.

    Raises:
        ConfigError: what is asked for is not exact under sharding; it is named.
    """
    if mixed:
        raise ConfigError(
            "adapters of mixed types are not supported over several ranks", where="mixed"
        )
    check_config(peft_config)
    peft_config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    if revision is not None:
        peft_config.revision = revision
    model_class = (
        NeuronPeftModelForCausalLM if peft_config.task_type == "CAUSAL_LM" else NeuronPeftModel
    )
    chosen = common_seed(comm_in(model)) if seed is None else seed
    with torch.random.fork_rng(devices=()), seeded(chosen):
        torch.manual_seed(chosen)  # for layers that are whole on every rank, which PEFT fills
        return model_class(
            model,
            peft_config,
            adapter_name=adapter_name,
            autocast_adapter_dtype=autocast_adapter_dtype,
            low_cpu_mem_usage=low_cpu_mem_usage,
        )


def comm_in(model: nn.Module) -> Comm:
    """Return the group that a model's parallel layers are divided over."""
    layer = next(
        (
            module
            for module in model.modules()
            if kind_of(module) and not hasattr(module, "base_layer")
        ),
        None,
    )
    return Solo() if layer is None else describe(layer).comm


@contextmanager
def _our_lora() -> Iterator[None]:
    """Make PEFT use our class of LoRA models, in a `with` block."""
    original = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA]
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = NeuronLoraModel
    try:
        yield
    finally:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = original


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())
