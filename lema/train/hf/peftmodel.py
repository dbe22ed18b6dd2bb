"""`lema.streamed`: a PEFT model whose layers stream, for any trainer, or your own loop.

    model = lema.streamed("directory or hub id", LoraConfig(r=16, target_modules="all-linear"),
    device="cpu") trainer = SFTTrainer(model, args=SFTConfig(...), train_dataset=rows)

It is the model that `LemaModel` opens and `LemaTrainer` uses, with `lema.engine.stack` instead of
its layers. Its base takes no memory: the layers' weights are on `meta`, and in no state dict.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Self, SupportsIndex, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn

from lema.backend.group import check_alike
from lema.backend.hostmemory import memory_available
from lema.compat import processes_kind
from lema.config import LemaConfig
from lema.engine.head.routers import coefficient_of
from lema.engine.stack import LayerStack
from lema.errors import ConfigError
from lema.lora.base import base_of, write_base
from lema.lora.checks import read_json
from lema.lora.files import CONFIG, WEIGHTS, fill_adapter, read_safetensors, settings_of
from lema.lora.materialize import make_real
from lema.lora.published import config_in_own, publish_files, tensors_in_own
from lema.model.capture import tensors_in
from lema.model.sequence.rope import check_rope, read_rope, write_rope
from lema.model.skeleton import is_in
from lema.model.towers import refusal
from lema.storage.modelfiles import load_generation_config
from lema.storage.verify import BaseFiles
from lema.train.model import LemaModel

__all__ = ["StreamedPeftModel", "streamed"]

SCORES = "SEQ_CLS"  # PEFT's word for models that score texts
WRAPPERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def streamed(
    model_name_or_path: str | PathLike[str],
    peft_config: LoraConfig | str | PathLike[str],
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None,
    device_memory: str | float | int | None = None,
    host_memory: str | float | int | None = None,
    trust_remote_code: bool = False,
    num_labels: int | None = None,
    **settings: object,
) -> "StreamedPeftModel":
    """Open a model by its directory or hub id, with adapters, as a PEFT model whose layers stream.

    Args:
        model_name_or_path: model directory or hub id.
        peft_config: PEFT's config of a new adapter, drawn from `seed`; or the directory of a saved
            one. With `task_type` "SEQ_CLS" the model is that of AutoModelForSequenceClassification,
            which scores texts.
        device: the backend to run on; None: the default of `LemaConfig`.
        dtype: type of the frozen weights; None: the checkpoint's.
        micro_batch_size: rows that are computed at once, however many a batch has; None: the whole
            batch.
        device_memory: limit of device memory, as in `LemaConfig`.
        host_memory: limit of host memory, as in `LemaConfig`.
        trust_remote_code: run the model's own code.
        num_labels: scores of a text; None: one. If the checkpoint has no such head, it is drawn
            from `seed`, as `from_pretrained` does, and then the adapter.
        settings: further settings of `LemaConfig`. `gradient_checkpointing` is true unless you set
            it. With `modalities="all"` the model is of the published class, with its towers, and
            trains on rows with images.

    Returns:
        A PEFT model for `Trainer` of transformers and for the trainers of TRL.

    Raises:
        ConfigError: a setting is wrong, the adapter cannot stream, or several processes do not
            agree.
        MemoryLimitError: the limits are too small.

    Example:
        ```python
        model = lema.streamed("Qwen/Qwen3-8B", LoraConfig(r=16), device_memory="8GB", seed=1)
        SFTTrainer(model=model, args=SFTConfig(seed=1), train_dataset=dataset).train()
        ```
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    fresh = deepcopy(peft_config) if isinstance(peft_config, LoraConfig) else None
    if device is not None:
        settings["device"] = device
    task = _task_of(fresh or Path(peft_config))  # type: ignore[arg-type] # a directory, if it is no config
    settings = {
        "gradient_checkpointing": True,
        **({} if fresh is None else settings_of(fresh, task)),
        **settings,
    }
    if fresh is None:
        settings.setdefault("rope_parameters", read_rope(Path(peft_config)))  # type: ignore[arg-type] # a directory
    config = LemaConfig(
        model_name_or_path=str(model_name_or_path),
        dtype=dtype,
        micro_batch_size=micro_batch_size,
        device_memory=device_memory,
        host_memory=host_memory,
        **settings,
    )
    if config.context_parallel_size is not None:
        raise ConfigError(
            "a trainer's own forward does not divide rows over processes",
            where="context_parallel_size",
            how="leave it out, or train with lema",
        )
    if num_labels is not None and task != SCORES:
        how = f'leave it out, or set task_type="{SCORES}" in the LoraConfig'
        raise ConfigError(
            "a causal language model has no labels for scores", where="num_labels", how=how
        )
    labels = (num_labels or 1) if task == SCORES else None
    opened = LemaModel(config, trust_remote_code=trust_remote_code, num_labels=labels)
    try:
        opened.keep_whole(lambda _: False, "the trainer's own code runs it")
        _attach(opened, peft_config, task)
        opened.outer.check_frozen()
        opened.allocation  # noqa: B018 - now, because limits that are too small should be known before any data is read
        _have_routers_asked(opened)
    except BaseException:
        opened.close()
        raise
    return StreamedPeftModel.around(opened)


def _have_routers_asked(opened: LemaModel) -> None:
    """Make the model compute the loss of its routers, like one of `from_pretrained`, if it is
    requested.
    """
    if coefficient := coefficient_of(opened.split, opened.config, opened.directory):
        text: Any = opened.skeleton.config.get_text_config()
        text.output_router_logits = True
        for owner in (text, opened.skeleton):
            if hasattr(owner, "router_aux_loss_coef"):
                owner.router_aux_loss_coef = coefficient


def _attach(opened: LemaModel, adapter: LoraConfig | str | PathLike[str], task: str) -> None:
    """Attach a fresh adapter, or a saved one; of several processes each has its own, and reads
    and computes alone.
    """
    config = opened.config
    replicas = opened.backend.replicas
    if opened.backend.parallel.size > 1:
        what = (
            "with another trainer each process opens its own model, but tensor_parallel_size "
            "makes several hold one"
        )
        raise ConfigError(
            what,
            where="lema.streamed",
            how="remove tensor_parallel_size, or train with `lema train`",
        )
    if replicas.size > 1:
        # Because processes that divide weights wait for each other at every layer, and trainers do
        # not evaluate so; and because the leaves that stand for adapters are others in the backward
        # of compiled layers.
        refused = {"shard_weights": config.shard_weights, "shard_optimizer": config.shard_optimizer}
        refused |= {"torch_compile": config.torch_compile or opened.split.lazy}
        if asked := [name for name, value in refused.items() if value]:
            what = "several processes of another trainer cannot do this"
            raise ConfigError(
                what, where=f"{asked[0]} on {config.device}", how="remove it, or start one process"
            )
        check_alike(replicas, config.to_dict())
    if isinstance(adapter, LoraConfig):
        fresh = deepcopy(adapter)
        fresh.task_type = task
        opened.attach_lora(fresh, seed=opened.config.seed)
    else:
        opened.begin_with_adapter(adapter)


def _task_of(adapter: LoraConfig | Path) -> str:
    """Return what an adapter, or one saved in a directory, is for; others than these two are
    refused elsewhere.
    """
    if isinstance(adapter, LoraConfig):
        task_type = adapter.task_type
    else:
        file = adapter / CONFIG
        task_type = read_json(file).get("task_type") if file.is_file() else None
    return SCORES if task_type == SCORES else "CAUSAL_LM"


class StreamedPeftModel(PeftModel):
    """A PEFT model, `opened`, that has its layers streamed by a `stack` in their place; `streamed`
    opens one, which is of PEFT's class for its task as well. What would need the base's weights is
    refused in one sentence: another device or dtype, merging, copies, and wrappers that divide the
    model (FSDP, DeepSpeed, DataParallel)."""

    opened: LemaModel
    stack: LayerStack
    base_files: BaseFiles  # as they were when the model was opened

    @classmethod
    def around(cls, opened: LemaModel) -> Self:
        """Return the PEFT model of an opened one, as a model to others."""
        peft_model = opened.lora_manager
        # not made again, because it is the adapter that `opened` saves and trains
        model: Any = peft_model
        model.__class__ = type(
            cls.__name__, (cls, type(peft_model)), {"__module__": cls.__module__}
        )
        skeleton = opened.skeleton
        settings = opened.config
        model._stream(opened)
        lora_config = model.peft_config["default"]
        base = base_of(settings, opened.gbi, model.base_files)
        lora_config.base_model_name_or_path = base.name
        lora_config.revision = base.revision
        if skeleton.can_generate():
            skeleton.generation_config = (
                load_generation_config(opened.directory) or skeleton.generation_config
            )
        # PEFT's and transformers' ways to switch recomputation all come by here. Their own would
        # recompute each layer by itself, within a visit that recomputes it already and whose lease
        # ends before.
        skeleton._set_gradient_checkpointing = partial(_recompute, opened)  # type: ignore[method-assign] # its own
        _recompute(opened, enable=opened.adapter.activations.recompute)
        digest = hashlib.sha256(base.fingerprint.encode()).digest()
        # In the state dict, because what tells a model by its tensors shall tell one base from
        # another.
        model.register_buffer(
            "base_fingerprint", torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        )
        model.register_state_dict_post_hook(_leave_out_base)
        # DistributedDataParallel's name for tensors that the first process must not send to the
        # others.
        model._ddp_params_and_buffers_to_ignore = [
            name for name, parameter in model.named_parameters() if parameter.is_meta
        ]
        model.eval()  # as `from_pretrained` leaves a model
        streamed_model: Self = model
        return streamed_model

    def _stream(self, opened: LemaModel) -> None:
        """Have the layers of the opened model run in the place of the modules that are here."""
        rows = opened.config.micro_batch_size
        self.opened = opened
        owner = opened.split.layers_name.rpartition(".")[0]
        self.stack = LayerStack(
            opened.adapter,
            rows,
            _free_bytes_of(opened),
            images_inside=any(is_in(tower, [owner]) for tower in opened.outer.towers),
        )
        self.base_files = BaseFiles(opened.gbi, opened.adapter.stream.unchanged)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Compute as the model itself does. `ConfigError`: it is given images, audio or video, and
        was opened for text alone."""
        # Not in `forward`, whose arguments trainers look at.
        foreign = self.opened.foreign_inputs & kwargs.keys()
        # Whole numbers say where images stand, and a processor gives them for text, too.
        if names := sorted(
            name for name in foreign if any(map(torch.is_floating_point, tensors_in(kwargs[name])))
        ):
            what = f"{', '.join(names)} cannot be read by the class that trains on text alone"
            raise refusal(what, type(self.opened.skeleton).__name__)
        outputs: object = super().__call__(*args, **kwargs)
        return outputs

    def close(self) -> None:
        """Stop reading and free the memory. The model cannot be called after that."""
        self.stack.take_out()
        self.opened.close()

    @contextmanager
    def replaying(self, choices: Tensor) -> Iterator[None]:
        """Have the routers of a mixture of experts choose what they are told to in a `with` block:
        the experts that a server chose when it sampled the same tokens.

        Calls of the model in the block take the rows of the choices one after the other. The
        factors of the experts and all gradients are the model's own; those of a whole model whose
        routers choose the same are equal bit for bit. Source: https://arxiv.org/abs/2510.11370.

        Args:
            choices: `[rows, sequence, layers, experts of each token]`, integers, on any device; -1
                in all places of a token for which the router chooses itself, or zeros where a
                token has several experts. What it says of layers without experts is all zeros, or
                all -1.

        Raises:
            ConfigError: the choices do not fit the model or the calls, a token has an expert twice
                or only some of its experts, a router chooses in another way than by `torch.topk`,
                layers are compiled, or the block is within another.

        Example:
            ```python
            with model.replaying(choices):
                logits = model(input_ids=rows, attention_mask=mask).logits
            ```
        """
        with self.stack.replaying(choices):
            yield

    def add_adapter(
        self, adapter_name: str, peft_config: PeftConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Add an adapter as PEFT does, with the values that PEFT draws."""
        # because PEFT would move it to its base, which is nowhere
        kwargs["low_cpu_mem_usage"] = True
        # because some values are drawn already, to be thrown away
        with torch.random.fork_rng(devices=()):
            super().add_adapter(adapter_name, peft_config, *args[1:], **kwargs)
        self._make_real(adapter_name)

    def add_weighted_adapter(
        self, adapters: list[str], weights: list[float], adapter_name: str, **kwargs: object
    ) -> None:
        """Add an adapter that is a combination of others, as PEFT does
        (`LoraModel.add_weighted_adapter`).
        """
        lora: Any = self.base_model
        inject = lora.inject_adapter

        def inject_real(model: nn.Module, name: str) -> None:
            with torch.random.fork_rng(devices=()):
                inject(model, name, low_cpu_mem_usage=True)
            self._make_real(name)  # before PEFT writes the combination into it

        lora.inject_adapter = inject_real
        try:
            lora.add_weighted_adapter(adapters, weights, adapter_name, **kwargs)
        finally:
            del lora.inject_adapter

    def _make_real(self, adapter: str) -> None:
        """Give an adapter that PEFT has attached without memory its memory, and the values that
        PEFT draws.
        """
        opened = self.opened
        config = cast(LoraConfig, self.peft_config[adapter])
        trains = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        device = opened.backend.device
        name = opened.split.layers_name
        read = opened.read_stored
        make_real(opened.skeleton, config, device, name, draw=True, read=read, adapter=adapter)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trains[name])
        opened.split.adapters_changed()

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Write adapters as PEFT does, such that they fit the class that the base's `config.json`
        names, too, and beside each the fingerprint of the base. `WeightsError`: the base's files
        have changed since they were opened; nothing is written then."""
        self.base_files.check()
        super().save_pretrained(save_directory, *args, **kwargs)
        opened = self.opened
        base = base_of(opened.config, opened.gbi, self.base_files, opened.computing.dtype)
        for name in self.peft_config:
            directory = Path(save_directory) / ("" if name == "default" else name)
            if (directory / WEIGHTS).is_file() and (directory / CONFIG).is_file():
                publish_files(self.opened.skeleton, directory, CONFIG, WEIGHTS)
                write_base(directory, base)
                write_rope(directory, opened.files.rope_parameters)

    def load_adapter(
        self, model_id: str | PathLike[str], adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter as PEFT does, with the names of either class, but lose nothing of what
        PEFT's reader does.
        """
        path = Path(model_id)
        check_rope(self.opened.files.rope_parameters, path)
        if not (path / WEIGHTS).is_file():
            return super().load_adapter(str(model_id), adapter_name, *args, **kwargs)
        tensors = tensors_in_own(
            self.opened.skeleton, read_safetensors(path / WEIGHTS), path / WEIGHTS
        )
        with TemporaryDirectory() as scratch:
            config = LoraConfig.from_pretrained(str(path))
            config_in_own(self.opened.skeleton, config, tensors, path).save_pretrained(scratch)
            save_file(
                {name: tensor.clone() for name, tensor in tensors.items()}, Path(scratch) / WEIGHTS
            )
            outcome = super().load_adapter(scratch, adapter_name, *args, **kwargs)
        filled = fill_adapter(self, tensors, adapter_name)
        if filled is None:
            return outcome
        filled.missing_keys[:] = [
            name for name in filled.missing_keys if f".{adapter_name}." in f"{name}."
        ]
        return filled

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter as PEFT does."""
        super().delete_adapter(adapter_name)
        self.opened.split.adapters_changed()

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as every module does; refuse a trainer that is about to divide the
        model.
        """
        kind = processes_kind()
        if kind is not None and any(name in str(kind) for name in WRAPPERS):
            self._refuse(
                f"{str(kind).rpartition('.')[2]} divides weights, but its weights are in files"
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002 - as torch has it
        """Leave every tensor unchanged and in its place, if that is requested."""
        here = {
            (parameter.device, parameter.dtype)
            for parameter in self.parameters()
            if not parameter.is_meta
        }
        for device, dtype in here:
            like = fn(torch.empty(0, dtype=dtype, device=device))
            if (like.device, like.dtype) != (device, dtype):
                what = f"moving from {dtype} on {device} to {like.dtype} on {like.device}"
                self._refuse(
                    f"{what}, because its layers come from files",
                    "open it with lema.streamed(device=, dtype=)",
                )
        return self

    def merge_adapter(self, *_: object, **__: object) -> NoReturn:
        """Refuse: the base's weights are not in memory."""
        what = "merging an adapter into weights that are in files"
        self._refuse(what, "use the adapter's files (save_pretrained), or run `lema merge`")

    def merge_and_unload(self, *_: object, **__: object) -> NoReturn:
        """Refuse: the base's weights are not in memory."""
        self.merge_adapter()

    def unload(self) -> NoReturn:
        """Refuse: a model without adapters has nothing that trains."""
        self._refuse("removing its adapters", "use disable_adapter()")

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse(
            "running on several devices at once (DataParallel)", "make only one device visible"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse: its layers are in files that a copy would have to open."""
        self._refuse(
            "copying or pickling it", "call save_pretrained, then lema.streamed on the result"
        )

    def _refuse(
        self, what: str, how: str = "train it in one process without a wrapper"
    ) -> NoReturn:
        raise ConfigError(
            f"this is refused for a streamed model: {what}", where=type(self).__name__, how=how
        )


def _free_bytes_of(opened: LemaModel) -> Callable[[], int] | None:
    """Return what tells how many bytes may be taken beside what the steps so far have needed: half
    of what is free. Where a limit is set there are none, because the plan counts one micro-batch of
    the top layer's activations."""
    if opened.config.device_memory not in (None, "auto") or opened.config.host_memory is not None:
        return None

    def free_bytes() -> int:
        memory = opened.backend.memory()
        free = memory_available() if memory.shared else memory.total - memory.used
        return (free - (memory.peak - memory.used)) // 2

    return free_bytes


def _recompute(opened: LemaModel, enable: bool = True, **_: object) -> None:
    """Have the layers' activations recomputed in the backward, or kept; transformers reads the
    flag.
    """
    opened.adapter.activations.recompute_layers(enable)
    opened.skeleton.gradient_checkpointing = opened.adapter.activations.recompute


def _leave_out_base(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    """Remove tensors without bytes from a state dict."""
    for name in [
        name
        for name, tensor in state.items()
        if name.startswith(prefix) and isinstance(tensor, Tensor)
    ]:
        if state[name].is_meta:
            del state[name]
