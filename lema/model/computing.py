"""The type that a model computes in: that of its weights, or another where the settings or the
device say so.

Weights in half precision may be computed in fp32, because a processor without instructions for half
precision is slow in it. The numbers are then those of the same weights that `from_pretrained` loads
as fp32. In files and in host memory the layers stay as they are stored, and each is widened when it
is leased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.backend.registry import fast_dtype
from lema.config import LemaConfig
from lema.config.types import dtype_name
from lema.errors import ConfigError
from lema.model.weight_names import checkpoint_dtype
from lema.storage import GlobalBinaryIndex

__all__ = ["Computing", "computing_of"]

AUTO = "auto"
OF_WEIGHTS = "weights"


@dataclass(frozen=True)
class Computing:
    """The types of a model."""

    weights: torch.dtype  # that `from_pretrained` gives them
    dtype: torch.dtype  # in which layers, hidden states and adapters compute
    measured: bool = False  # whether the device asked for it, and not the settings
    autocast: torch.dtype | None = None  # of products, where it is another than that of layers

    @property
    def narrow(self) -> bool:
        """Whether layers stay as they are stored until they are leased."""
        return self.weights.itemsize < self.dtype.itemsize

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run and its plan say of it."""
        if not self.narrow:
            return ()
        stored = dtype_name(self.weights)
        computed = dtype_name(self.dtype)
        why = (
            f"products in {stored} are slow on this device"
            if self.measured
            else "the setting says so"
        )
        how = f"; compute_dtype: {stored} computes in the stored type" if self.measured else ""
        return (
            (
                f"compute_dtype: {computed}, because {why}; weights stay {stored} until they "
                f"are leased{how}"
            ),
        )


def computing_of(
    hf_config: PreTrainedConfig,
    index: GlobalBinaryIndex,
    config: LemaConfig,
    device: Backend | str | None,
) -> Computing:
    """Decide in which type a model computes. Of several processes that have the device open the
    first decides.

    Args:
        hf_config: the config of the model.
        index: its stored tensors.
        config: the settings.
        device: what it computes on, open or by name; None: a machine that is not here, of which
            nothing is measured.

    Raises:
        WeightsError: `transformers` finds no type for the weights.
        ConfigError: the settings cast weights for products that are in half precision already.
    """
    weights = checkpoint_dtype(hf_config, index, config.dtype)
    if config.autocast is not None:
        if weights != torch.float32 or config.compute_dtype not in (AUTO, OF_WEIGHTS, "float32"):
            raise ConfigError(
                f"autocast casts float32 for products, and this model is {dtype_name(weights)}",
                where="autocast",
                how="set dtype: float32, or leave autocast out",
            )
        return Computing(weights, weights, autocast=getattr(torch, config.autocast))
    if config.compute_dtype not in (AUTO, OF_WEIGHTS):
        return Computing(weights, getattr(torch, config.compute_dtype))
    if config.compute_dtype == OF_WEIGHTS or device is None:
        return Computing(weights, weights)
    if isinstance(device, str):
        compute_dtype = fast_dtype(device, weights)
    else:
        compute_dtype = first_alone(device.replicas, lambda: fast_dtype(device, weights))
    return Computing(weights, compute_dtype, measured=compute_dtype != weights)
