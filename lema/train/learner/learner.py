"""A model whose layers stream, and any number of adapters that train on it, together or alone.

Requests that wait go through the layers in one pass, whichever adapters they are of: each
micro-batch names the adapter that its layers compute with, so the weights of the model are read
once for all. A micro-batch has rows of one request only, so what a request makes does not depend on
what it is joined with: its log-probabilities and gradients are those of its being alone, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig
from torch import Tensor

from lema.config import LemaConfig
from lema.engine.layers.layer_pass import LayerPass
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import NOTHING
from lema.errors import ConfigError, DataError
from lema.model.inputs import IMAGES, model_inputs
from lema.model.layers.routing import check_choices, has_routers
from lema.stream import StreamCounters
from lema.train.hf.peftmodel import StreamedPeftModel
from lema.train.learner.adapter import AdamSettings, Adapter, AdapterSpec, Targets
from lema.train.learner.budget import AdapterBudget
from lema.train.learner.heads import Heads, Scored
from lema.train.learner.images import BatchImages, LearnerImages
from lema.train.learner.rows import ROUTED, AdapterRows, Datum, MicroBatch, micro_batches_of
from lema.train.learner.served import Served
from lema.train.model import LemaModel

__all__ = ["EMPTY", "Learner"]

EMPTY = "default"  # PEFT's name of its first adapter, which is there so that there is one
LARGEST_SEED = 2**63


class Learner:
    """A streamed model with adapters that come and go; open one with `Learner.open`.

    One thread calls its methods, one after the other.

    Args:
        opened: the model, with an adapter `default` that does not train.
        targets: what adapters may adapt.
        micro_batch_tokens: tokens of a micro-batch with their padding, at most; but a row is never
            divided.
        longest: tokens of a row, at most.
        budget: the memory that adapters may take; None: as much as there is.
        served: what the server that adapters are for takes of them; None: nobody asks.

    Attributes:
        model: the model as PEFT's.
    """

    def __init__(
        self,
        opened: LemaModel,
        targets: Targets,
        *,
        micro_batch_tokens: int,
        longest: int,
        budget: AdapterBudget | None = None,
        served: Served | None = None,
    ) -> None:
        self.model = StreamedPeftModel.around(opened)
        self._opened = opened
        self._targets = targets
        self._micro_batch_tokens = micro_batch_tokens
        self._longest = longest
        self._budget = budget
        self._served = served
        self._images = LearnerImages.of(opened)
        self._adapters: dict[str, Adapter] = {}

    @classmethod
    def open(
        cls,
        model_name_or_path: str | PathLike[str],
        *,
        micro_batch_tokens: int = 4096,
        longest: int = 4096,
        reserve: tuple[int, int] = (1, 64),
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> Self:
        """Open a model by its directory or hub id.

        Args:
            model_name_or_path: model directory or hub id.
            micro_batch_tokens: tokens of a micro-batch with padding, at most; no row is divided.
            longest: tokens of a row, at most; memory is planned for such rows.
            reserve: how many adapters of which rank the memory is planned for.
            trust_remote_code: run the model's own code.
            settings: settings of `LemaConfig`.

        Returns:
            The learner, without adapters.

        Raises:
            ConfigError: a setting is wrong.
            MemoryLimitError: the limits are too small.

        Example:
            ```python
            learner = Learner.open("Qwen/Qwen3-8B", device_memory="8GB", reserve=(16, 32))
            learner.add("one", AdapterSpec(rank=32, seed=1))
            learner.run([AdapterRows("one", data, "cross_entropy")])
            ```
        """
        config = LemaConfig(
            model_name_or_path=str(model_name_or_path),
            **{
                "gradient_checkpointing": True,
                "micro_batch_size": max(1, micro_batch_tokens // longest),
                **settings,
            },
        )
        opened = LemaModel(config, trust_remote_code=trust_remote_code)
        try:
            targets, served = _begun(opened)
            longest = _planned_length(opened, longest)
            budget = AdapterBudget(targets, *reserve)
            budget.reserve(opened)
            return cls(
                opened,
                targets,
                micro_batch_tokens=micro_batch_tokens,
                longest=longest,
                budget=budget,
                served=served,
            )
        except BaseException:
            opened.close()
            raise

    @property
    def opened(self) -> LemaModel:
        """The model as LEMA opened it."""
        return self._opened

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name."""
        return self._adapters

    @property
    def images(self) -> LearnerImages | None:
        """Makes tokens of images; None: the model is open for text alone."""
        return self._images

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters that are on the device, with gradients and moments."""
        # a copy, because other threads ask, too
        return sum(adapter.nbytes for adapter in [*self._adapters.values()])

    @property
    def budget(self) -> AdapterBudget | None:
        """The memory that adapters may take; None: as much as there is."""
        return self._budget

    @property
    def counters(self) -> StreamCounters:
        """What streaming has cost so far."""
        return self._opened.adapter.counters

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has."""
        return int(self._opened.skeleton.config.get_text_config().vocab_size)

    @property
    def longest(self) -> int:
        """Tokens of a row, at most."""
        return self._longest

    def close(self) -> None:
        """Stop reading and free the memory."""
        self.model.close()

    def check(self, spec: AdapterSpec) -> None:
        """Make sure that an adapter can be; any thread may ask.

        Raises:
            ConfigError: it would adapt nothing, or the server that it is for (`lora_serving`) does
                not take it.
            MemoryLimitError: it takes more memory than was planned for all.
        """
        lora = self._targets.lora(spec)
        if self._served is not None:
            self._served.check(lora)
        if self._budget is not None:
            self._budget.check(spec)

    def check_rows(self, request: AdapterRows) -> None:
        """Make sure that rows are rows of this model; any thread may ask.

        Raises:
            ConfigError: choices of experts are none of this model's.
            DataError: something else of them is not.
        """
        request.check(self.vocabulary, self._longest)
        if self._opened.config.sequence_chunk and any(datum.images for datum in request.data):
            what = "rows with images do not go through the layers in chunks"
            raise DataError(what, where="model_input", how="leave sequence_chunk out")
        chosen = [datum for datum in request.data if datum.choices is not None]
        widths = {datum.choices.shape[-1] for datum in chosen if datum.choices is not None}
        if len(widths) > 1:
            what = f"rows bring choices of experts of {len(widths)} widths"
            raise DataError(what, where=ROUTED, how="give as many of each token in all rows")
        for datum in chosen:
            self._check_choices(datum)

    def _check_choices(self, datum: Datum) -> None:
        """Make sure that the routers can choose what a row asks; see `check_rows`."""
        split = self._opened.split
        choices = datum.choices
        assert choices is not None
        if not any(has_routers(layer) for layer in split.layers):
            what = "rows bring choices of experts, and the model has no experts"
            raise DataError(what, where=ROUTED, how="leave them out")
        if self._opened.config.torch_compile:
            what = "compiled layers cannot be told which experts to choose"
            raise DataError(what, where=ROUTED, how="leave them out")
        tokens = len(datum.tokens)
        width = choices.shape[-1]
        if choices.dim() != 2 or len(choices) != tokens or not width or width % split.num_layers:
            what = f"choices of experts have the shape {[*choices.shape]}"
            how = f"give [{tokens} tokens, {split.num_layers} layers * experts of each token]"
            raise DataError(what, where=ROUTED, how=how)
        by_layer = choices.unflatten(-1, (split.num_layers, -1))
        for number, layer in enumerate(split.layers):
            check_choices(layer, number, by_layer[:, number])

    def add(self, name: str, spec: AdapterSpec) -> Adapter:
        """Attach a new adapter, with the values that PEFT draws for its seed.

        Raises:
            ConfigError: there is one of this name, or it would adapt nothing.
            MemoryLimitError: the memory was planned for fewer adapters, or of lower ranks.
        """
        if name in self._adapters or name == EMPTY or not name.isidentifier():
            raise ConfigError(f"no adapter can be named {name!r:.80}", where="Learner.add")
        self._targets.chosen(spec)
        if self._budget is not None:
            self._budget.check(spec, self.adapter_bytes)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(spec.seed % LARGEST_SEED)
            self.model.add_adapter(name, self._targets.lora(spec))
        part = f".{name}."
        parameters = {
            path.replace(part, "."): parameter
            for path, parameter in self.model.named_parameters()
            if part in path
        }
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._opened.split.adapters_changed()
        adapter = Adapter(name, spec, parameters)
        self._adapters[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Remove an adapter, and free its memory."""
        del self._adapters[name]
        self.model.delete_adapter(name)
        self._opened.split.adapters_changed()

    def step(self, name: str, settings: AdamSettings) -> float:
        """Take an optimizer step of an adapter; see `Adapter.step`."""
        return self._adapters[name].step(settings)

    def publish(self, name: str, directory: Path) -> None:
        """Write PEFT's files of an adapter into a directory.

        Raises:
            WeightsError: the base's files have changed since they were opened.
        """
        # without the base's head, which PEFT would add where the head is adapted
        options = {"selected_adapters": [name], "save_embedding_layers": False}
        self.model.save_pretrained(str(directory), **options)

    def run(
        self,
        requests: Sequence[AdapterRows],
        *,
        differentiate: bool = True,
    ) -> list[Scored]:
        """Take the rows of some requests through the model in one pass; gradients are added to
        those of each one's adapter.

        Args:
            requests: the requests, which were checked (`check_rows`).
            differentiate: whether gradients are formed.

        Returns:
            What was made of each.

        Raises:
            DataError: an adapter is not there.
        """
        self._check_there(requests, differentiate)
        parts = [*micro_batches_of(requests, self._micro_batch_tokens)]
        adapters = [requests[part.request].adapter for part in parts]
        states = self._last_states(parts, adapters, differentiate)
        engine = self._opened.adapter.engine
        heads = Heads(engine, requests, self._adapters, self._opened.config.loss_chunk_tokens)
        gradients = [
            heads.score(part, state.detach(), differentiate=differentiate)
            for part, state in zip(parts, states, strict=True)
        ]
        scored = heads.scored(parts, gradients)
        if differentiate:
            torch.autograd.backward(states, gradients)
        return scored

    def _check_there(self, requests: Sequence[AdapterRows], differentiate: bool) -> None:
        """Make sure that the adapters of some requests are there, and that they train."""
        names = self._adapters if differentiate else self.model.peft_config
        for request in requests:
            if request.adapter not in names:
                raise DataError("the adapter is not there", where=request.adapter)
            if differentiate:
                # because PEFT lets no adapter train but the active one, where it attaches another
                for parameter in self._adapters[request.adapter].parameters.values():
                    parameter.requires_grad_(True)

    def _last_states(
        self, parts: Sequence[MicroBatch], adapters: Sequence[str], differentiate: bool
    ) -> list[Tensor]:
        """Take micro-batches, each with its adapter, through all layers in one pass; return what
        the last layer makes of each, `[rows, tokens, hidden]`, with a graph if `differentiate`.
        """
        streamed = self._opened.adapter
        engine = streamed.engine
        on_device = streamed.step_inputs.to_device([part.inputs() for part in parts])
        batches: list[dict[str, Any]] = [{**batch} for batch in on_device]
        for batch, part in zip(batches, parts, strict=True):
            if self._images is not None and any(datum.images for datum in part.data):
                batch[IMAGES] = BatchImages(self._images, [datum.images for datum in part.data])
        lowest = streamed.lowest_trained if differentiate else None
        stream = streamed.stream
        stream.cancel()
        stream.announce(stream.forward_order() if lowest is None else stream.training_order(lowest))
        with torch.set_grad_enabled(differentiate), ExitStack() as first_lease:
            first = first_lease.enter_context(
                nullcontext()
                if engine.split.has_learned(model_inputs(batches[0]))
                else stream.lease(0)
            )
            entered, calls = streamed.prelude(batches, first)
            choices = [part.choices(engine.split.num_layers) for part in parts]
            for number, layer_calls in enumerate(calls):
                for call, name, of_part in zip(layer_calls, adapters, choices, strict=True):
                    call.compute_with(name)
                    if of_part is not None:
                        call.choose(of_part[:, :, number].flatten(0, 1))
            hidden = engine.split.enter([state.detach() for state in entered])
            del entered
            num_layers = engine.split.num_layers
            saving = NOTHING if lowest is None else streamed.step_saving(hidden, lowest, num_layers)
            rows = Rows(calls, list(hidden))
            del hidden
            layer_pass = LayerPass(
                engine,
                streamed.layers,
                rows,
                lowest=lowest,
                saving=saving,
                end_first=first_lease.close,
            )
            return layer_pass.hidden_states()


def _planned_length(opened: LemaModel, longest: int) -> int:
    """Plan memory for rows of so many tokens, or as many as the model was made for, unless the
    settings say another length; return the number.
    """
    config = opened.skeleton.config.get_text_config()
    most = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    if opened.config.max_length is None:
        opened.choose_settings({"max_length": most})
    return most


def _begun(opened: LemaModel) -> tuple[Targets, Served | None]:
    """Make a model ready for adapters that come and go; return what they may adapt, and what the
    server that they are for takes of them.
    """
    if opened.backend.parallel.size > 1 or opened.backend.replicas.size > 1:
        raise ConfigError(
            "a learner is one process", where="Learner", how="start it without torchrun"
        )
    for setting in ("sequence_chunk", "mlp_tile_tokens"):
        if getattr(opened.config, setting) == "auto":
            raise ConfigError(
                "a learner does not choose how many tokens are computed at once",
                where=setting,
                how="set it to a number, or leave it out",
            )
    targets = Targets.of(opened.skeleton)
    opened.keep_whole(lambda _: False, "losses of a caller's need its logits")
    first = [*targets.attn, *targets.mlp][:1]
    if not first:
        raise ConfigError("the layers of the model have no linear to adapt", where="Learner")
    lora = LoraConfig(r=1, target_modules=first, task_type="CAUSAL_LM")
    server = opened.config.lora_serving
    served = None if server is None else Served.of(server, opened.skeleton, lora)
    opened.attach_lora(lora, seed=0)
    for parameter in opened.get_trainable_parameters():
        parameter.requires_grad_(False)
    opened.split.adapters_changed()
    return targets, served
