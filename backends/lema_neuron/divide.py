"""A model whose adapters are attached, divided among the ranks: `lema.backend.Parallel` over a
communication group.

Adapters are attached to the whole model first, with the numbers PEFT draws for it; then both are
cut. So the initial values of an adapter are bitwise the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Exchange, SingleProcess
from lema.backend.layout import KvLayout
from lema.errors import ConfigError, ModelError
from lema.model.experts import stacked_weights
from lema.model.partition import layouts_of
from lema.model.skeleton import find_embed_head, find_layers
from lema_neuron.boundary import SEQUENCE
from lema_neuron.comm import Comm, Counted
from lema_neuron.experts import shard_adapters
from lema_neuron.gradients import carry, global_norm, is_marked, mark, reduce_gradients
from lema_neuron.mappings import gather_sequence, scatter_to_group
from lema_neuron.parallelize import TensorParallel
from lema_neuron.peft.layer import ParallelLinear
from lema_neuron.peft.refusals import check_config
from lema_neuron.shares import replicated_part
from lema_neuron.vocabulary import Words, divide_words, words_of

__all__ = ["Division"]

ADAPTER = "default"


class Division:
    """How the layers of one model are divided over a group.

    Args:
        comm: the group; every rank makes the same calls in the same order.
        sequence_parallel: between attention and MLP each rank has its share of the tokens.
        kv_layout: where copies of key and value heads lie, if there are fewer of them than ranks.
    """

    def __init__(
        self, comm: Comm, *, sequence_parallel: bool = False, kv_layout: KvLayout = "tile"
    ) -> None:
        self._comm = Counted(comm)
        self._kv_layout = kv_layout
        self._sequence_parallel = sequence_parallel and comm.size > 1
        self._words: Words | None = None  # of the head; None: it is whole

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._comm.size

    @property
    def exchanged(self) -> Exchange:
        """The bytes that the collectives of layers, words and gradients have exchanged so far."""
        return self._comm.exchanged

    def shard(self, layer: nn.Module, words: Collection[str] = ()) -> None:
        """Replace the modules of every decoder layer, and the adapters on them, by this rank's
        share of them.

        Args:
            layer: the model; its layers are on `meta`, its adapters real, or there are none.
            words: names of weights of the input embeddings and the head, whose rows are divided as
                well.

        Raises:
            ModelError: the model has no tensor-parallel plan, or the plan does not cover a module;
                it is named.
            ConfigError: something cannot be cut for so many ranks, or the adapter is not exact when
                it is cut.
        """
        if not isinstance(layer, PreTrainedModel):
            if self.size == 1:
                return
            raise ModelError(
                "layers are divided by the plan of their model", where=type(layer).__name__
            )
        model = layer
        adapters = _take_off(model)
        plan = TensorParallel(
            model,
            self._comm,
            dict(model.tp_plan or {}),
            layouts_of(model, self.size, self._kv_layout),
            self._sequence_parallel,
        )
        for decoder_layer in find_layers(model)[1]:
            plan.shard(decoder_layer)
        for name, adapter in adapters.items():
            model.set_submodule(
                name, _put_back(model.get_submodule(name), adapter, name, self._comm)
            )
        divide_words(model, words, self._comm)
        self._words = words_of(find_embed_head(model)[1])
        mark(model, self._comm)

    def cross_entropy(
        self, logits: Callable[[], Tensor], targets: Tensor, **options: Any
    ) -> Tensor:
        """Return the cross-entropy of the head's logits. With a divided head, each rank computes
        those of its words.
        """
        if self._words is None:
            return SingleProcess().cross_entropy(logits, targets, **options)
        with self._words.only_local():
            local_logits = logits()
        return self._words.cross_entropy(local_logits, targets, **options)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients that are partial, because each rank has computed only a part of
        them.
        """
        reduce_gradients(self._marked(parameters))

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the group; a parameter that several ranks hold
        counts once.
        """
        return global_norm(self._marked(parameters), self._comm)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""
        return list(self._comm.all_gather(tensor.unsqueeze(0), 0).unbind(0))

    def enter_layers(self, hidden: Tensor) -> Tensor:
        """Return this rank's share of the tokens, under sequence parallelism; else all of them."""
        return scatter_to_group(hidden, self._comm, SEQUENCE) if self._sequence_parallel else hidden

    def leave_layers(self, hidden: Tensor) -> Tensor:
        """Return the tokens of all ranks; what follows is the same on every rank."""
        if not self._sequence_parallel:
            return hidden
        return gather_sequence(hidden, self._comm, SEQUENCE, partial=False)

    def _marked(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Mark unmarked parameters, which are outside the layers: every rank has them whole."""
        marked = list(parameters)
        for parameter in marked:
            if not is_marked(parameter):
                carry(parameter, replicated_part(self._comm, partial=False))
        return marked


def _take_off(model: PreTrainedModel) -> dict[str, LoraLayer]:
    """Detach the adapters, so that the modules which they wrap are back in place; return
    adapters by module name.
    """
    config: LoraConfig | None = getattr(model, "peft_config", {}).get(ADAPTER)
    if config is None:
        return {}
    check_config(config, parameters=True)
    inside = f"{find_layers(model)[0]}."
    adapters: dict[str, LoraLayer] = {}
    for name, module in list(model.named_modules()):
        # adapters on several weights of a module are nested
        nested = name.removesuffix(".base_layer") in adapters
        if not isinstance(module, LoraLayer) or not name.startswith(inside) or nested:
            continue
        base = module.get_base_layer()
        on_weight = isinstance(module, ParamWrapper) and bool(stacked_weights(base))
        if not (on_weight or isinstance(base, nn.Linear)) or getattr(
            module, "lora_embedding_A", None
        ):
            raise ConfigError(
                (
                    f"an adapter on {name}, which is neither linear nor experts, cannot be "
                    "divided among processes"
                ),
                where="lora_target_modules",
                how="name linear modules of attention and of the dense network",
            )
        model.set_submodule(name, base)
        adapters[name] = module
    return adapters


def _put_back(base: nn.Module, adapter: LoraLayer, name: str, comm: Comm) -> nn.Module:
    """Return an adapter over a module that has been divided, with this rank's share of its
    values.
    """
    if isinstance(adapter, ParamWrapper):
        shard_adapters(adapter, name, comm)
        return adapter
    factors = {
        f"{kind}.{ADAPTER}.{leaf}": parameter
        for kind in ("lora_A", "lora_B", "lora_magnitude_vector")
        if ADAPTER in getattr(adapter, kind)
        for leaf, parameter in getattr(adapter, kind)[ADAPTER].named_parameters()
    }
    with torch.device("meta"):
        parallel_linear = ParallelLinear(
            base,
            ADAPTER,
            adapter.r[ADAPTER],
            lora_alpha=adapter.lora_alpha[ADAPTER],
            config=_config_of(adapter),
        )
    parts = parallel_linear.parts()
    for owner in ("lora_A", "lora_B"):
        module = getattr(parallel_linear, owner)[ADAPTER]
        list_parts = getattr(module, "parts", None)
        parts |= {
            f"{owner}.{ADAPTER}.{leaf}": part
            for leaf, part in (list_parts() if callable(list_parts) else {}).items()
        }
    for path, factor in factors.items():
        owner, _, leaf = path.rpartition(".")
        local_shard = parts[path].shard(factor.detach(), comm.rank)
        setattr(
            parallel_linear.get_submodule(owner),
            leaf,
            nn.Parameter(local_shard.clone(), requires_grad=factor.requires_grad),
        )
    parallel_linear.train(cast(nn.Module, adapter).training)
    assert not any(parameter.is_meta for parameter in parallel_linear.lora_A.parameters()), (
        f"{name} was left without values"
    )
    return parallel_linear


def _config_of(adapter: LoraLayer) -> LoraConfig:
    dropout = adapter.lora_dropout[ADAPTER]
    return LoraConfig(
        lora_dropout=float(getattr(dropout, "p", 0.0)),
        use_rslora=bool(adapter.use_rslora.get(ADAPTER, False)),
        use_dora=bool(adapter.use_dora.get(ADAPTER, False)),
        lora_bias=bool(adapter.lora_bias.get(ADAPTER, False)),
        init_lora_weights=False,
    )
