"""The model without its weights: built from its config, with parameters on `meta`, buffers real,
decoder layers found.

Nothing here knows an architecture. `transformers` builds the modules; the stack of decoder layers
is the one that the config's own pipeline plan names, or else the only list of modules as long as
the config says the stack is.

The config may come from a stranger, so the tensors that it has built are counted and bounded in
size. Parameters on `meta` cost nothing whatever their shape, and a wrong shape shows when they are
compared with the weights; but buffers are real, and each tensor takes time to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import guard_torch_init_functions, no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from lema.backend import Backend
from lema.backend.hostmemory import private_pages
from lema.backend.registry import fused, own_attention
from lema.compat import check_fusions, models_of
from lema.config import LemaConfig
from lema.errors import LemaError, ModelError, message_of
from lema.model.capture import past_layers, tensors_in
from lema.storage.modelfiles import parts_of

# about three times those of the model that has the most, with each expert's apart
MAX_TENSORS = 200_000
MAX_TABLE_BYTES = 256 << 20  # of one table
MAX_TABLES_BYTES = 2 << 30  # of all the large ones of a model together
COUNTED_FROM = 16 << 20  # bytes; smaller ones are not counted
TABLES = frozenset(
    {torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn}
)
MASKS = frozenset({torch.tril, torch.triu})


class SizeLimit(TorchFunctionMode):
    """Active while a model is built. `ModelError`, inside: it would have too many tensors, or
    tables too large.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors = self._bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        options = kwargs or {}
        if func is torch.empty:
            self._tensors += 1
            if self._tensors > MAX_TENSORS:
                raise _too_large(f"more than {MAX_TENSORS:,} tensors")
        elif func in TABLES and str(options.get("device")) != "meta":
            self._count(func(*args, **{**options, "device": "meta"}))
        elif func in MASKS and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
            self._count(args[0])
        return func(*args, **options)

    def _count(self, like: torch.Tensor) -> None:
        if like.nbytes > MAX_TABLE_BYTES:
            raise _too_large(f"a table of {like.nbytes:,} bytes, more than {MAX_TABLE_BYTES:,}")
        if like.nbytes >= COUNTED_FROM:
            self._bytes += like.nbytes
            if self._bytes > MAX_TABLES_BYTES:
                raise _too_large(f"tables of {self._bytes:,} bytes, more than {MAX_TABLES_BYTES:,}")


def _too_large(what: str) -> ModelError:
    return ModelError(
        f"the config asks for {what}", where="config.json", how="check the sizes in the file"
    )


UNTOUCHED_FROM = 1 << 20  # bytes

# Settings of a config that decide in what form a model's forward returns what it makes, and the
# form that is read here.
OUTPUTS: Mapping[str, bool] = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
}


def auto_class(config: PreTrainedConfig) -> type[Any]:
    """Return the class of `transformers` that makes the model of a config: where there is no causal
    one, the one of models that see images, or else of those that hear, since these train on text
    alone as well."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((kind for kind in kinds if type(config) in models_of(kind)), AutoModelForCausalLM)


def scores_texts(model: PreTrainedModel) -> bool:
    """Whether a model has the head of `AutoModelForSequenceClassification`: one output for a
    text, and no logits.
    """
    classifiers = models_of(AutoModelForSequenceClassification)
    return type(model.config) in classifiers and isinstance(model, classifiers[type(model.config)])


def meta_model(
    config: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    *,
    trust_remote_code: bool = False,
    scores: bool = False,
    kind: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Build the language model of `config`, as `auto_class` says, with every parameter on `meta`
    and every buffer real. Buffers (rotary tables, for one) are computed by the modules themselves:
    they are in no checkpoint. `ModelError`: `transformers` has no causal language model for this
    config, or it asks for sizes no model has. `dtype`: of the parameters; None: the one the config
    names, else float32. `attn_implementation`: as in `from_pretrained`; None: transformers' choice.
    `scores`: build the model that scores texts, with `config.num_labels` outputs. `kind`: another
    class to build."""
    asked: dict[str, Any] = (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, **asked}
    builder = kind or (AutoModelForSequenceClassification if scores else auto_class(config))
    for part in parts_of(config):
        # Older trainers left this in the file. Layers are recomputed under their leases; a
        # recomputation of their own would run when their weights are gone.
        if getattr(part, "gradient_checkpointing", False):
            part.gradient_checkpointing = False
        for name, usual in OUTPUTS.items():
            if getattr(part, name, usual) != usual:
                setattr(part, name, usual)
    try:
        # What they fuse is not fused here: it is in towers, through which no text goes. Nor is
        # anything registered, as `from_pretrained` does for the whole process.
        check_fusions(config)
        model = _build(builder, config, options, EmptyOnMeta())
        if any(buffer.is_meta for buffer in model.buffers()):  # one was made of an empty tensor
            model = _build(builder, config, options, nullcontext())
    except LemaError as error:
        raise ModelError(error.what, where=_location(config), how=error.how) from error
    except Exception as error:
        raise ModelError(
            "transformers cannot build this model as a "
            f"{'text classifier' if scores else 'causal language model'}: "
            f"{message_of(error)}",
            where=_location(config),
            how="`lema models` lists the types that stream"
            if attn_implementation is None
            else (
                f"attn_implementation is {attn_implementation!r}: install its packages, or "
                "remove the setting"
            ),
        ) from error
    model.tie_weights()  # building on `meta` made a parameter of its own for every name
    model.config.use_cache = False  # a captured cache would grow again on recomputation
    return model


def other_outputs(config: PreTrainedConfig) -> list[str]:
    """Name the settings of `OUTPUTS` that a config, or one of its parts, has otherwise.
    `meta_model` resets them: they change no number, and streamed layers leave nothing behind but
    their result."""
    names = (
        name
        for part in parts_of(config)
        for name, usual in OUTPUTS.items()
        if getattr(part, name, usual) != usual
    )
    return list(dict.fromkeys(names))


def compute_fast(model: PreTrainedModel, settings: LemaConfig, backend: Backend) -> str | None:
    """Under `arithmetic: fast` have the backend fuse what modules of a model's layers do, and
    return what it says of that. The model then computes attention by the backend's own
    implementation, too, where it has one, `transformers` would choose `sdpa` by itself, and the
    model's attention can be chosen."""
    if settings.arithmetic != "fast":
        return None
    if settings.attn_implementation is None:
        usual = (
            model.config.get_text_config()._attn_implementation == "sdpa"
            and model._can_set_attn_implementation()
        )
        if usual and (name := own_attention(backend)) is not None:
            model.set_attn_implementation(name)
    return fused(backend, model, find_layers(model)[1])


def _location(config: PreTrainedConfig) -> str:
    """Where a config comes from: its file, where it was read from one, and its type."""
    kind = f"model_type {config.model_type!r}"
    return f"{Path(config.name_or_path) / 'config.json'}: {kind}" if config.name_or_path else kind


class EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, which weights begin as, take no memory: not even an address, of which a
    large model would take so many that the heap is left full of holes. Large `torch.zeros`, which
    buffers begin as too, are real, but take memory only where they are written to."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        options = kwargs or {}
        if func is torch.zeros and not {"device", "out", "layout"} & options.keys():
            like = func(*args, **options, device="meta")
            if like.nbytes < UNTOUCHED_FROM:
                return func(*args, **options)
            # The system finds memory for these when they are first written; torch would write them
            # at once.
            pages = private_pages(like.nbytes)
            zeros = torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(like.shape)
            return zeros.requires_grad_(like.requires_grad)
        return func(*args, **({**options, "device": "meta"} if func is torch.empty else options))


def _build(
    builder: type[Any],
    config: PreTrainedConfig,
    options: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> PreTrainedModel:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), no_init_weights(), SizeLimit(), mode:
        if issubclass(builder, PreTrainedModel):
            options = {
                name: value for name, value in options.items() if name != "trust_remote_code"
            }
            model = builder._from_config(config, **options)
        else:
            model = builder.from_config(config, **options)
    assert isinstance(model, PreTrainedModel)
    if main_dtype(model) != torch.get_default_dtype():
        with SizeLimit():
            _make_buffers_again(model)
    return model


def main_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that a model was asked for in, in which it computes. `transformers` goes by
    the first parameter, and that may be one of those that some models have in float32 whatever is
    asked for. A model whose parameters were converted since has the dtype of the first one."""
    asked: object = getattr(model.config, "dtype", None)
    if isinstance(asked, torch.dtype) and any(
        parameter.dtype == asked for parameter in model.parameters()
    ):
        return asked
    first: torch.dtype = model.dtype
    return first


def _make_buffers_again(model: PreTrainedModel) -> None:
    """Make the buffers that are in no checkpoint as `from_pretrained` does, by the model's own
    initialisation. While the model was built its dtype was the default one, so what a buffer was
    computed of may have been rounded to it; `from_pretrained` makes such buffers a second time,
    when that is over."""

    def make(module: nn.Module, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            make(child, owner)
        if module._non_persistent_buffers_set:
            for name, tensor in chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            ):
                # As `from_pretrained` marks what a checkpoint has, so that it is left alone.
                tensor._is_hf_initialized = name not in module._non_persistent_buffers_set  # type: ignore[attr-defined] # transformers sets it so
            owner._init_weights(module)

    with torch.no_grad(), torch.random.fork_rng(devices=()), guard_torch_init_functions():
        make(model, model)


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Find the stack of decoder layers: its dotted name in `model`, and the list itself. It is
    looked for in what the model calls its decoder, so not in the towers of other modalities: first
    by the config's pipeline plan, then by what `transformers` marks as a layer to checkpoint, then
    by its length. `ModelError`: there is none, or several."""
    named = model.get_decoder()
    asked = (
        (name, module)
        for name, module in model.named_modules()
        if module is named and _outermost_lists(module, name)
    )
    root, decoder = next(asked, ("", model))  # some call their head a decoder
    lists = _outermost_lists(decoder, root)
    config: PreTrainedConfig = model.config
    plan = getattr(config, "base_model_pp_plan", None) or {}
    length = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    rules: tuple[Callable[[str, nn.ModuleList], bool], ...] = (
        lambda name, _: name.rpartition(f"{root}.")[2] in plan,
        lambda _, layers: all(isinstance(layer, GradientCheckpointingLayer) for layer in layers),
        lambda _, layers: len(layers) == length,
        lambda _, __: True,
    )
    matches: list[str] = []
    for rule in rules:
        if matches := [name for name, layers in lists.items() if rule(name, layers)]:
            break
    if len(matches) != 1:
        raise ModelError(
            "no stack of decoder layers was found"
            if not matches
            else "its layers form more than one stack",
            where=f"{_location(config)}: {', '.join(matches) or 'no list of modules'}",
            how="only models with one stack of decoder layers stream",
        )
    return matches[0], lists[matches[0]]


def _outermost_lists(decoder: nn.Module, root: str) -> dict[str, nn.ModuleList]:
    """The lists of modules that are in no other list, nor in a model within the model that reads
    no tokens.
    """
    lists: dict[str, nn.ModuleList] = {}
    ahead = [(root, decoder)]
    while ahead:
        name, module = ahead.pop()
        if isinstance(module, nn.ModuleList) and len(module):
            lists.setdefault(name, module)
        elif (
            module is decoder
            or not isinstance(module, PreTrainedModel)
            or module.main_input_name == "input_ids"
        ):
            inner = [
                (f"{name}.{child_name}".removeprefix("."), child)
                for child_name, child in module.named_children()
            ]
            ahead += reversed(inner)
    return lists


def find_towers(model: PreTrainedModel) -> list[str]:
    """Name the outermost modules of which text reaches no parameter: those that see images, for
    one. The model's own forward is run without values, on token ids and past its layers, and the
    parameters that it uses are noted. Of a model that does not run like that everything counts as
    reached."""
    name, layers = find_layers(model)
    near = [name.rpartition(".")[0]]
    outer_modules = find_embed_head(model)
    near += [
        path
        for path, module in model.named_modules()
        if any(module is end for end in outer_modules)
    ]
    if all(is_in(name, near) for name, _ in model.named_parameters()):
        return []  # nothing but a stack of layers, embeddings and a head: all of that reads text
    before = model.training
    try:
        unused = set.intersection(
            *(_unused(model.train(training), layers) for training in (True, False))
        )
    finally:
        model.train(before)
    within = {
        name: [
            parameter_name
            for parameter_name, _ in module.named_parameters(prefix=name, remove_duplicate=False)
        ]
        for name, module in model.named_modules()
    }
    towers = [name for name, inside in within.items() if inside and unused.issuperset(inside)]
    return [name for name in towers if not is_in(name.rpartition(".")[0], towers)]


def find_embed_head(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """Return what a model calls its input embeddings and its head; None: it has none, or its
    code does not say.
    """
    modules: list[nn.Module | None] = [None, None]
    finders: tuple[Callable[[], nn.Module | None], ...] = (
        model.get_input_embeddings,
        model.get_output_embeddings,
    )
    for end, find in enumerate(finders):
        with suppress(NotImplementedError):
            modules[end] = find()
    return modules[0], modules[1]


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Whether something of that name is one of the modules, or in one."""
    return any(not module or f"{name}.".startswith(f"{module}.") for module in modules)


class _Uses(TorchFunctionMode):
    """Notes the tensors that others are computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        if next(tensors_in([output]), None) is not None:  # asking for a dtype is no use
            self.seen |= {id(tensor) for tensor in tensors_in([args, kwargs])}
        return output


def _unused(model: PreTrainedModel, layers: nn.ModuleList) -> set[str]:
    """Name the parameters outside the layers that the model's forward does not use on token ids;
    none if it fails.
    """
    inside = {id(parameter) for parameter in layers.parameters()}

    def observe(run: Callable[[], Any]) -> set[str]:
        names = [
            (name, id(parameter))
            for name, parameter in model.named_parameters(remove_duplicate=False)
        ]
        uses = _Uses()
        with uses:
            run()
        return {
            name
            for name, parameter_id in names
            if parameter_id not in uses.seen and parameter_id not in inside
        }

    return past_layers(model, layers, observe) or set()
