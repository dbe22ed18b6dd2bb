"""What modules keep from call to call, as JSON types: a run that is resumed goes on with what
they held.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lema.errors import ConfigError

__all__ = ["from_json", "to_json"]

PLAIN = (bool, int, float, str, type(None))
TENSOR = "tensor"
TUPLE = "tuple"
TABLE = "table"  # what stands for a value that JSON has no type for


def to_json(
    modules: Mapping[str, nn.Module], changed: Mapping[nn.Module, Collection[str]]
) -> dict[str, Any]:
    """Return, by the names of modules, what they hold under the names that have `changed`.

    Raises:
        ConfigError: that is more than tensors, numbers and containers of these.
    """
    names = {module: name for name, module in modules.items()}
    saved: dict[str, Any] = {}
    for module, attributes in changed.items():
        saved[names[module]] = entries = {}
        for attribute in sorted(attributes):
            module_vars = vars(module)
            buffers = module._buffers
            if attribute in buffers:
                kind = "buffer"
                value = buffers[attribute]
            elif attribute in module_vars:
                kind = "attribute"
                value = module_vars[attribute]
            else:
                kind = "absent"
                value = None
            try:
                entries[attribute] = [kind, _plain(value)]
            except TypeError as error:
                what = (
                    f"{type(module).__name__} keeps {attribute} from call to call, and {error} "
                    "cannot be saved"
                )
                how = (
                    "train it without checkpoints (save_steps: 0), whose resumed runs would go "
                    "on without that"
                )
                raise ConfigError(what, where=names[module], how=how) from error
    return saved


def from_json(
    modules: Mapping[str, nn.Module], saved: Mapping[str, Any]
) -> dict[nn.Module, set[str]]:
    """Let modules hold what `to_json` returned; return what that is. `KeyError`: there is no
    module of a name.
    """
    restored: dict[nn.Module, set[str]] = {}
    for name, entries in saved.items():
        module = modules[name]
        restored[module] = set(entries)
        for attribute, (kind, plain) in entries.items():
            module._buffers.pop(attribute, None)
            vars(module).pop(attribute, None)
            device = next(
                (buffer.device for buffer in module.buffers(recurse=False)), torch.device("cpu")
            )
            if kind == "buffer":
                module.register_buffer(attribute, _value(plain, device), persistent=False)
            elif kind == "attribute":
                vars(module)[attribute] = _value(plain, device)
    return restored


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        data = (
            base64.b64encode(flat.view(-1).view(torch.uint8).numpy().tobytes()).decode()
            if flat.numel()
            else ""
        )
        about = [
            str(flat.dtype).removeprefix("torch."),
            list(flat.shape),
            value.device.type != "cpu",
            data,
        ]
        return {TENSOR: about}
    if type(value) in PLAIN:
        return value
    if type(value) is list:
        return [_plain(entry) for entry in value]
    if type(value) is tuple:
        return {TUPLE: [_plain(entry) for entry in value]}
    if isinstance(value, dict):
        return {TABLE: [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    raise TypeError(f"a {type(value).__name__}")


def _value(plain: object, device: torch.device) -> Any:
    if isinstance(plain, list):
        return [_value(entry, device) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if TENSOR in plain:
        dtype, shape, on_device, data = plain[TENSOR]
        raw = bytearray(base64.b64decode(data))
        kind = getattr(torch, dtype)
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8).view(kind)
            if raw
            else torch.empty(0, dtype=kind)
        )
        return flat.view(shape).to(device if on_device else "cpu")
    if TUPLE in plain:
        return tuple(_value(entry, device) for entry in plain[TUPLE])
    return {_value(key, device): _value(entry, device) for key, entry in plain[TABLE]}
