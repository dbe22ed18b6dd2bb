"""`LemaModel`, the model that a user holds: skeleton, adapter and stream, put together from a
config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lema.backend import Backend
from lema.backend.contextgroup import check_dividing
from lema.backend.group import first_alone
from lema.backend.trace import NO_TRACE, NoTrace
from lema.config import LemaConfig
from lema.config.types import dtype_name
from lema.engine import StreamedModel
from lema.engine.generation import KeyValues
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.reference_rows import StartingAdapter
from lema.errors import ConfigError, named_in
from lema.lora.attach import configured_lora, inject_lora_params
from lema.lora.base import (
    base_of,
    check_base,
    check_named_base,
    computed_for,
    note_quantization,
)
from lema.lora.class_names import published_class
from lema.lora.files import (
    adapter_config,
    load_weights,
    read_settings,
    settings_file,
    the_lora_config,
    with_adapter,
)
from lema.lora.options import with_options
from lema.lora.serving.checks import check_served
from lema.lora.targets import warn_of_left_out
from lema.model import Split
from lema.model.computing import Computing
from lema.model.files import ModelFiles
from lema.model.inputs import add_noise
from lema.model.sequence.rope import check_rope
from lema.model.towers import foreign_inputs
from lema.plan import Allocation
from lema.plan.plan import hiding_tokens
from lema.plan.planner import Planner
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.quantized.records import Stored
from lema.storage.rendering import read_templates
from lema.storage.verify import BaseFiles
from lema.stream import LayerStream
from lema.train.checkpoint.format import leave_adapter
from lema.train.checkpoint.resume import newest_settings
from lema.train.opened.memory import MemoryUse, planner_of_opened
from lema.train.opened.model import open_model
from lema.train.opened.outer import OuterWeights
from lema.train.reference import begins_with, check_reference, reopened

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
        files = files or ModelFiles(config, trust_remote_code=trust_remote_code)
        if config.rope_parameters is not None:  # in full, as checkpoints and cards have them
            config = config.model_copy(update={"rope_parameters": files.rope_parameters})
        self.config = config
        self.trusted = trust_remote_code
        self._opened = open_model(
            config,
            backend=backend,
            files=files,
            trust_remote_code=trust_remote_code,
            trace=trace,
            num_labels=num_labels,
        )
        self.lora_manager: PeftModel | None = None
        self.num_adapter_parameters = 0
        self.reference: StartingAdapter | None = None  # that preference losses compare with
        self._memory_use: MemoryUse | None = None

    @property
    def files(self) -> ModelFiles:
        """The files of the model's directory."""
        return self._opened.files

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self._opened.directory

    @property
    def backend(self) -> Backend:
        """The device."""
        return self._opened.backend

    @property
    def gbi(self) -> GlobalBinaryIndex:
        """Where every tensor of the model's files lies."""
        return self._opened.gbi

    @property
    def computing(self) -> Computing:
        """The types of weights and of computing."""
        return self._opened.computing

    @property
    def skeleton(self) -> PreTrainedModel:
        """The model of transformers, without the weights of its decoder layers."""
        return self._opened.skeleton

    @property
    def fused(self) -> str | None:
        """What is computed by the device's own kernels; None: nothing is."""
        return self._opened.fused

    @property
    def records(self) -> Mapping[str, Stored]:
        """Where each tensor is stored, by its name in the model without adapters."""
        return self._opened.stored.records

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The type that the model wants each of its tensors in, by name."""
        return self._opened.stored.dtypes

    @property
    def split(self) -> Split:
        """The model in its parts: prelude, layers and head."""
        return self._opened.split

    @property
    def outer(self) -> OuterWeights:
        """The weights outside the decoder layers."""
        return self._opened.outer

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
            note_quantization(path, config)
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
        self._check_served(lora)
        self.attach_lora(lora, seed=self.config.seed)
        self.config, self.reference = begins_with(self.config, self._require_adapter(), begun=False)

    @cached_property
    def foreign_inputs(self) -> frozenset[str]:
        """Inputs that the published class reads and this one does not: images, for one."""
        if self._opened.scores:
            return frozenset()
        return foreign_inputs(self.skeleton, published_class(self._opened.files.config))

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
        if self.outer.divided and self.backend.parallel.size > 1:
            what = "the layers are already divided among processes"
            raise ConfigError(what, how="call initialize_lora() before anything else")
        # because PEFT copies rows as it attaches them
        if config.trainable_token_indices is not None:
            self.keep_whole(lambda name: not name.startswith(f"{self.split.layers_name}."))
        # the head was drawn before
        drawn = self._opened.head_generator
        begun = seed if seed is None or drawn is None else drawn
        with self.outer.tables.taken_out():
            self.lora_manager = inject_lora_params(
                self.skeleton, config, self.backend.device, begun, self._opened.stored.read
            )
            touched = self.outer.tables.touched()
        self.keep_whole(touched.__contains__, self.outer.head.touched())
        self.num_adapter_parameters = sum(
            parameter.numel() for parameter in self.skeleton.parameters() if parameter.requires_grad
        )
        if (alpha := self.config.neftune_noise_alpha) is not None:
            add_noise(self.skeleton, alpha)
        self.outer.divide(self.split)
        self.split.adapters_changed()
        self.respend()  # limits must leave room for the adapter

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
        if self.config.rope_parameters is None:
            check_rope(None, path)
        saved = the_lora_config(path, "SEQ_CLS" if self._opened.scores else "CAUSAL_LM")
        if dropout is not None:
            saved = with_options(saved, lora_dropout=dropout)
        check_named_base(path, saved, self.config.model_name_or_path, self.gbi)
        saved = adapter_config(self.skeleton, saved, path)
        self._check_served(saved)
        self.attach_lora(saved)
        load_weights(self._require_adapter(), path, self.split.layers_name, self.backend.parallel)
        self.config, self.reference = begins_with(self.config, self._require_adapter(), begun=True)

    def _check_served(self, lora: LoraConfig) -> None:
        """Refuse an adapter that is to train, if the server that it is for does not take it."""
        if self.config.lora_serving is not None:
            check_served(self.config.lora_serving, self.skeleton, lora, where="lora_serving")

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
        if self._opened.scores:
            what = "the model scores texts, but LemaTrainer has only losses of tokens"
            raise ConfigError(
                what, how="give it to TRL's RewardTrainer, or to transformers' Trainer"
            )
        from lema.train.trainer import LemaTrainer

        check_reference(self.config, self.reference)
        check_dividing(self.backend.replicas, self.config.context_parallel_size)
        self.settle_tokens()
        adapter = self.adapter  # which settles what settings leave open
        adapter.add_router_loss(self.config, self.directory)
        if self.config.eval_prompts:
            from lema.train.inference.texts import Samples

            callbacks = [Samples(self), *callbacks]
        return LemaTrainer(
            self.config,
            adapter,
            self.gbi,
            self.lora_manager,
            optimizer,
            self.memory,
            callbacks=callbacks,
            files=self.files,
            **options,
        )

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

    @property
    def adapter(self) -> StreamedModel:
        """The model as the trainer drives it: visits of leased layers."""
        return self._in_memory.streamed

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
        self.outer.keep_whole(chosen, head)

    @property
    def _in_memory(self) -> MemoryUse:
        """What memory is spent on; it is planned at its first use, unless `spend` has set it."""
        if self._memory_use is None:
            self._memory_use = MemoryUse(
                self._opened,
                self.config,
                num_adapter_parameters=self.num_adapter_parameters,
                reference=self.reference,
                choose=None if self.lora_manager is None else self.choose_settings,
            )
        return self._memory_use

    @property
    def allocation(self) -> Allocation:
        """How memory is used within the limits, or `MemoryLimitError`. It is computed at first
        use unless set.
        """
        return self._in_memory.allocation

    @property
    def planner(self) -> Planner:
        """The planner, which finds the best use of memory for this model and the step of its
        settings.
        """
        return self._in_memory.planner

    @property
    def opened(self) -> Planner:
        """The same before anything is chosen or looked at."""
        if self._memory_use is not None:
            self._memory_use.load_residents()  # because free memory is looked at
        return planner_of_opened(self._opened, self.config, self.num_adapter_parameters)

    def head_in_pieces(self) -> PiecedHead | None:
        """Return the head in pieces, which are leased after the layers; None: it is on the
        device.
        """
        return self._in_memory.head_in_pieces()

    @property
    def memory(self) -> LayerStream:
        """The stream of layers for `allocation`. Each of several processes makes its own, at the
        same time.
        """
        return self._in_memory.stream

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model's directory, with the chat template of the settings or of the
        adapter; `DataError` if there is none."""
        return self.files.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 128,
        *,
        chat: bool | None = None,
        batch_size: int | None = None,
        keys_values: KeyValues = "device",
        **options: object,
    ) -> list[str]:
        """Return what follows each prompt. A batch streams every layer once per new token.

        Processes that hold the model together must all call this, and all get the texts.

        Args:
            prompt: one text or several.
            max_new_tokens: the most tokens that each prompt gets.
            chat: True: a prompt is a message of the user, and the answer follows it; False: a
                prompt is text that is continued as it is; None: prompts are written as the rows
                were that the adapter was trained on, and as they are where no training is known.
            batch_size: prompts that run at once; None: all.
            keys_values: where keys and values wait between tokens.
            options: those of `generate` of transformers (do_sample, temperature, top_p,
                stop_strings).

        Returns:
            The texts, without their prompts.

        Raises:
            MemoryLimitError: keys and values of a batch do not fit.
            ConfigError: processes divide the tokens of a row, or `chat` is asked for and the
                tokenizer has no chat template.

        Example:
            ```python
            model = LemaModel.from_pretrained("out")
            print(model.generate("The capital of France is", max_new_tokens=8)[0])
            ```
        """
        from lema.train.inference.prompt_form import recorded_form
        from lema.train.inference.texts import texts_of

        form = recorded_form(self.files, chat)
        return texts_of(self, prompt, max_new_tokens, batch_size, keys_values, options, form)

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
        self.respend()
        self.config = self.config.model_copy(update={"tokens_per_step": tokens})
        return True

    def settle_date(self) -> None:
        """Set the date of today in `config` if a chat template asks for it; one that is there
        stays.
        """
        self.config = first_alone(self.backend.replicas, partial(self.files.dated, self.config))

    def spend(self, allocation: Allocation) -> None:
        """Spend memory anew, in a given way.

        Args:
            allocation: what memory is spent on from now on.
        """
        self._memory_use = self._in_memory.in_another_way(allocation)

    def respend(self) -> None:
        """Forget the use of memory and drop the layers in it, so that it is planned again, or set
        by `spend`.
        """
        before = self._memory_use
        self._memory_use = None
        if before is not None:
            before.leave()

    def close(self, *, keep_backend: bool = False) -> None:
        """Stop reading and free the memory. With `keep_backend` the caller continues to use the
        device.
        """
        if self._memory_use is not None:
            self._memory_use.close()
        self._opened.close(keep_backend=keep_backend)

    def read_stored(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return tensors of the model without adapters, by name, on the device, without those
        that are not stored.
        """
        return self._opened.stored.read(names)

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
