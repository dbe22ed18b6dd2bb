"""The settings for Neuron devices alone. This module imports no heavy library."""

from __future__ import annotations

from lema.config.backendsettings import BackendSetting

__all__ = ["KV_LAYOUT", "RUNTIME"]

RUNTIME = BackendSetting(
    ("auto", "xla", "native", "emulated"),
    "auto",
    "What drives the device: `xla` (Trn1: PyTorch/XLA), `native` (Trn2, Trn3: "
    "TorchNeuron), `emulated` (no device: "
    "processes of this machine, on the CPU); `auto` looks for one of the first two.",
)
KV_LAYOUT = BackendSetting(
    ("auto", "tile", "interleave"),
    "auto",
    "How key and value heads lie when there are fewer of them than processes: `tile` "
    "repeats all of them in turn "
    "(Trn1), `interleave` each of them (Trn2); `auto` follows the runtime.",
)
