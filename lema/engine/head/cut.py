"""The head's weight cut into pieces of the vocabulary, which are leased after the top layer as if
they were layers.

A piece is some of the weight's rows, which follow each other where they are stored, and no larger
than the largest layer, so that it passes through the same slots. The product by it gives a part of
the logits. That is enough for the loss (`lema.engine.head.pieces`) where what the model does with
the product afterwards it does to each logit alone, as soft-capping and logit scales do. Where it
does more, or the head trains, is adapted or stored otherwise, it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lema.backend import Backend, Parallel
from lema.backend.registry import has_addresses
from lema.config import LemaConfig
from lema.config.units import human_bytes
from lema.engine.head.pieces import PiecedHead
from lema.engine.head.spans import spans_of
from lema.errors import ConfigError
from lema.model import Split
from lema.model.capture import past_layers, replaced, tensors_in
from lema.model.outer_weights import StoredTensors
from lema.model.row_tables import RowTables
from lema.model.skeleton import find_embed_head, find_layers
from lema.storage.header import TensorRecord
from lema.storage.slices import part_of
from lema.stream.placement import LayerBytes, lay_out_tensors

__all__ = ["HeadCut", "open_embed_head"]

SETTING = "head"
LEAST_BYTES = 16 << 20  # of a head that is cut unasked: a smaller one is worth no second reading
FEW = 3  # rows of the weight with which the model's own code is tested, besides all of them
Where = Literal["auto", "device", "stream"]
Span = tuple[int, int]

aten = torch.ops.aten
COPIES = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
}


class HeadCut:
    """The head of a model, as long as it may be cut, or divided. `ConfigError`: it cannot be, as
    the setting asks for.

    Args:
        model: without adapters, its weights on `meta`; `stored` says where these are.
        where: the setting. "auto": it may be cut where a limit of device memory asks for it, if it
            is large.
        planned_for: a device, or the name of one, that a plan is made for: nothing is read; None:
            the model is used.

    Attributes:
        module: the head; None: it is whole on the device.
        asked: whether the settings ask for it to be cut, whatever there is room for.
        why: the reason why it is whole, in words; empty: there is none, or it was not requested.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: StoredTensors,
        where: Where,
        *,
        limited: bool,
        parallel: Parallel,
        planned_for: Backend | str | None = None,
    ) -> None:
        self._model = model
        self._stored = stored
        self._planned = planned_for is not None
        self.asked = where == "stream"
        self.module: nn.Linear | None = None
        self.name = ""
        self.why = ""
        # names of the same weight, which are tables' looked up row by row
        self._shared_names: tuple[str, ...] = ()
        self._divided = parallel.size > 1  # over the vocabulary among processes, and not in pieces
        if where == "device" or (where == "auto" and not limited and not self._divided):
            return
        head = _head_of(model)
        if self._divided and self.asked:
            self._refuse("several processes hold the model together")
        elif not self._divided and not has_addresses(stored.backend.device):
            self._refuse("this device compiles every size of what it runs")
        elif head is None:
            self._refuse("the model's head is not a plain linear module")
        elif not self.asked and not self._divided and head.weight.nbytes < LEAST_BYTES:
            return
        elif (why := self._why_not_in_pieces(head)) is not None:
            self._refuse(why)
        else:
            self.module = head

    @property
    def weight(self) -> nn.Parameter | None:
        """The weight that is not loaded; None: it is."""
        return None if self.module is None else self.module._parameters["weight"]

    @property
    def names(self) -> frozenset[str]:
        """The names of that weight."""
        return frozenset() if self.module is None else frozenset({self.name, *self._shared_names})

    @property
    def nbytes(self) -> int:
        """Bytes of the weight on the device, where it is whole there."""
        return self._stored.byte_layout([self.name]).nbytes if self.name else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan tells of it."""
        return (f"head: it stays whole on the device, because {self.why}",) if self.why else ()

    def agree(self, tables: RowTables) -> None:
        """Leave the head whole where a table of the same weight has to be."""
        if self.module is not None and not tables.names.issuperset(self._shared_names):
            self.module = None
            self._refuse(
                "its weight is that of the input embeddings, which are whole on the device"
            )

    def handed_over(self) -> frozenset[str]:
        """Return the names of a weight that is divided among processes, which is looked after
        here until then.
        """
        names = self.names
        self.module = None
        return names

    def spans(self, layers: Iterable[LayerBytes]) -> tuple[Span, ...]:
        """Return the rows of each piece, `(first, end)`: as few pieces as go into the slots of
        these layers.
        """
        record = self._stored.records[self.name]
        dtype = self._stored.dtypes[self.name]
        size, width = record.shape
        largest = max(layer.nbytes for layer in layers)
        return spans_of(size, width * dtype.itemsize, largest)

    def pieces(self, layers: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
        """Return the weight as bytes, in pieces named `weight`; none: it is whole."""
        if self.module is None:
            return ()
        record = self._stored.records[self.name]
        dtype = self._stored.dtypes[self.name]
        assert isinstance(record, TensorRecord)
        layouts = (
            lay_out_tensors({"weight": (part_of(record, 0, [span]), dtype)})
            for span in self.spans(layers)
        )
        return tuple(
            replace(layout, name=f"piece {number} of the head")
            for number, layout in enumerate(layouts)
        )

    def pieced(
        self, split: Split, backend: Backend, layers: Sequence[LayerBytes]
    ) -> PiecedHead | None:
        """Return the head in pieces, which are leased after these layers; None: it is whole."""
        return (
            None
            if self.module is None
            else PiecedHead(split, backend, self.module, self.spans(layers))
        )

    def summary(self, pieces: Sequence[LayerBytes]) -> str:
        """Say what a plan tells of pieces that are leased."""
        return (
            f"head: {human_bytes(self.nbytes)} pass through the slots in {len(pieces)} pieces, "
            "up and down"
        )

    def touched(self) -> str | None:
        """Return the later change of the model that needs the head whole; None: there is none."""
        if self.module is None:
            return None
        if _head_of(self._model) is not self.module:
            return "it has an adapter, or trains"
        inside = f"{find_layers(self._model)[0]}."
        # Of any of them, because the head's gradients are formed for all logits of a token at once.
        trained = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and not name.startswith(inside)
        ]
        return f"{trained[0]} trains, and is outside the layers" if trained else None

    def keep_whole(self, tables: RowTables, why: str = "") -> int:
        """Have the head whole on the device after all; return what that takes of it. `ConfigError`:
        the settings ask for it to be cut, and `why` says why it cannot be."""
        if self.module is None:
            return 0
        module = self.module
        self.module = None
        if why:
            self._refuse(why)
        if self._shared_names:
            nbytes = tables.keep_whole(
                [name for name in self._shared_names if name in tables.names]
            )
            if not self._planned:
                module.weight = tables.embedding(self._shared_names[0]).weight
            return nbytes
        byte_layout = self._stored.byte_layout([self.name])
        if not self._planned:
            module.weight = nn.Parameter(
                self._stored.load(byte_layout)[self.name], requires_grad=False
            )
        return byte_layout.nbytes

    def _refuse(self, why: str) -> None:
        if self.asked:
            raise ConfigError(
                f"the head cannot stream in pieces: {why}", where=SETTING, how="set it to auto"
            )
        self.why = why

    def _why_not_in_pieces(self, module: nn.Linear) -> str | None:
        """Return why a head has to be whole, and note the names of its weight; None: it need not
        be.
        """
        named = self._model.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if parameter is module.weight]
        head_name = (
            next(name for name, submodule in self._model.named_modules() if submodule is module)
            + ".weight"
        )
        shared_names = tuple(name for name in names if name != head_name)
        stored = next(
            (name for name in (head_name, *shared_names) if name in self._stored.records), None
        )
        if stored is None or not isinstance(self._stored.records[stored], TensorRecord):
            return "its weight is stored quantised or in several places"
        embeddings = {
            f"{name}.weight"
            for name, submodule in self._model.named_modules()
            if isinstance(submodule, nn.Embedding)
        }
        if len(shared_names) > 1 or not embeddings.issuperset(shared_names):
            return "other modules than the input embeddings share its weight"
        self.name = stored
        self._shared_names = shared_names
        return _needs_all_logits(self._model, module)


def open_embed_head(
    model: PreTrainedModel,
    stored: StoredTensors,
    config: LemaConfig,
    parallel: Parallel,
    planned_for: Backend | str | None = None,
) -> tuple[HeadCut, RowTables]:
    """Return what of a model's ends need not be loaded: its head, and tables that are looked up row
    by row. `ConfigError`: the settings ask for what cannot be."""
    # Of a loss that is no cross-entropy of tokens the passes over the pieces know nothing.
    limited = config.device_memory is not None and config.plain_cross_entropy
    head = HeadCut(
        model, stored, config.head, limited=limited, parallel=parallel, planned_for=planned_for
    )
    tables = RowTables(model, stored, config.embeddings, planned_for, head.weight, parallel)
    head.agree(tables)
    return head, tables


def _head_of(model: PreTrainedModel) -> nn.Linear | None:
    """Return what the model calls its head, if it is a plain linear module."""
    head = find_embed_head(model)[1]
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward else None


def _needs_all_logits(model: PreTrainedModel, module: nn.Linear) -> str | None:
    """Return what the model does with its logits that it does not do to each alone; None: it does
    nothing else. It is run without values, once with the product by all of the weight and once by a
    few of its rows."""
    layers = find_layers(model)[1]
    tables = [
        submodule
        for submodule in model.modules()
        if isinstance(submodule, nn.Embedding) and submodule.weight is module.weight
    ]

    def no_rows(ids: Tensor) -> Tensor:
        return torch.zeros(
            *ids.shape, module.in_features, dtype=module.weight.dtype, device=ids.device
        )

    def observe(run: Callable[[], Any]) -> list[str]:
        # On its later device, so that a model which uses it outside the product and the rows fails
        # here.
        absent = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
        for submodule in (module, *tables):
            submodule._parameters["weight"] = absent
        reasons = []
        for size in (module.out_features, FEW):
            follow = _Follow()

            def product(inputs: Tensor, size: int = size, follow: _Follow = follow) -> Tensor:
                return follow.begin(inputs.new_empty(*inputs.shape[:-1], size))

            with replaced({module: product, **dict.fromkeys(tables, no_rows)}), follow:
                logits = run().logits
            reasons += (
                follow.messages
                if follow.is_made_of(logits)
                else [follow.messages[0] if follow.messages else ELSEWHERE]
            )
        return reasons

    training = model.training
    try:
        mode_reasons = [past_layers(model.train(mode), layers, observe) for mode in (True, False)]
    finally:
        model.train(training)
    if any(reasons is None for reasons in mode_reasons):
        return "the model does not run on part of its vocabulary"
    return next((what for reasons in mode_reasons for what in reasons or ()), None)


ELSEWHERE = "the model changes the logits that its head returns"


class _Follow(TorchDispatchMode):
    """Follows a product through operations on each of its elements alone; `said` is what is done
    with it besides.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._outputs: list[Tensor] = []  # held, so that no other tensor gets the number of one
        self._begun = 0
        self.messages: list[str] = []

    def begin(self, product: Tensor) -> Tensor:
        self._begun += 1
        self._outputs.append(product)
        return product

    def is_made_of(self, logits: Any) -> bool:
        return (
            self._begun == 1
            and any(output is logits for output in self._outputs)
            and logits.shape == self._outputs[0].shape
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        inputs = list(tensors_in((args, kwargs)))
        mine = [tensor for tensor in inputs if any(tensor is output for output in self._outputs)]
        if mine and func is not torch.ops.prim.device.default:
            results = list(tensors_in(outputs))
            shape = self._outputs[0].shape
            alone = torch.Tag.pointwise in func.tags or func in COPIES or func is aten.slice.Tensor
            # Others of one element alone: one for each token would be made of the hidden state,
            # which is not there when a piece is worked on, and one for each word would have to be
            # cut too.
            scalars_only = all(
                tensor.numel() == 1 for tensor in inputs if not any(tensor is my for my in mine)
            )
            if not alone or not scalars_only or any(output.shape != shape for output in results):
                self.messages.append(
                    f"the model does {func.overloadpacket.__name__} to all logits of a "
                    "token together"
                )
            self._outputs += results
        return outputs
