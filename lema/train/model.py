"""`LemaModel`, the model that a user holds: skeleton, adapter and stream, put together from a
config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.backend.trace import NO_TRACE, NoTrace
from lema.config import LemaConfig
from lema.config.types import dtype_name
from lema.data.forms import num_positions
from lema.engine import StreamedModel
from lema.engine.generation import KeyValues
from lema.engine.head.cut import open_embed_head
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.head.objectives import loss_settings_of, without_dropout
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.saving import Activations
from lema.engine.numerics import Numerics
from lema.engine.optim import training_bytes
from lema.engine.padding import padding_of
from lema.engine.reference_rows import StartingAdapter
from lema.errors import ConfigError, named_in
from lema.lora.attach import configured_lora, inject_lora_params
from lema.lora.base import base_of, check_base, check_named_base, computed_for
from lema.lora.class_names import compare_classes
from lema.lora.files import (
    adapter_config,
    load_weights,
    read_settings,
    settings_file,
    the_lora_config,
    with_adapter,
)
from lema.lora.targets import warn_of_left_out
from lema.model import Split, meta_model
from lema.model.computing import computing_of
from lema.model.files import ModelFiles
from lema.model.inputs import add_noise
from lema.model.outer_weights import (
    ExpertParts,
    StoredTensors,
    draw_head,
    expert_parts,
    layer_bytes,
    load_outside,
)
from lema.model.partition import local_records, open_backend
from lema.model.skeleton import compute_fast, other_outputs
from lema.model.weight_names import match_names, target_dtypes
from lema.plan import Allocation
from lema.plan.advice import advise
from lema.plan.allocate import whether_recomputed
from lema.plan.blueprint import Blueprint, reference_bytes
from lema.plan.plan import hiding_tokens
from lema.plan.planner import Planner, fitted_planner, opened_planner
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.hub import own_weights
from lema.storage.rendering import read_templates
from lema.storage.verify import BaseFiles
from lema.stream import LayerStream
from lema.stream.firstreads import FirstReads
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.weightcheck import BaseGuard
from lema.train.checkpoint.format import leave_adapter
from lema.train.checkpoint.resume import newest_settings
from lema.train.reference import begins_with, check_reference, reopened
from lema.train.steps import warn_of_no_use

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lema.train.trainer import LemaTrainer

__all__ = ["LemaModel"]


class LemaModel:
    """A causal language model that reads its decoder layers from disk only when they are needed.

    Opening it reads only the config, the headers of the tensors, and the weights outside the
    decoder layers.

    Args:
        config: the settings of the model and the run.
        backend: the device; None: the one that the config names.
        files: the opened directory of the model; None: the one that the config names.
        trust_remote_code: run the model's own code, from its directory or, for a hub id, from the
            commit in `config.revision`. This is not a setting, because settings are read from
            files.
        trace: records every read, upload and computation with its time.
        num_labels: labels of a head that scores texts, instead of the head over the vocabulary;
            None: no such head. If the checkpoint has none, it is drawn from `config.seed`, before
            the adapter.

    Raises:
        ConfigError: a setting does not fit the model.
        BackendUnavailable: the device is not there.
        ModelError: the model cannot be streamed.
        WeightsError: a file of weights is missing or damaged.

    Example:
        ```python
        config = LemaConfig(model_name_or_path="Qwen/Qwen3-8B", device_memory="8GB")
        model = LemaModel(config)
        model.initialize_lora()
        trainer = model.get_trainer()
        ```
    """

    def __init__(
        self,
        config: LemaConfig,
        *,
        backend: Backend | None = None,
        files: ModelFiles | None = None,
        trust_remote_code: bool = False,
        trace: NoTrace = NO_TRACE,
        num_labels: int | None = None,
    ) -> None:
        config = with_adapter(config, None if files is None else files.adapter)
        self.config = config
        self.trusted = trust_remote_code
        self.files = files or ModelFiles(config, trust_remote_code=trust_remote_code)
        self.directory = self.files.directory
        hf_config = _own_config(self.files, config)
        self.backend = backend or open_backend(config)
        self.gbi = GlobalBinaryIndex(
            config.gbi_path or own_weights(config.model_name_or_path, self.directory)
        )
        self.computing = computing_of(hf_config, self.gbi, config, self.backend)
        _warn_of_config(hf_config, self.computing.notes if self.backend.replicas.first else ())
        if scores := num_labels is not None:
            hf_config.num_labels = num_labels
        self._task = "SEQ_CLS" if scores else "CAUSAL_LM"
        arguments = hf_config, self.computing.dtype, config.attn_implementation
        self.skeleton = meta_model(*arguments, trust_remote_code=trust_remote_code, scores=scores)
        compare_classes(self.skeleton, hf_config, trust_remote_code=trust_remote_code)
        self.fused = compute_fast(self.skeleton, config, self.backend)
        self.records = match_names(self.skeleton, self.gbi)
        self.dtypes = target_dtypes(self.skeleton)
        guard = BaseGuard(self.records) if config.check_base_weights else None
        self._reader = LayerReader(trace=trace, guard=guard, first_reads=FirstReads())
        self.split = Split(
            self.skeleton,
            self.backend,
            compiled=config.torch_compile,
            fast=config.arithmetic == "fast",
        )
        name = self.split.layers_name
        self._trace = trace
        self._divided = False  # whether it is divided among processes
        self._stored = StoredTensors(self.records, self.dtypes, self.backend, self._reader)
        self._head, self._tables = open_embed_head(
            self.skeleton, self._stored, config, self.backend.parallel
        )
        self.split.read_rows_of(self._tables)
        self.outside_bytes = load_outside(
            self.skeleton, self._stored, name, self._tables.names | self._head.names
        )
        self._drawn = draw_head(self.skeleton, self.backend.device, config.seed) if scores else None
        self.lora_manager: PeftModel | None = None
        self.num_adapter_parameters = 0
        self.reference: StartingAdapter | None = None  # that preference losses compare with
        self._padding = padding_of(config, self.backend.parallel.size, num_positions(hf_config))
        # last: a model that is not opened closes nothing
        self._numerics = Numerics(config.tf32, config.deterministic)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | PathLike[str],
        *,
        backend: Backend | None = None,
        trust_remote_code: bool = False,
        unread: Container[str] = (),
        **overrides: object,
    ) -> Self:
        """Open a saved adapter with its base model.

        The settings are those of `lema_config.json`. A line tells which settings of a stranger's
        file are ignored.

        Args:
            directory: where PEFT's files of the adapter are.
            backend: the device; None: the one that the settings name.
            trust_remote_code: run the base model's own code.
            unread: names of settings that need no such line.
            overrides: settings that replace those of the file, or supply them if there is no file.

        Returns:
            The model with its adapter attached and loaded.

        Raises:
            AdapterError: there is no adapter, it does not fit the model, or the model has changed
                since the training and no override names it.
            ConfigError: an override contradicts the adapter.
        """
        path = Path(directory)
        config, saved = read_settings(path, unread=unread, **overrides)
        # because its first adapter may be missing
        gone: dict[str, Any] = {"adapter_name_or_path": None}
        if overrides.get("chat_template") is None and read_templates(path) is not None:
            gone["chat_template"] = None  # the one beside the adapter is what it was trained with
        config = config.model_copy(update=gone)
        has_saved_base = overrides.keys().isdisjoint({"model_name_or_path", "gbi_path", "revision"})
        with named_in(settings_file(path) if has_saved_base else None):
            files = ModelFiles(config, trust_remote_code=trust_remote_code, adapter=path)
            model = cls(config, backend=backend, files=files, trust_remote_code=trust_remote_code)
        if has_saved_base:
            check_base(path, model.gbi)
        then = computed_for(path)
        now = dtype_name(model.computing.dtype)
        if then not in (None, now) and overrides.keys().isdisjoint({"compute_dtype", "dtype"}):
            what = (
                f"the adapter was trained in {then}, and here the model computes in {now}, "
                "which rounds otherwise"
            )
            warnings.warn(
                f"{what}; --compute-dtype {then} computes as the training did", stacklevel=2
            )
        if saved is None:
            saved = configured_lora(model.skeleton, config, model.backend.parallel.size)
        else:
            saved = adapter_config(model.skeleton, saved, path)
        model.attach_lora(saved)
        arguments = path, model.split.layers_name, model.backend.parallel
        load_weights(model._require_adapter(), *arguments)
        model._reopen(path)
        return model

    def initialize_lora(self) -> None:
        """Attach a new adapter with the values that PEFT draws for `seed`, or a saved one.

        The saved one is that of `adapter_name_or_path`.

        Raises:
            AdapterError: the saved adapter does not fit the model.
            ConfigError: the model has an adapter already.
            ModelError: no module, or one that cannot stream, matches the targets.
        """
        if (begun := self.config.adapter_name_or_path) is not None:
            self.begin_with_adapter(
                self.files.adapter or resolve_model(begun), dropout=self.config.lora_dropout
            )
            return
        lora = configured_lora(self.skeleton, self.config, self.backend.parallel.size)
        if self.config.lora_target_modules is None:
            warn_of_left_out(
                self.skeleton, lora, experts=self.config.lora_target_parameters is None
            )
        self.attach_lora(lora, seed=self.config.seed)
        self.config, self.reference = begins_with(self.config, self._require_adapter(), begun=False)

    def attach_lora(self, config: LoraConfig, *, seed: int | None = None) -> None:
        """Attach an adapter of PEFT's config.

        Args:
            config: the adapter's kind, rank, targets and options.
            seed: its values are drawn from it; None: it has no values until they are loaded.

        Raises:
            ConfigError: the model has an adapter already, or is divided among processes already.
            ModelError: the adapter or its targets do not fit the model.
        """
        if self.lora_manager is not None:
            raise ConfigError(
                "the model has an adapter already", how="open another LemaModel for another adapter"
            )
        if self._divided and self.backend.parallel.size > 1:
            what = "the layers are already divided among processes"
            raise ConfigError(what, how="call initialize_lora() before anything else")
        # because PEFT copies rows as it attaches them
        if config.trainable_token_indices is not None:
            self.keep_whole(lambda name: not name.startswith(f"{self.split.layers_name}."))
        # the head was drawn before
        begun = seed if seed is None or self._drawn is None else self._drawn
        with self._tables.taken_out():
            self.lora_manager = inject_lora_params(
                self.skeleton, config, self.backend.device, begun, self._stored.read
            )
            touched = self._tables.touched()
        self.keep_whole(touched.__contains__, self._head.touched())
        self.num_adapter_parameters = sum(
            parameter.numel() for parameter in self.skeleton.parameters() if parameter.requires_grad
        )
        if (alpha := self.config.neftune_noise_alpha) is not None:
            add_noise(self.skeleton, alpha)
        self._divide()
        self.split.adapters_changed()
        self.spend_anew()  # limits must leave room for the adapter

    def begin_with_adapter(
        self, directory: str | PathLike[str], *, dropout: float | None = None
    ) -> None:
        """Attach a saved adapter, instead of a new one, to train it further.

        Its rank, targets, options and values apply. Preference losses compare with it, as it is
        now, unless the settings say `reference: base`.

        Args:
            directory: where PEFT's files of the adapter are.
            dropout: the dropout of the training; None: that of the saved adapter.

        Raises:
            AdapterError: there is no complete adapter, or it does not fit the model.
            ConfigError: the model has an adapter already.
        """
        path = Path(directory)
        saved = the_lora_config(path, self._task)
        saved.lora_dropout = saved.lora_dropout if dropout is None else dropout
        check_named_base(path, saved, self.config.model_name_or_path, self.gbi)
        self.attach_lora(adapter_config(self.skeleton, saved, path))
        load_weights(self._require_adapter(), path, self.split.layers_name, self.backend.parallel)
        self.config, self.reference = begins_with(self.config, self._require_adapter(), begun=True)

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return the adapter's fp32 parameters in the order of the model, as a list for an
        optimizer.
        """
        self._require_adapter()
        return [parameter for parameter in self.skeleton.parameters() if parameter.requires_grad]

    def get_trainer(
        self, optimizer: Optimizer | None = None, callbacks: Sequence[Any] = (), **options: Any
    ) -> LemaTrainer:
        """Return a trainer of this model.

        Args:
            optimizer: has the parameters of `get_trainable_parameters()`; None: that of the
                settings.
            callbacks: `transformers.TrainerCallback`s.
            options: further arguments of `LemaTrainer`.

        Returns:
            The trainer, whose `fit` trains.

        Raises:
            ConfigError: the model scores texts, for which it has no loss of tokens; or `optimizer`
                does not have the parameters of the adapter.
        """
        if self._task != "CAUSAL_LM":
            what = "the model scores texts, but LemaTrainer has only losses of tokens"
            raise ConfigError(
                what, how="give it to TRL's RewardTrainer, or to transformers' Trainer"
            )
        from lema.train.trainer import LemaTrainer

        check_reference(self.config, self.reference)
        self.settle_tokens()
        adapter = self.adapter  # which settles what settings leave open
        adapter.add_router_loss(self.config, self.directory)
        arguments = self.config, adapter, self.gbi, self.lora_manager, optimizer, self.memory
        if self.config.eval_prompts:
            from lema.train.inference.texts import Samples

            callbacks = [Samples(self), *callbacks]
        return LemaTrainer(*arguments, callbacks=callbacks, files=self.files, **options)

    def save_pretrained(self, directory: str | PathLike[str]) -> None:
        """Write PEFT's adapter files and `lema_config.json`.

        The chat template and the ends of the texts are written where they are not the model's own.
        Only the first of several processes writes.

        Args:
            directory: is made if need be; what it has of these files is replaced.

        Raises:
            DiskError: the files cannot be written.
        """
        base = base_of(self.config, self.gbi, BaseFiles(self.gbi), self.computing.dtype)
        arguments = self.backend, self._require_adapter(), self.config, base, self.reference
        leave_adapter(Path(directory), *arguments, [self.files.write_rendering])

    @cached_property
    def adapter(self) -> StreamedModel:
        """The model as the trainer drives it: visits of leased layers."""
        memory = self.memory  # first, because it settles where the head is
        warn_of_no_use(self.config, shared=self.backend.memory().shared, lazy=self.split.lazy)
        recompute = whether_recomputed(self.config)
        loss = loss_settings_of(self.config, self.backend.replicas.size)
        if loss.objective is not None:
            without_dropout(self.skeleton)
        activations = Activations(
            self.split,
            self.backend,
            memory.trace,
            recompute=self.allocation.recompute if recompute is None else recompute,
            saved=self.allocation.saved,
            products=self.allocation.products,
            saved_on=self.allocation.saved_on,
            boundaries=self.allocation.boundaries,
            offload_dir=Path(self.config.offload_dir or self.config.output_dir),
            at_once=self.config.activation_offloading == "legacy",
        )
        return StreamedModel(
            self.split,
            memory,
            self.backend,
            activations=activations,
            loss_chunk_tokens=self.config.loss_chunk_tokens or CHUNK_TOKENS,
            padding=self._padding,
            head=self.head_in_pieces(),
            runs_again=self.allocation.runs_again,
            advise=partial(advise, self.planner, self.allocation),
            loss=loss,
            reference=self.reference,
        )

    @cached_property
    def _layers(self) -> list[LayerBytes]:
        """The decoder layers as bytes: of processes that hold the model together, this one's
        part of each.
        """
        self._divide()
        records = local_records(self.skeleton, self.records, self.backend.parallel)
        arguments = (
            records,
            self.dtypes,
            self.split.layers_name,
            self.split.num_layers,
            self._tables.names,
        )
        return layer_bytes(*arguments, narrow=self.computing.narrow)

    @property
    # as they are leased: with experts in groups, if memory is spent so
    def _parts(self) -> ExpertParts:
        return (self.planner.blueprint.parts if self.allocation.experts else None) or ExpertParts(
            tuple(self._layers)
        )

    def keep_whole(self, chosen: Callable[[str], bool], head: str | None = None) -> None:
        """Keep embeddings whole whose rows would be read one by one, and a head that would be in
        pieces.

        Args:
            chosen: is called with the names of the embeddings' weights, and returns whether to keep
                one.
            head: why the head is kept; None: it is kept if `chosen` accepts its weights.

        Raises:
            ConfigError: the settings require rows or pieces.
        """
        if head is None and any(map(chosen, self._head.names)):
            head = "its weight has an adapter, or trains"
        if head is not None:
            self.outside_bytes += self._head.keep_whole(self._tables, head)
        if names := [name for name in self._tables.names if chosen(name)]:
            self.outside_bytes += self._tables.keep_whole(names)
            self.__dict__.pop("_layers", None)

    def _divide(self) -> None:
        """Divide the model, adapters attached or not, among the processes that hold it together;
        once.
        """
        if self.backend.parallel.size > 1 and not self._divided:
            words = self._head.handed_over() | self._tables.handed_over()
            self.backend.parallel.shard(self.skeleton, words)
            shard_records = local_records(self.skeleton, self.records, self.backend.parallel)
            arguments = (
                replace(self._stored, records=shard_records),
                self.split.layers_name,
                shard_records.keys() - words,
            )
            self.outside_bytes += load_outside(self.skeleton, *arguments)
            self.split.adapters_changed()
        self._divided = True

    @cached_property
    def allocation(self) -> Allocation:
        """How memory is used within the limits, or `MemoryLimitError`. It is computed at first
        use unless set.
        """
        allocation = self.planner.needs().allocation
        if self.lora_manager is not None:
            self.config = self.config.model_copy(update=self.planner.chosen)
        return allocation

    @cached_property
    def planner(self) -> Planner:
        """The planner, which finds the best use of memory for this model and the step of its
        settings.
        """
        return fitted_planner(self.opened, trains=self.lora_manager is not None)

    @property
    def opened(self) -> Planner:
        """The same before anything is chosen or looked at."""
        if "memory" in self.__dict__:
            self.memory.load_residents()  # because free memory is looked at
        adapter = training_bytes(self.skeleton, self.split.layers_name), self.num_adapter_parameters
        layers = self._layers
        outside = (self.outside_bytes, self._tables, self._head)  # in this order: ends are divided
        count = sum(parameter.numel() for parameter in self.skeleton.parameters())
        arguments = (
            self.directory,
            self.skeleton,
            layers,
            *outside,
            *adapter,
            self.gbi.nbytes,
            count,
        )
        where = self.split.layers_name, self.split.layers, self._tables.names
        narrow = self.computing.narrow
        cut = partial(expert_parts, self.records, self.dtypes, *where, narrow=narrow)
        parallel = self.backend.parallel
        reference_nbytes = reference_bytes(self.config, self.skeleton)
        how: dict[str, Any] = {
            "cut_experts": cut,
            "parallel": parallel,
            "computing": self.computing,
        }
        blueprint = Blueprint(*arguments, reference_bytes=reference_nbytes, **how)
        return opened_planner(self.config, blueprint, self.backend)

    def head_in_pieces(self) -> PiecedHead | None:
        """Return the head in pieces, which are leased after the layers; None: it is on the
        device.
        """
        return self._head.pieced(self.split, self.backend, self._parts.leased)

    @cached_property
    def memory(self) -> LayerStream:
        """The stream of layers for `allocation`. Each of several processes makes its own, at the
        same time.
        """
        for name in ("shard_weights", "shard_optimizer"):
            if getattr(self.config, name) and self.backend.replicas.size == 1:
                warnings.warn(
                    f"{name} does nothing in one process: torchrun starts several", stacklevel=2
                )
        if not self.allocation.pieces:
            self.outside_bytes += self._head.keep_whole(self._tables)
        leased, groups = self._parts.numbered(self._head.pieces(self._parts.leased))
        self.split.lease_experts(groups)
        return LayerStream(
            leased,
            self.backend,
            parts={at: [part.number for part in group] for at, group in groups.items()},
            prefetch_depth=self.allocation.slots - 1,
            residents=self.allocation.residents,
            host_cached=self.allocation.host_cached,
            sharded=self.config.shard_weights,
            reader=self._reader,
            trace=self._trace,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model's directory, with the chat template of the settings or of the
        adapter; `DataError` if there is none."""
        return self.files.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 128,
        *,
        batch_size: int | None = None,
        keys_values: KeyValues = "device",
        **options: object,
    ) -> list[str]:
        """Return the continuation of each prompt. A batch streams every layer once per new token.

        Processes that hold the model together must all call this, and all get the texts.

        Args:
            prompt: one text or several.
            max_new_tokens: the most tokens that each prompt gets.
            batch_size: prompts that run at once; None: all.
            keys_values: where keys and values wait between tokens.
            options: those of `generate` of transformers (do_sample, temperature, top_p,
                stop_strings).

        Returns:
            The texts, without their prompts.

        Raises:
            MemoryLimitError: keys and values of a batch do not fit.
            ConfigError: processes divide the tokens of a row.

        Example:
            ```python
            model = LemaModel.from_pretrained("out")
            print(model.generate("The capital of France is", max_new_tokens=8)[0])
            ```
        """
        from lema.train.inference.texts import texts_of

        return texts_of(self, prompt, max_new_tokens, batch_size, keys_values, options)

    def settle_tokens(self) -> bool:
        """Set a number for `tokens_per_step: auto` in `config`, and return whether there was none:
        that of the run in `output_dir`, if it has checkpoints, otherwise a measured one, with the
        errors of `hiding_tokens`."""
        if self.config.tokens_per_step != "auto":
            return False
        then = first_alone(
            self.backend.replicas, partial(newest_settings, Path(self.config.output_dir))
        )
        tokens = then.get("tokens_per_step") or hiding_tokens(self.planner)
        self.spend_anew()
        self.config = self.config.model_copy(update={"tokens_per_step": tokens})
        return True

    def settle_date(self) -> None:
        """Set the date of today in `config` if a chat template asks for it; one that is there
        stays.
        """
        self.config = first_alone(self.backend.replicas, partial(self.files.dated, self.config))

    def spend(self, allocation: Allocation) -> None:
        """Set the use of memory, after `spend_anew`.

        Args:
            allocation: what memory is spent on from now on.
        """
        self.allocation = allocation

    def spend_anew(self) -> None:
        """Forget the use of memory and drop the layers in it, so that `allocation` is computed
        or set again.
        """
        self.__dict__.pop("allocation", None)
        self.__dict__.pop("planner", None)
        if (stream := self.__dict__.pop("memory", None)) is not None:
            stream.leave()
        if (adapter := self.__dict__.pop("adapter", None)) is not None:
            adapter.close()

    def close(self, *, keep_backend: bool = False) -> None:
        """Stop reading and free the memory. With `keep_backend` the caller continues to use the
        device.
        """
        for open_still in [
            self.__dict__[name] for name in ("adapter", "memory") if name in self.__dict__
        ]:
            open_still.close()
        self._reader.close()
        (self.backend.synchronize if keep_backend else self.backend.close)()
        self._numerics.put_back()

    def read_stored(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return tensors of the model without adapters, by name, on the device, without those
        that are not stored.
        """
        return self._stored.read(names)

    def _reopen(self, directory: Path) -> None:
        """Take what the settings and the reference are of the adapter in a directory."""
        self.config, self.reference = reopened(
            self.config,
            self._require_adapter(),
            directory,
            self.split.layers_name,
            self.backend.parallel,
        )

    def choose_settings(self, chosen: Mapping[str, Any]) -> None:
        """Take the values that a plan has chosen for settings that leave it to the plan."""
        self.config = self.config.model_copy(update=chosen)

    def _require_adapter(self) -> PeftModel:
        if self.lora_manager is None:
            raise ConfigError("the model has no adapter yet", how="call initialize_lora() first")
        return self.lora_manager


def _own_config(files: ModelFiles, config: LemaConfig) -> PreTrainedConfig:
    """Return a copy of the model's config, whose type is that of the settings."""
    hf_config = deepcopy(files.config)
    if config.model_type is not None and config.model_type != hf_config.model_type:
        what = f"the model is of type {hf_config.model_type!r}, not {config.model_type!r}"
        where = str(files.directory / "config.json")
        raise ConfigError(what, where=where, how="correct model_type, or remove it")
    return hf_config


def _warn_of_config(hf_config: PreTrainedConfig, notes: Sequence[str]) -> None:
    """Warn of what there is to note on how it is computed, and of outputs that are not made."""
    for note in notes:
        warnings.warn(note, stacklevel=3)
    if ignored_outputs := other_outputs(hf_config):
        what = (
            f"config.json sets {' and '.join(ignored_outputs)}, which changes no number, "
            "and streamed layers do not do"
        )
        warnings.warn(f"{what}: the model returns logits and a loss", stacklevel=3)
