"""Every setting of a run, checked before anything heavy is imported or opened."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from lema.config import types
from lema.config.adapter import AdapterSettings
from lema.config.backendsettings import backend_setting, backend_settings, check_backend_settings
from lema.config.batching import BatchSettings, disagreements_of_batches
from lema.config.objective import ObjectiveName, disagreements_of_objective
from lema.config.problems import Problem, SettingsError, problems_of, unknown_setting
from lema.config.results import ResultSettings
from lema.config.settings import OfAdapter, OfData, Refused, Said, Settings, Silent
from lema.errors import ConfigError, DiskError

__all__ = ["CONFIG_NAME", "LemaConfig"]

CONFIG_NAME = "lema_config.json"

# Settings that only earlier versions saved, one at least in every file they wrote. Such a file may hold others that are
# gone; in any other file an unknown setting is a slip.
_EARLIER = {"ram_buffer_size", "use_lora", "vram_fraction", "training_mode"}
_AT = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


class _First(Settings):
    """What stands first, in the order in which it is given by position; two settings of adapters are among it."""

    model_name_or_path: Silent[types.Location]
    """Model directory, one .safetensors file in such a directory, or hub id."""
    model_type: Silent[types.Name | None] = None
    """The `model_type` of the model's config.json, to check against; None takes what is there."""
    gbi_path: Silent[types.Location | None] = None
    """Weights to stream instead of the model directory's own: a .safetensors file or an index."""
    device: Silent[types.Name] = "auto"
    """Backend to run on; `lema backends` lists them. auto: the first that can run here, the processor last."""
    strategy: Silent[types.Strategy] = types.MemoryStrategy.STREAMING
    """`streaming`: weights stay on disk. `resident`: weights stay in host memory."""
    save_steps: Silent[types.NotNegative] = 500
    """Optimizer steps between checkpoints; 0: never."""
    output_dir: Silent[types.Location] = "output"
    """Directory for the adapter, checkpoints and metrics."""
    lora_rank: OfAdapter[types.Count] = 16
    lora_alpha: OfAdapter[types.Scale] = 32
    learning_rate: Said[Annotated[float, Field(ge=0)]] = 1e-4
    """Peak learning rate."""
    gradient_checkpointing: Silent[bool | Literal["auto"]] = "auto"
    """Recompute each layer in the backward, so that only its input is kept; auto: no more than memory asks for."""


class LemaConfig(ResultSettings, BatchSettings, AdapterSettings, _First):
    """Every setting of a run. Unknown names and wrong types are errors that list every problem at once.

    Settings may be given by position, in the order below, or by name. Assigning one checks it too.

    Raises:
        ConfigError: a setting is unknown, missing, of the wrong type, out of range, or contradicts another.
    """

    model_config = ConfigDict(validate_assignment=True)

    dtype: Refused[types.Dtype | None] = None
    """Type of the frozen weights; None: the checkpoint's."""
    attn_implementation: Said[types.Name | None] = None
    """Attention of `transformers` ("eager", "sdpa", ...); None: its choice."""
    micro_batch_size: Silent[types.AutoCount] = None
    """Rows computed at once, of which a pair has two; None or auto: the whole batch, or as much as `device_memory`
    holds. With dropout fewer draw otherwise, without it nothing but rounding changes."""
    gradient_accumulation_steps: Refused[Annotated[int, Field(ge=1, le=100_000)]] = 1
    """Batches per optimizer step."""
    max_grad_norm: Said[Annotated[float, Field(gt=0)] | None] = None
    """Gradients longer than this are scaled down to it; None: no clipping."""
    prefetch_depth: Silent[types.AutoCount] = None
    """Layers read ahead of the one being computed; None or auto: 2, or 1 where memory is short."""
    device_memory: Silent[types.Memory | None] = "auto"
    """Limit of device memory: "8GB", "512MiB", a fraction, bytes; auto: nine tenths of what is free; None: what
    streaming needs, whatever there is."""
    experts_per_slot: Silent[types.Count | Literal["auto"] | None] = "auto"
    """Experts that are leased together, of layers with stacked experts; what else such a layer has is leased beside
    them. auto: all, or as many as `device_memory` holds; None: all, in whole layers."""
    host_memory: Silent[types.Memory | None] = None
    """Limit of host memory for weights and activations, written in the same ways."""
    seed: Refused[Annotated[int, Field(ge=0, lt=2**32)]] = 42
    """Seed of adapters, shuffling and dropout."""
    loss_chunk_tokens: Said[types.AutoCount] = None
    """Tokens whose logits exist at once; None or auto: 1024, or fewer where memory is short."""
    batch_size: Refused[types.Count] = 8
    """Rows per batch, pairs where rows come in pairs; of all processes together where there are several."""
    max_length: OfData[types.Count | None] = None
    """Longest row, in tokens; None: 1024, or the model's positions where they are fewer."""
    overlong: OfData[Literal["truncate", "drop", "error"]] = "truncate"
    """What becomes of longer rows."""
    packing: OfData[types.Packing] = False
    """Join rows into packs of `max_length` tokens, in which none attends to another; a row of a batch is then a pack.
    "wrapped": rows of any length end to end, cut at every `max_length` tokens, for raw text."""
    columns: OfData[types.Columns] = Field(default_factory=dict)
    """What the data call the columns read here: {prompt: question, completion: answer}; `role` and `content` are those
    of a message."""
    chat_template: OfData[types.Name | None] = None
    """A .jinja file, the Jinja text itself, or one of the tokenizer's templates by name; None: the tokenizer's own."""
    train_on: OfData[Literal["assistant", "last", "all", "completion"]] = "assistant"
    """Which words are trained on: `assistant`: all answers; `last`: the last one; `completion`: those after the last
    user's message; `all`: everything, prompts too."""
    data_cache: Silent[bool | types.Location] = True
    """The folder that keeps the tokens of large data for later starts; true: one below the user's cache directory
    (XDG_CACHE_HOME); false: none, and data are tokenised in memory at every start."""
    shuffle: Refused[bool] = True
    """Draw the rows of each epoch in an order made from the seed."""
    num_train_epochs: Said[Annotated[float, Field(gt=0)]] = 1.0
    """Passes over the data; `max_steps` overrides it."""
    max_steps: Said[types.Count | None] = None
    """Optimizer steps to train for; None: as `num_train_epochs` says."""
    weight_decay: Said[Annotated[float, Field(ge=0)]] = 0.0
    """AdamW's decoupled weight decay (arXiv:1711.05101)."""
    adam_beta1: Said[types.Beta] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Said[types.Beta] = 0.999
    """Decay of AdamW's second moment."""
    optim: Refused[types.Optimizer] = "adamw_torch"
    """The optimizer of adapters, by `transformers`' name; weights that train themselves have adamw_torch."""
    optim_args: Refused[types.Name | None] = None
    """Further arguments of that optimizer, as `transformers` takes them: "alpha=2,beta3=0.999" of ademamix."""
    loraplus_lr_ratio: Refused[Annotated[float, Field(gt=0)] | None] = None
    """LoRA+ (arXiv:2402.12354): the learning rate of adapters' B is so many times that of A; None: the same."""
    adam_epsilon: Said[Annotated[float, Field(gt=0)]] = 1e-8
    """Added to AdamW's denominator."""
    lr_scheduler_type: Said[types.Scheduler] = "linear"
    """How the learning rate moves, by `transformers`' name; or wsd, wsds, cosine_rewarm (`lema.engine.schedules`)."""
    lr_scheduler_kwargs: Said[dict[str, Any] | None] = None
    """What else a schedule of `transformers` takes: {min_lr_rate: 0.1} of cosine_with_min_lr, for one."""
    warmup_steps: Said[types.NotNegative] = 0
    """Optimizer steps over which the learning rate rises from 0; 0.1 and such, below 1, are taken as `warmup_ratio`."""
    warmup_ratio: Said[types.Beta] = 0.0
    """The same as a fraction of all steps; where both are 0, it is 0.01 for wsd, wsds and cosine_rewarm."""
    train_data: OfData[types.DataFiles | None] = None
    """Files, directories or globs of .jsonl, .txt (and of either with .gz or .zst), .json, .csv, .parquet or .arrow; a
    data set of the hub, {path: org/name, name: subset, split: train}; or several of them by name."""
    eval_data: Said[types.DataFiles | None] = None
    """Data to evaluate on, given in the same ways."""
    eval_split: OfData[types.RowSplit | None] = None
    """Or rows to hold back from `train_data`: a fraction, or a number of rows."""
    max_train_samples: OfData[types.Count | None] = None
    """The first so many rows to train on are used, after some were held back; None: all."""
    max_eval_samples: Said[types.Count | None] = None
    """The same of the rows to evaluate on."""
    adapter_name_or_path: Silent[types.Location | None] = None
    """A saved PEFT adapter to train on from, a directory or a hub id, with its own rank, targets and options; None: a
    fresh one."""
    neftune_noise_alpha: Said[Annotated[float, Field(gt=0)] | None] = None
    """Noise on the input's embeddings while training (NEFTune, arXiv:2310.05914), as `transformers` draws it."""
    revision: Silent[types.Name | None] = None
    """Branch, tag or commit of a hub id; None: its main branch. A directory has none."""
    boundary_activations: Silent[Literal["auto", "device", "host", "disk"]] = "auto"
    """Where each layer's inputs wait from the forward to the backward; auto: the first of the others they fit."""
    offload_dir: Silent[types.Location | None] = None
    """Directory for what is written to disk for lack of memory, such as those inputs; None: `output_dir`."""
    cache_frozen_prefix: Silent[bool] = False
    """Keep what the layers below the lowest adapter make of each batch on disk: later epochs leave those layers out."""
    tf32: Said[bool] = False
    """Let fp32 matrix products use TF32, which keeps 10 bits of their inputs, on devices that have it."""
    torch_compile: Said[bool] = False
    """Compile a decoder layer with `torch.compile`, once for all layers that are alike. Changes the last bits."""
    page_locked: Silent[bool | None] = None
    """Lock host memory that the device copies from; None: as much as the system allows."""
    embeddings: Silent[Literal["auto", "device", "host", "disk"]] = "auto"
    """Where frozen embeddings wait whose rows are given to the device for the tokens that are there: in host memory, or
    in the model's files; device: they are all on the device. auto: those of 16 MiB and more in the files."""
    head: Said[Literal["auto", "device", "stream"]] = "auto"
    """Where the head's weight is: on the device, or streamed in pieces after the layers, twice in a step; that changes
    the last bits. auto: streamed where `device_memory` does not hold it, if it has 16 MiB and more."""
    shard_weights: Silent[bool] = False
    """With several processes: each reads 1/N of every layer, and gets the rest from the others, device to device."""
    shard_optimizer: Silent[bool] = False
    """With several processes: each has AdamW's moments of 1/N of the adapters, updates these, and gets the others from
    the others (ZeRO-1). It changes no number. Weights that train themselves have theirs in host memory, undivided."""
    activation_offloading: Silent[types.Offloading] = False
    """Have what waits for the backward wait off the device, which costs copying it there and back: the layers' inputs
    with `gradient_checkpointing`; without it all that layers keep, so that nothing is computed twice. true: in host
    memory; "disk": in `offload_dir`; "hidden_states": inputs of layers alone; "legacy": true, waiting for each copy."""
    tensor_parallel_size: Said[types.Count | None] = None
    """Processes that share each layer, every one with its part of it; None: all on a backend made for that, else 1."""
    sequence_parallel: Said[bool] = False
    """With those: between attention and MLP each process holds its part of the sequence only."""
    pad_to_multiple_of: Said[types.Count | None] = None
    """Make rows longer, to a multiple of so many tokens: few shapes on devices that compile each, one where it is
    `max_length`. Dropout is drawn for what is added, too; without it nothing but rounding changes. None: no longer
    than the longest of their micro-batch, or what `sequence_parallel` needs."""
    max_skipped_steps: Silent[types.NotNegative] = 0
    """Steps of a run that may be dropped for a loss or gradient that is NaN or infinite; at the next one it ends."""
    check_base_weights: Silent[bool] = True
    """Refuse a model with a weight that is NaN or infinite; each is looked at when it is first read."""
    hang_timeout: Silent[Annotated[float, Field(gt=0)] | None] = None
    """Seconds without a move after which the process ends; None: the stacks of its threads are written, no more."""
    objective: Refused[ObjectiveName] = "sft"
    """What is trained on: `sft`, tokens of rows; from pairs of a `chosen` and a `rejected` row `dpo`, `ipo`, `orpo` or
    `simpo`; from rows with a `label`, or from pairs, `kto`. The reference is the model without adapters."""
    loss_type: Said[types.Name | None] = None
    """A form of its loss, by TRL's name. sft: nll or dft; dpo: sigmoid, hinge, robust, ...; kto: kto or
    apo_zero_unpaired. None: the first of these."""
    beta: Said[Annotated[float, Field(gt=0)] | None] = None
    """How far a preference loss keeps the model at its reference, or how much it weighs; None: 0.1."""
    label_smoothing: Said[Annotated[float, Field(ge=0, lt=0.5)] | None] = None
    """Chance that a pair is the wrong way round: of simpo, and of dpo's robust and exo_pair; None: 0."""
    label_smoothing_factor: Said[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """Of sft: each target is 1 less this, which is spread over the vocabulary; `eval_loss` has it too."""
    router_aux_loss_coef: Said[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the routers' load-balancing loss beside that of sft; None: as config.json has it, with
    output_router_logits, else 0."""
    simpo_gamma: Said[Annotated[float, Field(ge=0)] | None] = None
    """Margin that simpo asks for between chosen and rejected; None: 0.5."""
    cpo_alpha: Said[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the chosen rows' own cross-entropy beside simpo; None: 0, as SimPO is published."""
    desirable_weight: Said[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the desirable rows of kto; None: 1."""
    undesirable_weight: Said[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the undesirable rows of kto; None: 1."""
    arithmetic: Said[Literal["exact", "fast"]] = "exact"
    """`fast`: LoRA linears that read one input share one product with their A, each B is added in place, and one
    backward serves them. Equal to PEFT but for rounding; what it does not cover is computed as PEFT does."""
    backend_settings: Said[dict[str, Any]] = Field(default_factory=dict)
    """What only one backend has, by name. It may be given as any other setting."""

    def __init__(self, *positional: Any, **settings: Any) -> None:
        names = list(type(self).model_fields)
        if len(positional) > len(names):
            raise ConfigError(f"{len(positional)} settings given by position; there are {len(names)}")
        by_position = dict(zip(names, positional, strict=False))
        if twice := sorted(by_position.keys() & settings.keys()):
            raise SettingsError([Problem(key, f"{key} is given by position and by name") for key in twice])
        given, own = settings.get("backend_settings") or {}, settings.keys() & backend_settings().keys()
        if (found := {key: settings.pop(key) for key in own}) and isinstance(given, Mapping):
            settings["backend_settings"] = {**given, **found}
        settings = by_position | settings
        # As transformers 5 has it, warmup_steps below 1 are a share of all steps.
        if (
            isinstance(share := settings.get("warmup_steps"), float)
            and 0 <= share < 1
            and not settings.get("warmup_ratio")
        ):
            settings["warmup_ratio"] = settings.pop("warmup_steps")
        super().__init__(**settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields:
            raise SettingsError([unknown_setting(name, type(self).model_fields)])
        before, given = dict(self.__dict__), set(self.model_fields_set)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            # Checks between settings run after pydantic has stored the value: a refused value must not stay.
            self.__dict__.update(before)
            self.__pydantic_fields_set__.intersection_update(given)
            raise SettingsError(problems_of(error, self.defaults())) from error

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in backend_settings():
            return self.backend_settings.get(name, backend_setting(name).default)
        return super().__getattr__(name)  # type: ignore[misc] # pydantic hides it from type checkers

    def disagreements(self) -> Iterator[Problem]:
        """Yield what is wrong between settings, each of which is right by itself."""
        yield from super().disagreements()
        for key, what in check_backend_settings(self.backend_settings):
            yield Problem(key, what)
        for one, other in (("eval_data", "eval_split"), ("warmup_steps", "warmup_ratio")):
            if getattr(self, one) and getattr(self, other):
                yield Problem("", f"{one} and {other} exclude each other; leave one of them out")
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            yield Problem("", f"warmup_steps ({self.warmup_steps}) is more than max_steps ({self.max_steps})")
        yield from self._about_offloading()
        yield from disagreements_of_objective(self)
        yield from disagreements_of_batches(self)
        if self.arithmetic == "fast" and self.torch_compile:
            what = "torch_compile makes its own of what arithmetic: fast computes otherwise; leave one of them out"
            yield Problem("arithmetic", what)
        if self.packing and self.objective != "sft":
            what = f"objective: {self.objective} is a loss of rows, which are not joined"
            yield Problem("packing", what, "leave it out")
        if self.packing == "wrapped" and self.overlong != "truncate":
            yield Problem("overlong", "packing: wrapped cuts rows of any length, and none is too long", "leave it out")
        if self.cache_frozen_prefix and self.shuffle and self.batch_size > 1:
            what = "shuffled rows make other batches in each epoch; set shuffle: false or batch_size: 1"
            yield Problem("cache_frozen_prefix", what)
        if self.embeddings in ("host", "disk") and self.lora_trainable_token_indices is not None:
            what = "lora_trainable_token_indices trains rows of the embeddings; set it to auto"
            yield Problem("embeddings", what)
        if self.head == "stream" and not self.plain_cross_entropy:
            what = "streamed in pieces it serves objective: sft with loss_type: nll, and no label smoothing"
            yield Problem("head", f"{what}; set it to auto")
        if self.neftune_noise_alpha and (self.cache_frozen_prefix or self.sequence_parallel):
            other = "cache_frozen_prefix keeps" if self.cache_frozen_prefix else "with sequence_parallel a process has"
            what = f"{other} other noise than neftune_noise_alpha draws; leave one of them out"
            yield Problem("neftune_noise_alpha", what)
        if self.shard_weights and self.cache_frozen_prefix:
            what = "with cache_frozen_prefix processes leave out layers that others need; set one to false"
            yield Problem("shard_weights", what)
        if self.shard_optimizer and self.optim != "adamw_torch":
            what = f"the state of {self.optim} may belong to several parameters together; set it to false"
            yield Problem("shard_optimizer", what)
        if self.max_length and self.pad_to_multiple_of and self.max_length % self.pad_to_multiple_of:
            what = f"max_length is {self.max_length}, no multiple of {self.pad_to_multiple_of}"
            yield Problem("pad_to_multiple_of", what)

    def _about_offloading(self) -> Iterator[Problem]:
        mode, place = self.activation_offloading, self.boundary_activations
        if place in ("host", "disk") and not self.gradient_checkpointing:
            what = "without gradient_checkpointing no layer's input waits; set it to true"
            yield Problem("boundary_activations", what)
        if mode == "hidden_states" and not self.gradient_checkpointing:
            what = "without gradient_checkpointing layers keep more than their inputs; set one of the two to true"
            yield Problem("activation_offloading", what)
        offloaded = self.offloading_tier
        if offloaded is not None and self.gradient_checkpointing and place not in ("auto", offloaded):
            what = f"with activation_offloading the layers' inputs wait {_AT[offloaded]}, not {_AT[place]}"
            yield Problem("boundary_activations", f"{what}; leave one out")

    @property
    def plain_cross_entropy(self) -> bool:
        """Whether the loss of a token is its cross-entropy, which the head in pieces computes."""
        return self.objective == "sft" and self.loss_type != "dft" and not self.label_smoothing_factor

    @property
    def offloading_tier(self) -> Literal["host", "disk"] | None:
        """Where `activation_offloading` lets things wait; None: it is off."""
        if self.activation_offloading is False:
            return None
        return "disk" if self.activation_offloading == "disk" else "host"

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting by name, None for those that only a backend has."""
        return super().defaults() | dict.fromkeys(backend_settings())

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema of every setting, with its meaning and default; editors complete YAML from it."""
        schema = cls.model_json_schema()
        for name in backend_settings():
            about = backend_setting(name)
            schema["properties"][name] = {
                "default": about.default,
                "description": about.meaning,
                "enum": list(about.choices),
                "title": name.replace("_", " ").title(),
            }
        return schema

    def save_pretrained(self, directory: str | PathLike[str]) -> None:
        """Write `lema_config.json` into `directory`, made if need be; on `DiskError` what was there is untouched."""
        file = Path(directory) / CONFIG_NAME
        part = file.with_name(f".{CONFIG_NAME}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with part.open("w", encoding="utf-8") as out:
                out.write(json.dumps(self.to_dict(), indent=2) + "\n")
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
        except OSError as error:
            # Cleaning up fails where writing did; the first failure is the one to tell.
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise DiskError(f"cannot write the config: {error.strerror}", where=str(file)) from error

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str], **overrides: Any) -> Self:
        """Read `lema_config.json` from `directory`; settings given here replace those of the file. Those that are gone
        are left out, with a warning, of a file that an earlier version wrote. `ConfigError`: there is no such file, it
        is not JSON, or a setting is wrong."""
        file = Path(directory) / CONFIG_NAME
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the config: {error.strerror}", where=str(file)) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {error}", where=str(file)) from error
        if not isinstance(values, dict):
            raise ConfigError("a config is a JSON object", where=str(file))
        if _EARLIER & values.keys():
            gone = [name for name in values if name not in cls.model_fields]
            warnings.warn(f"{file} is of an earlier version; ignored: {', '.join(gone)}", stacklevel=2)
            values = {name: value for name, value in values.items() if name not in gone}
        try:
            return cls(**{**values, **overrides})
        except SettingsError as error:
            raise error.located({"": str(file)}, overrides) from error.__cause__
