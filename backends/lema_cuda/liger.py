"""Norms, rotary embeddings and gated MLPs of package `liger-kernel`, for `arithmetic: fast`.

Liger's own table of model types says which modules of a model get a `forward` of its own. Only
those of the decoder layers keep it. Liger also replaces names in `transformers`' code, such as
`apply_rotary_pos_emb`, for every model of the process. They are put back at once, and a module
whose `forward` calls such a function gets a copy of it that finds Liger's. So a model with
`arithmetic: exact` in the same process computes as before.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers import PreTrainedModel

from lema.backend.findings import installed_version
from lema.model.capture import has_values, tensors_in

__all__ = ["PACKAGE", "fuse"]

PACKAGE = "liger-kernel"
# The activation that each kernel of a gated MLP has built in, whatever the model's is.
ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
# The loss is LEMA's own, the layers have no such norm, and the last one goes into a table that all
# models share.
OTHERS = ("cross_entropy", "fused_linear_cross_entropy", "layer_norm", "relu_squared")
NOTHING = "it has nothing for these layers"
# what it may raise then
UNFIT = (
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    AssertionError,
)


@dataclass(frozen=True, eq=False)
class Fused:
    """In the place of a module's `forward`: `kernel`. The module's own computes what has no values,
    which a kernel cannot read, and what a mode of torch follows by its operations, which a kernel
    has none of."""

    module: nn.Module
    kernel: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's `forward` returns, except for rounding."""
        followed = any(
            not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
        )
        if followed or not all(map(has_values, tensors_in((args, kwargs)))):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.kernel(*args, **kwargs)


def fuse(model: PreTrainedModel, layers: nn.ModuleList) -> str:
    """Have modules of a model's decoder layers compute by Liger's kernels; return in words
    which, or why none do.
    """
    if (version := installed_version(PACKAGE)) is None:
        return f"{PACKAGE} fuses nothing, because it is not installed"
    _import_patched(model)
    before = {module: vars(module).get("forward") for module in model.modules()}
    code = [
        vars(module)
        for name, module in [*sys.modules.items()]
        if re.match(r"transformers\.models\..*\.modeling_", name)
    ]
    originals = [dict(names) for names in code]
    try:
        unfit = _apply(model)
    except UNFIT as error:
        unfit = f"it does not fit this transformers: {type(error).__name__}: {error}"
    counts = Counter[str]()
    new = dict[int, dict[str, Any]]()
    for names, were in zip(code, originals, strict=True):
        new[id(names)] = {
            name: names[name] for name, original in were.items() if names[name] is not original
        }
        names.update(were)
        for name in names.keys() - were.keys():
            del names[name]
    inside = set() if unfit else set(layers.modules())
    for module, forward in before.items():
        attributes = vars(module)
        kernel = vars(module).pop("forward", None)
        if forward is not None:
            attributes["forward"] = forward
        # Not where matrices are: LEMA leases and adapts those of experts in ways that a kernel does
        # not know.
        if (
            module not in inside
            or forward is not None
            or any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        ):
            continue
        if (kernel := kernel or _rotating(module, new)) is not None:
            attributes["forward"] = Fused(module, kernel)
            # in the gradient that a norm is given, which may be the residual's, too
            if "in_place" in attributes:
                attributes["in_place"] = False
            counts[module._get_name()] += 1
    fused = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{PACKAGE} {version} fuses {fused or f'nothing, because {unfit or NOTHING}'}"


def _apply(model: PreTrainedModel) -> str | None:
    """Let Liger replace what it knows of a model; return why that is nothing, if it does not
    know the model.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    text = model.config.get_text_config()
    kind = model.config.model_type
    if kind not in KNOWN:
        return f"it does not know the type {kind!r}"
    takes = set(signature(KNOWN[kind]).parameters)
    if "kwargs" in takes and text.model_type in KNOWN:  # which hands the rest on
        takes |= set(signature(KNOWN[text.model_type]).parameters)
    act = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    off = [*OTHERS, *(name for name, activations in ACTIVATIONS.items() if act not in activations)]
    KNOWN[kind](model=model, **{name: False for name in off if name in takes})
    return None


def _import_patched(model: PreTrainedModel) -> None:
    """Import the code of `transformers` in which Liger replaces names, because what Liger imports
    is not known before, and cannot be put back. A multimodal type's function imports the code of
    every text model that it may have."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    waiting = [KNOWN.get(model.config.model_type)]
    seen = set[Any]()
    while waiting:
        if not isinstance(function := waiting.pop(), FunctionType) or function in seen:
            continue
        seen.add(function)
        names = function.__code__.co_names
        packages = [name for name in names if name.startswith("transformers.models.")]
        parts = [
            f"{package}.{name}"
            for package in packages
            for name in names
            if name.startswith("modeling_")
        ]
        for name in (*packages, *parts):
            # a part of another package, or what Liger will fail to find, too
            with suppress(ImportError):
                import_module(name)
        waiting += [
            function.__globals__.get(name) for name in names if name.startswith("apply_liger_")
        ]


def _rotating(module: nn.Module, new: Mapping[int, Mapping[str, Any]]) -> Callable[..., Any] | None:
    """Return a module's `forward` with Liger's functions in the place of those that it calls;
    None: it calls none.
    """
    # a decorator, such as one for renamed arguments, calls none
    forward: Any = unwrap(type(module).forward)
    names = new.get(id(getattr(forward, "__globals__", None)), {})
    replacements = {
        name: function for name, function in names.items() if isinstance(function, FunctionType)
    }
    if not (replacements and replacements.keys() & set(forward.__code__.co_names)):
        return None
    namespace = {**forward.__globals__, **replacements}
    copy = FunctionType(
        forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copy, module)
