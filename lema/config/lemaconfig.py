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
from lema.config.data.rows import RowSettings
from lema.config.data.sets import DataFiles
from lema.config.objective import (
    PREFERENCE_LEARNING_RATE,
    ObjectiveName,
    Reference,
    disagreements_of_objective,
    is_preference,
)
from lema.config.problems import Problem, SettingsError, problems_of, unknown_setting
from lema.config.results import ResultSettings
from lema.config.settings import OfAdapter, OfData, Refused, Reported, Settings, Silent
from lema.errors import ConfigError, DiskError, unreadable

__all__ = ["CONFIG_NAME", "LemaConfig"]

CONFIG_NAME = "lema_config.json"

# Settings that only earlier versions saved, one at least in every file they wrote. Such a file may
# hold others that are gone; in any other file an unknown setting is a mistake.
_EARLIER = {"ram_buffer_size", "use_lora", "vram_fraction", "training_mode"}
DIVIDED = "context_parallel_size"
_IN_CHUNKS = "do not go through layers in chunks"
_AT = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


class _First(Settings):
    """The first settings, in the order of positional arguments; two settings of adapters are
    among them.
    """

    model_name_or_path: Silent[types.Location]
    """A model directory, a .safetensors file in such a directory, or a hub id."""
    model_type: Silent[types.Name | None] = None
    """The `model_type` that the model's config.json must have; None: any."""
    gbi_path: Silent[types.Location | None] = None
    """A .safetensors file or an index to stream from, instead of the weights in the model
    directory.
    """
    device: Silent[types.Name] = "auto"
    """Backend to run on; `lema backends` lists them. auto: the first that can run here, the CPU
    last.
    """
    strategy: Silent[types.Strategy] = types.MemoryStrategy.STREAMING
    """`streaming`: weights stay on disk. `resident`: weights stay in host memory."""
    save_steps: Silent[types.NotNegative] = 500
    """Optimizer steps between checkpoints; 0: never."""
    output_dir: Silent[types.Location] = "output"
    """Directory for the adapter, checkpoints and metrics."""
    lora_rank: OfAdapter[types.Count] = 16
    lora_alpha: OfAdapter[types.Scale] = 32
    learning_rate: Reported[Annotated[float, Field(ge=0)]] = 1e-4
    """Peak learning rate. Not given: 1e-4 for sft, 5e-6 for objectives that compare rows."""
    gradient_checkpointing: Silent[bool | Literal["auto"]] = "auto"
    """Recompute each layer in the backward, and keep only its input; auto: recompute only if
    memory requires it.
    """


class LemaConfig(RowSettings, ResultSettings, BatchSettings, AdapterSettings, _First):
    """Every setting of a run. Unknown names and wrong types are errors that list every problem at
    once.

    Settings may be given by position, in the order below, or by name. Assigning one checks it too.

    Raises:
        ConfigError: a setting is unknown, missing, of the wrong type, out of range, or contradicts
            another.
    """

    model_config = ConfigDict(validate_assignment=True)

    dtype: Refused[types.Dtype | None] = None
    """Type of the frozen weights; None: the checkpoint's."""
    attn_implementation: Reported[types.Name | None] = None
    """Attention implementation of `transformers` ("eager", "sdpa", ...); None: the default of
    `transformers`.
    """
    micro_batch_size: Silent[types.AutoCount] = None
    """Rows that are computed at once; a pair is two rows. None or auto: the whole batch, or as many
    as `device_memory` holds. It changes results only by rounding, and with dropout also the random
    numbers. Rotary embeddings of type `dynamic` or `longrope` go by the longest of these rows, as
    in `transformers`, if it is longer than the model's original length: results then depend on
    which rows are computed at once."""
    gradient_accumulation_steps: Refused[Annotated[int, Field(ge=1, le=100_000)]] = 1
    """Batches per optimizer step."""
    max_grad_norm: Reported[Annotated[float, Field(gt=0)] | None] = 1.0
    """Gradients with a larger norm are scaled down to this norm; None: no clipping."""
    prefetch_depth: Silent[types.AutoCount] = None
    """Layers that are read ahead of the current layer; None or auto: 2, or 1 if memory is short."""
    device_memory: Silent[types.Memory | None] = "auto"
    """Limit of device memory: "8GB", "512MiB", a fraction, or bytes; auto: nine tenths of the free
    memory; None: no limit, the run takes what streaming needs."""
    experts_per_slot: Silent[types.Count | Literal["auto"] | None] = "auto"
    """For layers with stacked experts: the number of experts that are leased together. The rest of
    the layer is leased with them. auto: all, or as many as `device_memory` holds; None: all, in
    whole layers."""
    host_memory: Silent[types.Memory | None] = None
    """Limit of host memory for weights and activations, in the same forms."""
    seed: Refused[Annotated[int, Field(ge=0, lt=2**32)]] = 42
    """Seed of adapters, shuffling and dropout."""
    loss_chunk_tokens: Reported[types.AutoCount] = None
    """Tokens whose logits exist at once; None or auto: 1024, or fewer if memory is short."""
    batch_size: Refused[types.Count] = 8
    """Rows per batch, or pairs for objectives with pairs; all processes together."""
    max_length: OfData[types.Count | None] = None
    """Longest row, in tokens; None: 1024, or the model's positions if these are fewer."""
    overlong: OfData[Literal["truncate", "drop", "error"]] = "truncate"
    """What happens to longer rows."""
    packing: OfData[types.Packing] = False
    """Join rows into packs of `max_length` tokens. A row of a batch is then a pack, and rows in a
    pack do not attend to each other. "wrapped": join rows of any length and cut every `max_length`
    tokens, for raw text. "bfd": the packs of TRL's strategy of that name, made of each thousand
    rows in the order of the data."""
    image_folder: Silent[types.Location | None] = None
    """The folder below which the images, videos and sounds lie that rows name by path; paths are
    relative to it. None: the folder of each data file, or the current one for rows from memory."""
    image_urls: Silent[bool] = False
    """Fetch images, videos and sounds that rows name by URL (http, https), once at each start."""
    max_image_pixels: Silent[types.Count] = 50_000_000
    """The most pixels of an image, or of a frame, by its header, before it is decoded; four times
    as many for all images of a row, and for the frames of a video that the model is shown."""
    max_image_bytes: Silent[types.Bytes] = 32 * 1024**2
    """The most bytes of an image's file: "1MB", "32MiB", or bytes."""
    max_media_bytes: Silent[types.Bytes] = 512 * 1024**2
    """The most bytes of the file of a video or a sound."""
    max_media_seconds: Silent[types.Positive] = 1800.0
    """The most seconds of a video or a sound, by its header, before it is decoded."""
    max_video_frames: Silent[types.Count] = 768
    """The most frames of a video that the model is shown; a video of more is refused."""
    video_fps: OfData[types.Positive | None] = None
    """How many frames of each second of a video the model is shown. None: as the settings of the
    model's processor say, which may be all. A list of frames is shown as it is."""
    columns: OfData[types.Columns] = Field(default_factory=dict)
    """Your names of the columns, by LEMA's names: {prompt: question, completion: answer}. `role`
    and `content` are fields of a message. null, or NONE: a column of that name is not read."""
    chat_template: OfData[types.Name | None] = None
    """A .jinja file, the Jinja text itself, or a name: of a template of the tokenizer's, or of a
    published format (docs/chat-templates.md). None: the tokenizer's default."""
    train_generation_prompt: OfData[bool] = False
    """Train also on tags that the chat template's prompt for generation gives, such as an opened
    `<think>`. The model never writes them there."""
    template_date: OfData[types.Day | None] = None
    """The date, YYYY-MM-DD, that a chat template is told which writes the day's date; None: that of
    the run's first start, which every resume keeps."""
    train_on: OfData[
        Literal["assistant", "last", "all", "completion", "contents", "all_but_prompts"]
    ] = "assistant"
    """Which words are trained on. `assistant`: all answers; `last`: the last answer; `completion`:
    the answers after the user's last message; `all`: everything, including prompts;
    `contents`: the words of answers and the `eot_tokens` that end them, but nothing that the chat
    template writes around the words, as axolotl has it; `all_but_prompts`: everything but what a
    column `prompt` holds, as TRL has it by default."""
    data_cache: Silent[bool | types.Location] = True
    """The folder that keeps the tokens of large data for later starts. true: a folder in the user's
    cache directory (XDG_CACHE_HOME); false: no folder, and every start tokenises the data in
    memory."""
    shuffle: Refused[bool | Literal["transformers", "sequential"]] = True
    """Draw the rows of each epoch in a random order that the seed determines. "transformers": in
    the order in which its Trainer draws them. A batch then keeps that order within its
    micro-batches, and the last step of an epoch takes no batches of the next one. "sequential":
    the same in the order of the data, as with Trainer's strategy of that name."""
    data_seed: Refused[Annotated[int, Field(ge=0, lt=2**32)] | None] = None
    """Seed of the order of rows; None: `seed`."""
    num_train_epochs: Reported[Annotated[float, Field(gt=0)]] = 1.0
    """Passes over the data; `max_steps` overrides it."""
    count_steps_by: Refused[Literal["batches", "rows"]] = "batches"
    """How epochs become steps: `batches` of an epoch, the last of which may be smaller; `rows`: all
    rows of all epochs, divided by those of a step and rounded up, as axolotl ends its runs."""
    max_steps: Reported[types.Count | None] = None
    """Optimizer steps of the run; None: `num_train_epochs` decides."""
    weight_decay: Reported[Annotated[float, Field(ge=0)]] = 0.0
    """AdamW's decoupled weight decay (arXiv:1711.05101)."""
    adam_beta1: Reported[types.Beta] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Reported[types.Beta] = 0.999
    """Decay of AdamW's second moment."""
    optim: Refused[types.Optimizer] = "adamw_torch"
    """The optimizer of adapters, by `transformers`' name. Weights of the model that train always
    use adamw_torch.
    """
    optim_args: Refused[types.Name | None] = None
    """Further arguments of the optimizer in the form of `transformers`, such as
    "alpha=2,beta3=0.999" for ademamix.
    """
    loraplus_lr_ratio: Refused[Annotated[float, Field(gt=0)] | None] = None
    """LoRA+ (arXiv:2402.12354): the learning rate of B divided by that of A; None: they are the
    same.
    """
    adam_epsilon: Reported[Annotated[float, Field(gt=0)]] = 1e-8
    """Added to AdamW's denominator."""
    lr_scheduler_type: Reported[types.Scheduler] = "linear"
    """Schedule of the learning rate, by `transformers`' name; or wsd, wsds, cosine_rewarm
    (`lema.engine.schedules`).
    """
    lr_scheduler_kwargs: Reported[dict[str, Any] | None] = None
    """Further arguments of a `transformers` schedule, such as {min_lr_rate: 0.1} for
    cosine_with_min_lr.
    """
    warmup_steps: Reported[types.AutoSteps] = None
    """Optimizer steps in which the learning rate rises from 0. None or auto: 3 % of all steps,
    rounded down, at most 100, and 2 instead of 1; none with `warmup_ratio`. A number below 1, such
    as 0.1, sets `warmup_ratio`."""
    warmup_ratio: Reported[types.Beta] = 0.0
    """The same as a fraction of all steps. Without both, wsd, wsds and cosine_rewarm use 0.01."""
    warmup_rounding: Reported[Literal["up", "down"]] = "up"
    """How a fraction becomes steps with schedules of `transformers`: `up`, as its Trainer rounds;
    `down`, and 2 instead of 1, as axolotl does."""
    train_data: OfData[DataFiles | None] = None
    """Files, directories or globs of .jsonl, .txt (also .gz or .zst of these), .json, .csv,
    .parquet or .arrow; a data set of the hub, {path: org/name, name: subset, split: train}; a
    mapping that also says how rows are read (docs/data.md); or several data sets with names."""
    eval_data: Reported[DataFiles | None] = None
    """Data to evaluate on, in the same forms."""
    eval_split: OfData[types.RowSplit | None] = None
    """Instead: rows to hold back from `train_data`, as a fraction or a number of rows."""
    preshuffle: OfData[bool] = False
    """Shuffle all rows once with `seed` as the library `datasets` does, before the split and before
    the rows of an epoch are drawn; `eval_split` then holds back the last ones, as axolotl does."""
    max_train_samples: OfData[types.Count | None] = None
    """Train only on the first N rows that are left after the split; None: on all."""
    max_eval_samples: Reported[types.Count | None] = None
    """Evaluate only on the first N rows; None: on all."""
    adapter_name_or_path: Silent[types.Location | None] = None
    """A saved PEFT adapter to continue from: a directory or a hub id. Its rank, targets and options
    apply. None: a new adapter."""
    neftune_noise_alpha: Reported[Annotated[float, Field(gt=0)] | None] = None
    """Noise on the input embeddings in training (NEFTune, arXiv:2310.05914), drawn as
    `transformers` draws it.
    """
    revision: Silent[types.Name | None] = None
    """Branch, tag or commit of a hub id; None: its main branch. A directory has no revisions."""
    boundary_activations: Silent[Literal["auto", "device", "host", "disk"]] = "auto"
    """Where the inputs of layers wait for the backward; auto: the first of the other places that
    has room.
    """
    offload_dir: Silent[types.Location | None] = None
    """Directory for data that does not fit in memory, such as the inputs of layers; None:
    `output_dir`.
    """
    cache_frozen_prefix: Silent[bool] = False
    """Write the output of the layers below the lowest adapter to disk. Later epochs then skip
    these layers.
    """
    tf32: Reported[bool] = False
    """Allow TF32 for fp32 matrix products, which keeps 10 bits of their inputs, on devices that
    have it.
    """
    deterministic: Reported[bool] = False
    """Compute the same bits in every run and after every resumption, also on devices whose
    operations add in the order in which numbers arrive. Slower there; an operation without such a
    form is an error. CPUs do so anyway."""
    torch_compile: Reported[bool] = False
    """Compile one decoder layer of each kind with `torch.compile`, and keep the compiled code in
    the user's cache directory for later starts (or in TORCHINDUCTOR_CACHE_DIR). This changes the
    last bits."""
    page_locked: Silent[bool | None] = None
    """Lock the host memory that the device copies from; None: as much as the system allows."""
    embeddings: Silent[Literal["auto", "device", "host", "disk"]] = "auto"
    """Where frozen embeddings stay: in the model's files or in host memory, from where the device
    gets the rows of the current tokens, or whole on the device. auto: tables of 16 MiB and more
    stay in the files."""
    head: Reported[Literal["auto", "device", "stream"]] = "auto"
    """Where the head's weight is: on the device, or streamed in pieces after the layers, twice per
    step, which changes the last bits. auto: streamed if `device_memory` does not hold it and it has
    16 MiB or more."""
    shard_weights: Silent[bool] = False
    """With several processes: each reads 1/N of every layer, and gets the rest from the other
    devices.
    """
    shard_optimizer: Silent[bool] = False
    """With several processes: each keeps AdamW's moments of 1/N of the adapters, updates that part,
    and sends it to the others (ZeRO-1). No number changes. It does not apply to weights of the
    model that train."""
    activation_offloading: Silent[types.Offloading] = False
    """Move tensors that wait for the backward off the device: with `gradient_checkpointing` the
    inputs of layers, without it everything that layers keep, so that nothing is recomputed. true:
    to host memory; "disk": to `offload_dir`; "hidden_states": only inputs of layers; "legacy": as
    true, and wait for each copy."""
    tensor_parallel_size: Reported[types.Count | None] = None
    """Processes that hold each layer together; None: all processes on a backend that divides
    layers, otherwise 1.
    """
    sequence_parallel: Reported[bool] = False
    """With `tensor_parallel_size`: between attention and MLP, each process holds only its part
    of the sequence.
    """
    pad_to_multiple_of: Reported[types.Count | None] = None
    """Pad rows to a multiple of N tokens, so that devices that compile see few shapes; with N equal
    to `max_length` they see one. It changes results only by rounding, with dropout also the random
    numbers, and with rotary embeddings of type `dynamic` or `longrope` as `micro_batch_size` does.
    None: pad to the longest row of the micro-batch, or as `sequence_parallel` needs."""
    max_skipped_steps: Silent[types.NotNegative] = 0
    """How many steps a run may drop because of NaN or infinity in the loss or gradients; one
    more ends the run.
    """
    check_base_weights: Silent[bool] = True
    """Refuse a model whose weights contain NaN or infinity. Each weight is checked when it is
    first read.
    """
    hang_timeout: Silent[Annotated[float, Field(gt=0)] | None] = None
    """Seconds without progress after which the process ends; None: it only writes the stacks of
    its threads.
    """
    rope_parameters: Refused[types.RopeParameters | None] = None
    """Rotary parameters that replace the model's own, as `rope_parameters` of a config.json has
    them, for rows that are longer than the model was made for: {rope_type: yarn, factor: 4.0}. What
    is left out of the base and of layer types is the model's. The adapter keeps them, and they go
    into a merged model's config.json. null: the model's own."""
    sequence_chunk: Reported[Annotated[int, Field(ge=2)] | Literal["auto"] | None] = None
    """Tokens of a sequence that go through a layer at once: longer sequences go through each layer
    in chunks, of which only one has activations at a time. Weights are read twice in a step all the
    same. Losses and gradients change by rounding, and with dropout also the random numbers. auto:
    whole sequences if a step fits into `device_memory` with them, else the power of two with which
    one fits and is fastest; a resumed run keeps it. null: whole sequences."""
    keys_values: Reported[Literal["auto", "device", "host"]] = "auto"
    """Where keys and values of the layer at work, and sums of their gradients, wait while rows go
    through it in chunks (`sequence_chunk`): `device`, or `host`, from where attention has a few
    blocks of them at a time. auto: `device`, or else `host` if a step fits only so into
    `device_memory`; a resumed run keeps it. `lema generate` has an option for its own."""
    mlp_tile_tokens: Reported[Annotated[int, Field(ge=1)] | Literal["auto"] | None] = None
    """Tokens of which MLPs and experts run at once (a tiled MLP), and any other part of a layer
    that works token by token: it keeps its input alone, and runs again in tiles in the backward.
    Losses and gradients change by rounding, and with dropout also the random numbers. auto: no
    tiles if a step fits into `device_memory` without, else the largest, a power of two, with which
    it fits; a resumed run keeps them. null: all tokens at once."""
    context_parallel_size: Reported[Annotated[int, Field(ge=2)] | None] = None
    """Processes that divide the sequence of each row between them (context parallelism), of those
    that `torchrun` starts. Losses and gradients change as with `sequence_chunk`, which then says
    how long a part is at most. None: each process computes rows of its own."""
    objective: Refused[ObjectiveName] = "sft"
    """What the run trains on. `sft`: tokens of rows; `dpo`, `ipo`, `orpo`, `simpo`: pairs of
    `chosen` and `rejected` rows; `kto`: rows with a `label`, or pairs."""
    reference: Refused[Reference | None] = None
    """What dpo, ipo and kto compare with: the `adapter` that training begins with, as it is at the
    start, or the `base` model without adapters. None: adapter with `adapter_name_or_path`,
    otherwise base."""
    loss_type: Reported[types.Name | None] = None
    """Variant of the loss, by TRL's name. sft: nll or dft; dpo: sigmoid, hinge, robust, ...; kto:
    kto or apo_zero_unpaired. None: the first of these."""
    beta: Reported[Annotated[float, Field(gt=0)] | None] = None
    """How strongly a preference loss keeps the model near its reference, or the loss's weight;
    None: 0.1.
    """
    label_smoothing: Reported[Annotated[float, Field(ge=0, lt=0.5)] | None] = None
    """Probability that a pair is in the wrong order, for simpo and for robust and exo_pair of
    dpo; None: 0.
    """
    label_smoothing_factor: Reported[Annotated[float, Field(ge=0, lt=1)]] = 0.0
    """For sft: every target gets 1 minus this, and the vocabulary shares the rest. `eval_loss`
    includes it, too.
    """
    router_aux_loss_coef: Reported[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the routers' load-balancing loss in sft; None: the coefficient of config.json if it
    has output_router_logits, otherwise 0."""
    simpo_gamma: Reported[Annotated[float, Field(ge=0)] | None] = None
    """Margin of simpo between chosen and rejected; None: 0.5."""
    cpo_alpha: Reported[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the chosen rows' cross-entropy in simpo; None: 0, as SimPO is published."""
    desirable_weight: Reported[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the desirable rows of kto; None: 1."""
    undesirable_weight: Reported[Annotated[float, Field(ge=0)] | None] = None
    """Weight of the undesirable rows of kto; None: 1."""
    arithmetic: Reported[Literal["exact", "fast"]] = "exact"
    """`fast`: LoRA modules with the same input share one product with their A, add each B in place,
    and share one backward. Attention is the device's own if it has one and `attn_implementation`
    names none; norms, rotary embeddings and gated MLPs are, too. It equals PEFT except for
    rounding. Other modules are computed as PEFT does."""
    compute_dtype: Reported[types.ComputeDtype] = "auto"
    """Type that layers compute in. weights: that of the weights; auto: the same, or float32 where
    the device is slow in half precision, as processors without instructions for it are. A run keeps
    what it began with, and phases that train weights of the model have theirs. With float32 the
    numbers are those of `dtype: float32`, and weights in half precision stay so on disk and in host
    memory until they are leased."""
    autocast: Reported[Literal["bfloat16"] | None] = None
    """Type that float32 weights and their inputs are cast to for products, as Trainer's `bf16:
    true` does (`torch.autocast`). Between products, numbers stay float32. None: products in the
    type that layers compute in."""
    quantize_base: Refused[types.QuantizedKind | None] = None
    """QLoRA: the weights of the layers' linear modules, quantised at the first start and kept for
    later ones. `nf4`: bitsandbytes' 4 bits; `int8`, `fp8`: torchao's 8 bits. None: weights are used
    as they are stored. Phases that train weights of the model use them as they are stored, too."""
    quantize_base_cache: Silent[types.Location | None] = None
    """The folder that keeps the base of `quantize_base`; None: the folder that has the model's
    directory, or, for a model of the hub and where that folder cannot be written to, one in the
    user's cache directory (XDG_CACHE_HOME)."""
    modalities: Silent[Literal["text", "all"]] = "text"
    """What the model reads. text: its towers, which see images or hear, are not read, and rows with
    images are refused. all: the model is of its published class, and its towers are in device
    memory, frozen and whole, so that `lema.streamed` trains on rows with images, audio or video."""
    towers: Silent[Literal["device", "stream"]] = "device"
    """Where towers are under `modalities: all`: on the device as a whole, or with one layer after
    the other streamed there, which takes the memory of two layers, and reads every layer once for
    each batch with images. What trains in them, as an adapter, needs them on the device."""
    tower_cache: Silent[bool | types.Location] = False
    """The folder that keeps what towers make of each image, by its pixels and the towers' weights,
    for later epochs and starts, which then read no tower. true: a folder in the user's cache
    directory (XDG_CACHE_HOME); false: no folder. Towers then run on one image at a time."""
    tower_cache_size: Silent[types.Memory] = "20GB"
    """The most bytes of the files in `tower_cache`; a fraction is one of the disk. What does not
    fit is computed in every epoch."""
    backend_settings: Reported[dict[str, Any]] = Field(default_factory=dict)
    """Settings of a single backend, by name. They may also be given like any other setting."""

    def __init__(self, *positional: Any, **settings: Any) -> None:
        names = list(type(self).model_fields)
        if len(positional) > len(names):
            raise ConfigError(
                f"{len(positional)} settings given by position; there are {len(names)}"
            )
        by_position = dict(zip(names, positional, strict=False))
        if twice := sorted(by_position.keys() & settings.keys()):
            raise SettingsError(
                [Problem(key, f"{key} is given by position and by name") for key in twice]
            )
        backend_values = settings.get("backend_settings") or {}
        backend_names = settings.keys() & backend_settings().keys()
        if (named_values := {key: settings.pop(key) for key in backend_names}) and isinstance(
            backend_values, Mapping
        ):
            settings["backend_settings"] = {**backend_values, **named_values}
        settings = by_position | settings
        # As transformers 5 has it, warmup_steps below 1 are a share of all steps.
        if (
            isinstance(share := settings.get("warmup_steps"), float)
            and 0 <= share < 1
            and not settings.get("warmup_ratio")
        ):
            settings["warmup_ratio"] = settings.pop("warmup_steps")
        if settings.get("warmup_ratio") == 0 and "warmup_steps" not in settings:
            settings["warmup_steps"] = 0  # who gives a share of 0 wants no warm-up
        derived: dict[str, Any] = {}
        if "learning_rate" not in settings and is_preference(settings.get("objective")):
            derived["learning_rate"] = PREFERENCE_LEARNING_RATE
        super().__init__(**settings, **derived)
        # these were not given: with another objective they are others
        self.__pydantic_fields_set__.difference_update(derived)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields:
            raise SettingsError([unknown_setting(name, type(self).model_fields)])
        before = dict(self.__dict__)
        fields_set = set(self.model_fields_set)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            # Checks between settings run after pydantic has stored the value: a refused value must
            # not stay.
            self.__dict__.update(before)
            self.__pydantic_fields_set__.intersection_update(fields_set)
            raise SettingsError(problems_of(error, self.defaults())) from error

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in backend_settings():
            return self.backend_settings.get(name, backend_setting(name).default)
        return super().__getattr__(name)  # type: ignore[misc] # pydantic hides it from type checkers

    def disagreements(self) -> Iterator[Problem]:
        """Yield problems between settings that are each valid alone."""
        yield from super().disagreements()
        for key, what in check_backend_settings(self.backend_settings):
            yield Problem(key, what)
        for setting, conflict in (("eval_data", "eval_split"), ("warmup_steps", "warmup_ratio")):
            if getattr(self, setting) and getattr(self, conflict):
                yield Problem(
                    "", f"{setting} and {conflict} exclude each other; leave one of them out"
                )
        if self.max_steps is not None and (self.warmup_steps or 0) > self.max_steps:
            yield Problem(
                "", f"warmup_steps ({self.warmup_steps}) is more than max_steps ({self.max_steps})"
            )
        if self.quantize_base is not None and self.gbi_path is not None:
            what = "quantize_base converts the weights in the model's own directory, not gbi_path's"
            yield Problem("gbi_path", what, "leave one of the two out")
        if self.towers == "stream" and self.modalities == "text":
            what = "towers: stream says how towers are read, and modalities: text reads none"
            yield Problem("towers", what, "set modalities to all, or leave towers out")
        if self.tower_cache is not False and self.modalities == "text":
            what = "tower_cache keeps what towers make, and modalities: text reads no towers"
            yield Problem("tower_cache", what, "set modalities to all, or leave tower_cache out")
        yield from self._about_offloading()
        yield from self._about_chunks()
        yield from self._about_tiles()
        yield from disagreements_of_objective(self)
        yield from disagreements_of_batches(
            self,
            objective=self.objective,
            shuffle=self.shuffle,
            packing=self.packing,
            train_data=self.train_data,
        )
        if self.arithmetic == "fast" and self.torch_compile:
            what = (
                "torch_compile compiles the code that arithmetic: fast replaces; leave one of "
                "them out"
            )
            yield Problem("arithmetic", what)
        if self.packing and self.objective != "sft":
            what = f"objective: {self.objective} compares rows, which cannot be packed"
            yield Problem("packing", what, "leave it out")
        if self.packing == "wrapped" and self.overlong != "truncate":
            yield Problem(
                "overlong",
                "packing: wrapped cuts rows of any length, so no row is too long",
                "leave it out",
            )
        if (
            self.cache_frozen_prefix
            and self.shuffle not in (False, "sequential")
            and self.batch_size > 1
        ):
            what = (
                "shuffled rows form different batches in each epoch; set shuffle: false or "
                "batch_size: 1"
            )
            yield Problem("cache_frozen_prefix", what)
        if self.embeddings in ("host", "disk") and self.lora_trainable_token_indices is not None:
            what = "lora_trainable_token_indices trains rows of the embeddings; set it to auto"
            yield Problem("embeddings", what)
        if self.head == "stream" and not self.plain_cross_entropy:
            what = "stream works only with objective: sft, loss_type: nll and no label smoothing"
            yield Problem("head", f"{what}; set it to auto")
        if self.neftune_noise_alpha and (self.cache_frozen_prefix or self.sequence_parallel):
            conflict = (
                "cache_frozen_prefix has"
                if self.cache_frozen_prefix
                else "with sequence_parallel a process has"
            )
            what = f"{conflict} other noise than neftune_noise_alpha draws; leave one of them out"
            yield Problem("neftune_noise_alpha", what)
        if self.shard_weights and self.cache_frozen_prefix:
            what = (
                "with cache_frozen_prefix some processes skip layers that others need; set one "
                "of them to false"
            )
            yield Problem("shard_weights", what)
        if self.shard_optimizer and self.optim != "adamw_torch":
            what = (
                f"the state of {self.optim} may belong to several parameters together; set it "
                "to false"
            )
            yield Problem("shard_optimizer", what)
        if (
            self.max_length
            and self.pad_to_multiple_of
            and self.max_length % self.pad_to_multiple_of
        ):
            what = (
                f"max_length is {self.max_length}, which is no multiple of "
                f"{self.pad_to_multiple_of}"
            )
            yield Problem("pad_to_multiple_of", what)

    def _about_chunks(self) -> Iterator[Problem]:
        """Yield what sequences in chunks have not been tested with."""
        setting = "sequence_chunk" if self.context_parallel_size is None else DIVIDED
        if self.keys_values == "host" and (setting == DIVIDED or self.sequence_chunk is None):
            what = "rows that go through layers at once have theirs on the device"
            how = "set sequence_chunk"
            if setting == DIVIDED:
                what = f"{DIVIDED} sends keys and values from device to device"
                how = "leave one of them out"
            yield Problem("keys_values", what, how)
        if self.sequence_chunk is None and setting != DIVIDED:
            return
        untested = {
            "torch_compile": self.torch_compile,
            "tensor_parallel_size": (self.tensor_parallel_size or 1) > 1,
            "sequence_parallel": self.sequence_parallel,
        }
        if setting == DIVIDED:
            untested |= {
                # which a plan of whole rows would choose
                "sequence_chunk: auto": self.sequence_chunk == "auto",
                # whose losses are of whole rows
                f"objective: {self.objective}": self.objective != "sft",
                # which goes by the length of the sequence
                "neftune_noise_alpha": bool(self.neftune_noise_alpha),
                "gradient_checkpointing: false": self.gradient_checkpointing is False,
                "arithmetic: fast": self.arithmetic == "fast",
                "experts_per_slot": isinstance(self.experts_per_slot, int),
                "cache_frozen_prefix": self.cache_frozen_prefix,
            }
        for conflict, is_set in untested.items():
            if is_set:
                how = "are not divided over processes" if setting == DIVIDED else _IN_CHUNKS
                yield Problem(setting, f"sequences {how} with {conflict}", "leave one of them out")

    def _about_tiles(self) -> Iterator[Problem]:
        """Yield what MLPs in tiles have not been tested with."""
        if self.mlp_tile_tokens is None:
            return
        untested = {
            "torch_compile": self.torch_compile,
            "tensor_parallel_size": (self.tensor_parallel_size or 1) > 1,
            "sequence_parallel": self.sequence_parallel,
        }
        for conflict, is_set in untested.items():
            if is_set:
                what = f"MLPs do not run in tiles with {conflict}"
                yield Problem("mlp_tile_tokens", what, "leave one of them out")

    def _about_offloading(self) -> Iterator[Problem]:
        mode = self.activation_offloading
        tier = self.boundary_activations
        if tier in ("host", "disk") and not self.gradient_checkpointing:
            what = (
                "without gradient_checkpointing layers do not keep inputs; set "
                "gradient_checkpointing: true"
            )
            yield Problem("boundary_activations", what)
        if mode == "hidden_states" and not self.gradient_checkpointing:
            what = (
                "without gradient_checkpointing layers keep more than their inputs; set one of "
                "the two to true"
            )
            yield Problem("activation_offloading", what)
        offloaded = self.offloading_tier
        if (
            offloaded is not None
            and self.gradient_checkpointing
            and tier not in ("auto", offloaded)
        ):
            what = (
                f"with activation_offloading the layers' inputs wait {_AT[offloaded]}, not "
                f"{_AT[tier]}"
            )
            yield Problem("boundary_activations", f"{what}; leave one out")

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens that go through a layer at once; None: whole sequences, or the plan's choice."""
        return None if self.sequence_chunk == "auto" else self.sequence_chunk

    @property
    def tile_tokens(self) -> int | None:
        """Tokens of which MLPs run at once; None: all, or the plan's choice."""
        return None if self.mlp_tile_tokens == "auto" else self.mlp_tile_tokens

    @property
    def cuts_sequences(self) -> bool:
        """Whether sequences go through layers in parts, which keep no graph."""
        return self.sequence_chunk is not None or self.context_parallel_size is not None

    @property
    def plain_cross_entropy(self) -> bool:
        """Whether the loss of a token is its cross-entropy, which the head in pieces computes."""
        return (
            self.objective == "sft" and self.loss_type != "dft" and not self.label_smoothing_factor
        )

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
        """JSON schema of every setting, with its meaning and default; editors complete YAML from
        it.
        """
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
        """Write `lema_config.json`.

        Args:
            directory: is made if need be.

        Raises:
            DiskError: the file cannot be written; what was there is untouched.
        """
        file = Path(directory) / CONFIG_NAME
        part = file.with_name(f".{CONFIG_NAME}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with part.open("w", encoding="utf-8", newline="\n") as out:
                out.write(json.dumps(self.to_dict(), indent=2) + "\n")
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
        except OSError as error:
            # Cleaning up fails where writing did; the first failure is the one to tell.
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise DiskError(
                f"cannot write the config: {error.strerror}", where=str(file)
            ) from error

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str], **overrides: Any) -> Self:
        """Read `lema_config.json` from a directory.

        Settings that no longer exist are left out, with a warning, of a file that an earlier
        version wrote.

        Args:
            directory: has the file.
            overrides: settings that replace those of the file.

        Returns:
            The settings.

        Raises:
            ConfigError: there is no such file, it is not JSON, or a setting is wrong.
        """
        file = Path(directory) / CONFIG_NAME
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise unreadable(
                file, error, ConfigError, f"cannot read the config: {error.strerror}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {error}", where=str(file)) from error
        if not isinstance(values, dict):
            raise ConfigError("a config is a JSON object", where=str(file))
        if _EARLIER & values.keys():
            gone = [name for name in values if name not in cls.model_fields]
            warnings.warn(
                f"{file} is of an earlier version; ignored: {', '.join(gone)}", stacklevel=2
            )
            values = {name: value for name, value in values.items() if name not in gone}
        try:
            return cls(**{**values, **overrides})
        except SettingsError as error:
            raise error.located({"": str(file)}, overrides) from error.__cause__
