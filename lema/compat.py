"""What the releases of transformers, PEFT and accelerate do differently, and which of their private
names are used.

A difference is asked of what is installed, by a name or an argument that it has, and never of a
version, because a release may be patched, and one that does not exist yet has no number. Where
something is not there and is written out in a few lines, it is here.

Everything is imported where it is used: this is the ground floor, and verbs that need no library
load none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

__all__ = [
    "TESTED",
    "adapted_module",
    "by_position_in_pack",
    "cache_argument",
    "check_fusions",
    "check_target",
    "collecting",
    "delta_factors",
    "dtype_of_files",
    "empty_cache_layer",
    "encodes_by_itself",
    "expands",
    "grouped_fallback",
    "loading_by_operations",
    "models_of",
    "processes_kind",
    "releases",
    "template_functions",
    "untested",
    "without_video",
]

# The minor releases that all tests have run with (`constraints.txt`), and those that `tox -e
# oldest` and the like take.
TESTED: Mapping[str, tuple[str, ...]] = {
    "transformers": ("5.17", "5.20", "5.24"),
    "peft": ("0.20", "0.21"),
    "accelerate": ("1.10", "1.15"),
    "torch": ("2.9", "2.13", "2.15"),
}


def untested() -> str:
    """Return what is installed of the libraries of `TESTED` in minor releases that no tests ran
    with, in one line; empty where there is nothing to say."""
    mismatches = list[str]()
    for name, releases in TESTED.items():
        with suppress(PackageNotFoundError):
            installed = version(name)
            if ".".join(installed.split(".")[:2]) not in releases:
                mismatches.append(f"{name} {installed} (tests ran with {', '.join(releases)})")
    return "; ".join(mismatches)


def releases(library: str) -> str:
    """Return which release of a library is installed, and which one all tests run with, as the
    end of a sentence.
    """
    return f"{version(library)} is installed, and LEMA is tested up to {TESTED[library][-1]}"


# transformers


def dtype_of_files(
    asked: str | torch.dtype,
    files: Sequence[str],
    config: PreTrainedConfig,
    described: dict[str, Any] | None,
    quantizer: HfQuantizer | None,
) -> torch.dtype:
    """Return the dtype that `from_pretrained` gives a model of these files; it writes it to the
    config, too.

    Args:
        asked: as `from_pretrained` takes it.
        files: the files of weights.
        config: of the model.
        described: the metadata of the index of several files.
        quantizer: of a quantised checkpoint.
    """
    from transformers.modeling_utils import _get_dtype

    _, dtype = _get_dtype(asked, list(files), config, described, None, True, quantizer)
    decided: torch.dtype = dtype
    return decided


def check_fusions(config: PreTrainedConfig) -> None:
    """Check what a config asks to have fused, as `from_pretrained` does. ValueError: it asks for
    what there is not.
    """
    from transformers.fusion_mapping import _iter_enabled_fusions

    _iter_enabled_fusions(getattr(config, "fusion_config", None) or {})


def models_of(auto: Any) -> Any:
    """Return the classes that one of `transformers`' auto classes makes, by the class of their
    config.
    """
    return auto._model_mapping


def cache_argument(model: nn.Module) -> str:
    """Return what a model's forward calls the cache of keys and values; `past_key_values` is the
    older name.
    """
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def empty_cache_layer() -> type[Any] | None:
    """Return the class of a layer of a cache that keeps nothing; None: there is none (5.24)."""
    from transformers import cache_utils

    return getattr(cache_utils, "DummyLayer", None)


def by_position_in_pack(
    mask_function: Callable[..., Any], position_ids: Tensor
) -> Callable[..., Any]:
    """Return a mask's function that goes by positions in rows of a pack (5.24); earlier releases
    go by places in the pack.
    """
    from transformers import masking_utils

    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return mask_function if remap is None else remap(mask_function, position_ids)


@contextmanager
def collecting(recorded: dict[str, list[Tensor]]) -> Iterator[None]:
    """Have the models of `transformers` that run in a `with` block add outputs of modules to
    lists, by their kinds.
    """
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set(recorded)
    try:
        yield
    finally:
        _active_collector.reset(token)


def grouped_fallback() -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the backward of `transformers`' fallback for grouped products, and what keeps the
    tensors for it.
    """
    from transformers.integrations import moe

    return moe._grouped_mm_fallback_backward, moe._grouped_mm_fallback_setup_context


def template_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that compile a chat template, and that render it with what the
    assistant says marked.
    """
    from transformers.utils import chat_template_utils

    return (
        chat_template_utils._cached_compile_jinja_template,
        chat_template_utils._render_with_assistant_indices,
    )


def encodes_by_itself(tokenizer: object) -> bool:
    """Whether a tokenizer's class encodes texts in Python, and not by its file."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast
    return not (isinstance(tokenizer, fast) and type(tokenizer)._encode_plus is fast._encode_plus)


@cache
def _has_load_operations() -> bool:
    """Whether quantizers say with which operations they load (5.21); earlier ones make the
    conversions themselves.
    """
    from transformers.quantizers.base import HfQuantizer

    return hasattr(HfQuantizer, "get_load_operations")


def expands(method: str) -> bool:
    """Whether `transformers` expands weights of a quantisation method. It asks classes, because
    some quantizers and configs cannot be made without libraries and devices of their own."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
    )

    kind: Any = AUTO_QUANTIZER_MAPPING.get(method)
    config: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or config is None or "dequantize" not in signature(config.__init__).parameters:
        return False
    return not _has_load_operations() or "dequantize" in kind.get_load_operations(
        kind.__new__(kind)
    )


def loading_by_operations(kind: type[HfQuantizer]) -> type[HfQuantizer]:
    """Give a class of quantizers with `serialized_names` and `get_load_operations` the conversions
    that `transformers` makes of these since 5.21, where it does not."""
    if _has_load_operations():
        return kind
    kind.get_weight_conversions = _weight_conversions  # type: ignore[method-assign] # as a subclass would have it
    kind.update_weight_conversions = _updated_conversions  # type: ignore[method-assign] # the same
    return kind


def _weight_conversions(self: Any) -> list[Any]:
    """Return what loads the parameters of modules: see `HfQuantizer.get_weight_conversions`."""
    from transformers.core_model_loading import WeightConverter

    operation = self.get_load_operations()["dequantize"]
    stored = self.serialized_names
    return [
        WeightConverter(_longest_first(names), param, [operation(self)])
        for param, names in stored.items()
    ]


def _longest_first(patterns: Iterable[str]) -> list[str]:
    """Sort patterns so that none comes before one that it is the start of: the first that
    matches a name is taken.
    """
    return sorted(patterns, key=lambda pattern: -len(pattern))


def _updated_conversions(self: Any, conversions: Sequence[Any], _model: Any = None) -> list[Any]:
    """Return the conversions of a type, of which those of quantised weights collect what is stored
    of each and expand it first, and those of other weights: see
    `HfQuantizer.update_weight_conversions`."""
    from transformers.core_model_loading import WeightConverter

    operation = self.get_load_operations()["dequantize"]
    updated = list[Any]()
    for conversion in conversions:
        updated.append(conversion)
        if not isinstance(conversion, WeightConverter):
            continue
        sources = conversion._original_source_patterns
        targets = conversion._original_target_patterns
        param = sources[0].rpartition(".")[2]
        names = self.serialized_names.get(param)
        if names and all(source.endswith(f".{param}") for source in sources):
            stored = [source.removesuffix(param) + name for source in sources for name in names]
            operations = [operation(self), *conversion.operations]
            expanding = WeightConverter(_longest_first(stored), list(targets), operations)
            expanding.scope_prefix = conversion.scope_prefix
            expanding.base_model_prefix = conversion.base_model_prefix
            updated[-1] = expanding
    return updated + _weight_conversions(self)


# PEFT


def check_target(model: PreTrainedModel, config: LoraConfig, name: str) -> None:
    """Have PEFT check that it adapts modules of a name. ValueError: it does not, because kernels
    do not call them.
    """
    from peft.tuners.lora import LoraModel

    LoraModel._check_target_module_compatiblity(None, config, model, name)  # type: ignore[arg-type] # self is not used


def adapted_module(
    config: LoraConfig, adapter: str, target: nn.Module, **options: Any
) -> nn.Module:
    """Return PEFT's own layer around a module."""
    from peft.tuners.lora import LoraModel

    layer: nn.Module = LoraModel._create_new_module(config, adapter, target, **options)
    return layer


def delta_factors(wrapper: ParamWrapper, adapter: str) -> tuple[Tensor, Tensor]:
    """Return the two factors of what an adapter of stacked experts adds to their weight, but for
    its scaling, as `[experts, rows, rank]` and `[experts, rank, columns]` in the dtype of the
    weight."""
    if hasattr(wrapper, "get_delta_factors"):  # since 0.21
        left, right, _ = wrapper.get_delta_factors(adapter)
        return left, right
    first: Any = wrapper.lora_A[adapter].weight
    second: Any = wrapper.lora_B[adapter].weight
    first = first.reshape(wrapper.num_experts, -1, first.shape[-1])
    second = second.reshape(len(second), -1, wrapper.num_experts).permute(2, 0, 1)
    left, right = (second, first) if wrapper._did_swap_in_out_features else (first.mT, second.mT)
    dtype = wrapper.get_param().dtype
    return left.to(dtype), right.to(dtype)


# accelerate


def processes_kind() -> object:
    """Return what accelerate, if it was set up, knows of how processes train together; None:
    nothing.
    """
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state.get("distributed_type")


@contextmanager
def without_video() -> Iterator[None]:
    """Have processors of images and video be made without the part for video, where torchvision,
    which that part needs, is not installed. Their parts for images and text work without it, and
    `transformers` makes no processor from only these."""
    from transformers import processing_utils

    kind: Any = processing_utils.ProcessorMixin
    mapping: Any = getattr(processing_utils, "MODALITY_TO_AUTOPROCESSOR_MAPPING", None)
    if find_spec("torchvision") is not None or mapping is None:
        yield
        return
    check = kind.check_argument_for_proper_class
    lookup = type(mapping).__getitem__

    def check_argument(self: object, name: str, argument: object) -> object:
        absent = argument is None and name == "video_processor"
        return None if absent else check(self, name, argument)

    def loader(self: object, name: str) -> object:
        return _NoVideo if name == "video_processor" else lookup(self, name)

    kind.check_argument_for_proper_class = check_argument
    type(mapping).__getitem__ = loader
    try:
        yield
    finally:
        kind.check_argument_for_proper_class = check
        type(mapping).__getitem__ = lookup


class _NoVideo:
    """Stands in for what loads the part of a processor for video."""

    @staticmethod
    def from_pretrained(*_: object, **__: object) -> None:
        """Load nothing."""
