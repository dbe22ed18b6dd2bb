"""Tables that are not loaded: embeddings that are looked up row by row, outside the decoder layers
or in one.

They are the largest tensors of many models, and a step needs only as many rows of them as it has
tokens. The rows of the ids that are there are fetched and become the embedding's weight while the
module runs, and the ids become their places among these rows. So the numbers are those of the whole
table, whatever else the module does with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend, Parallel
from lema.backend.registry import has_addresses, resident_fraction
from lema.config.units import human_bytes
from lema.errors import ConfigError
from lema.model.capture import has_values
from lema.model.inputs import HostCopies, Inputs
from lema.model.outer_weights import StoredTensors
from lema.model.skeleton import find_embed_head, find_layers, find_towers, is_in
from lema.model.weight_names import grouped

__all__ = ["RowTables"]

SETTING = "embeddings"
# of a table that is looked up row by row unasked: smaller ones are worth no reads
LEAST_BYTES = 16 << 20
RowSource = Literal["auto", "device", "host", "disk"]


class _Absent(nn.Parameter):
    """A weight on `meta` that says it is where its rows will be, because models send ids to its
    device.
    """

    home = torch.device("meta")

    @property
    def device(self) -> torch.device:  # type: ignore[override] # torch's is an attribute
        return self.home


@dataclass
class _Table:
    """An embedding that is looked up row by row."""

    module: nn.Embedding  # the embedding
    weight: nn.Parameter  # its own, on `meta`
    nbytes: int  # of the whole weight
    row_bytes: int  # of one row where it is stored
    in_layers: bool  # whether it is part of a decoder layer
    # Returns the rows of ids, sorted and without duplicates, in host memory; None: their values are
    # not needed.
    fetch: Callable[[Tensor], Tensor] | None = None
    ids_per_token: int = 1  # as last looked up, `[batch, sequence, ...]`

    def count_ids(self, ids: Tensor) -> None:
        """Know how many ids a token has, from those that are looked up."""
        self.ids_per_token = prod(ids.shape[2:])

    def take_out(self) -> None:
        """Let the embedding be as the model made it."""
        vars(self.module).pop("forward", None)
        self.module._parameters["weight"] = self.weight


class _Choice:
    """Chooses which embeddings of a model are looked up row by row; the arguments are those of
    `RowTables`. `divided`: whether processes divide the input's tables. `whole_input`: why the
    input embeddings are not among the chosen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: StoredTensors,
        where: RowSource,
        head: nn.Parameter | None,
        *,
        planned: bool,
        num_parts: int,
        divided: bool,
    ) -> None:
        self._model = model
        self._stored = stored
        self._where = where
        self._head = head
        self._planned = planned
        self._num_parts = num_parts
        self._divided = divided
        self._layers_name = find_layers(model)[0]
        self._input_embedding = find_embed_head(model)[0]
        self.whole_input = ""

    @cached_property
    def _towers(self) -> list[str]:
        return find_towers(self._model)

    def tables(self) -> dict[str, _Table]:
        """Return the embeddings to look up row by row, by the name of their weight.
        `ConfigError`: the input embeddings cannot be.
        """
        tables: dict[str, _Table] = {}
        asked = self._where != "auto"
        if asked and not isinstance(self._input_embedding, nn.Embedding):
            raise _refusal("the model does not look up its tokens in a plain table")
        for path, module in self._model.named_modules():
            name = f"{path}.weight"
            is_input = module is self._input_embedding
            if not isinstance(module, nn.Embedding) or name not in self._stored.records:
                continue
            assert isinstance(module.weight, nn.Parameter)
            dtype = self._stored.dtypes[name]
            in_layers = name.startswith(f"{self._layers_name}.")
            nbytes = module.weight.numel() * dtype.itemsize
            is_required = ((asked or self._divided) and is_input) or module.weight is self._head
            part = in_layers and self._num_parts > 1  # each process has its part of the layer
            if ((nbytes < LEAST_BYTES or self._divided) and not is_required) or part:
                continue
            if not is_input and is_in(path, self._towers):
                continue  # because text, by which it is tried, shows nothing of how it is read
            why = self._why_not_by_rows(name, module)
            if why is None:
                row = self._stored.byte_layout([name]).read_bytes // module.num_embeddings
                fetch: Callable[[Tensor], Tensor] | None = None
                if not self._planned and self._where == "host":
                    fetch = partial(torch.index_select, self._stored.read_to_host(name), 0)
                elif not self._planned and (rows := self._stored.rows(name)) is not None:
                    fetch = rows.read
                tables[name] = _Table(module, module.weight, nbytes, row, in_layers, fetch)
            elif is_input and asked:
                raise _refusal(why)
            elif is_input:
                self.whole_input = why
        return tables

    def _why_not_by_rows(self, name: str, module: nn.Embedding) -> str | None:
        """Return why a table has to be whole; None: it need not be."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        if (
            module.weight is not self._head
            and sum(parameter is module.weight for _, parameter in parameters) > 1
        ):
            return "they are also the head's weight, which must be whole on the device"
        if len(inspect.signature(type(module).forward).parameters) != 2:  # itself, and the ids
            return "the model does not look up its tokens in a plain table"
        if self._where != "host" and self._stored.rows(name) is None:
            return "their rows are stored quantised or in several places"
        return None


class RowTables:
    """The tables of a model that are looked up row by row, on behalf of the model's own embeddings.

    An embedding is one that nothing else shares, such as a head, and that takes nothing but ids;
    beside the input embeddings only large ones are. Those that train, or are adapted, are whole.
    `ConfigError`: the input embeddings cannot be looked up as the setting says. `where`: the
    setting: rows come from "host" memory or from "disk"; "device": all are whole. "auto": from
    disk, unless layers stay on the device unasked, or it compiles what is run on it, for every
    number of rows; the input's are then divided among processes (`parallel`), and are here until
    they are `handed_over`. `copies`: what the model's inputs on the device are. `planned_for`: a
    device, or its name, that a plan is made for: nothing is read; None: the model is used. `head`:
    the head's weight, where it is not loaded: a table that has the same one is not loaded either.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: StoredTensors,
        where: RowSource,
        planned_for: Backend | str | None = None,
        head: nn.Parameter | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._model = model
        self._stored = stored
        self._where = where
        self._planned = planned_for is not None
        self._input_embedding = find_embed_head(model)[0]
        self._inputs = Inputs(stored.backend)
        self.copies = HostCopies()
        self._lookups_enabled = True
        is_on_device = resident_fraction(planned_for or stored.backend) > 0 or not has_addresses(
            stored.backend.device
        )
        num_parts = (parallel or stored.backend.parallel).size
        self._divided = where == "auto" and is_on_device and num_parts > 1
        choice = _Choice(
            model,
            stored,
            where,
            head,
            planned=self._planned,
            num_parts=num_parts,
            divided=self._divided,
        )
        is_whole = where == "device" or (where == "auto" and is_on_device)
        self._tables = choice.tables() if self._divided or not is_whole else {}
        self._whole_input = choice.whole_input  # why the input embeddings are not among them
        self._embeddings = {name: table.module for name, table in self._tables.items()}
        self._put_in()

    @property
    def names(self) -> frozenset[str]:
        """The weights that are not loaded."""
        return frozenset(self._tables)

    @property
    def nbytes(self) -> int:
        """Bytes of these weights, which no device holds."""
        return sum(table.nbytes for table in self._tables.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows that one token asks the disk for, as far as ids have been seen."""
        if self._where == "host":
            return 0
        return sum(table.row_bytes * table.ids_per_token for table in self._tables.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan tells of them."""
        messages = []
        if self._whole_input:
            messages.append(
                "embeddings: the input embeddings are whole on the device, because "
                f"{self._whole_input}"
            )
        if self._tables:
            source = (
                "host memory"
                if self._where == "host"
                else f"disk, {human_bytes(self.row_bytes)} a token"
            )
            spared = (
                f"{human_bytes(self.nbytes)} are not loaded to the device: "
                f"{grouped(list(self._tables))}"
            )
            messages.append(f"embeddings: rows from {source}; {spared}")
        return tuple(messages)

    def embedding(self, name: str) -> nn.Embedding:
        """Return the embedding with this weight, be it looked up row by row or, by now, whole."""
        return self._embeddings[name]

    def expect(self, num_micro_batches: int) -> None:
        """Know how many micro-batches the step has, each of which looks its ids up in every
        table.
        """
        self._inputs.expect(num_micro_batches * len(self._tables))

    @contextmanager
    def without_lookups(self) -> Iterator[None]:
        """Look nothing up for the length of a `with` block: what the embeddings return is thrown
        away.
        """
        self._lookups_enabled = False
        try:
            yield
        finally:
            self._lookups_enabled = True

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Let embeddings be as the model made them in a `with` block, in which they are wrapped
        or copied.
        """
        for table in self._tables.values():
            table.take_out()
        try:
            yield
        finally:
            self._put_in()

    def touched(self) -> list[str]:
        """Name the tables that have been adapted since, or train."""
        names = []
        for name, table in self._tables.items():
            module = self._model.get_submodule(name.rpartition(".")[0])
            if module is not table.module or any(
                parameter.requires_grad for parameter in module.parameters()
            ):
                names.append(name)
        return names

    def keep_whole(self, names: Iterable[str]) -> int:
        """Have some tables whole after all, because they train or are adapted; return what that
        takes of the device, but for those in layers, which are part of their layer then.
        `ConfigError`: the settings ask for rows."""
        nbytes = 0
        for name in names:
            table = self._tables[name]
            if self._where in ("host", "disk") and table.module is self._input_embedding:
                raise _refusal("they train or have an adapter")
            del self._tables[name]
            table.take_out()
            if not table.in_layers:
                byte_layout = self._stored.byte_layout([name])
                nbytes += byte_layout.nbytes + byte_layout.expanded_bytes
                if not self._planned:
                    weight = nn.Parameter(self._stored.load(byte_layout)[name], requires_grad=False)
                    table.module._parameters["weight"] = weight
        return nbytes

    def handed_over(self) -> frozenset[str]:
        """Return the names of what is divided among processes, which is looked after here until
        then.
        """
        names, self._tables = (
            (self.names, {}) if self._divided else (frozenset[str](), self._tables)
        )
        return names

    def _put_in(self) -> None:
        """Have the embeddings look their ids up here: each by itself, its class stays as it is."""
        for name, table in () if self._divided else self._tables.items():
            # A function, which a copy of the module shares: a copied object would bring copies of
            # all it refers to.
            def lookup(input: Tensor, name: str = name, table: _Table = table) -> Tensor:
                return self._lookup(name, table, input)

            table.module.forward = lookup  # type: ignore[method-assign] # of this instance only
            absent = _Absent(table.weight.detach(), requires_grad=False)
            absent.home = self._stored.backend.device
            table.module._parameters["weight"] = absent

    def _lookup(self, name: str, table: _Table, ids: Tensor) -> Tensor:
        module = table.module
        own_forward: Callable[[nn.Embedding, Tensor], Tensor] = type(module).forward
        if has_values(module.weight):  # somebody gave it some
            return own_forward(module, ids)
        table.count_ids(ids)
        if table.fetch is not None and has_values(ids) and self._lookups_enabled:
            there = self.copies.of(ids)
            unique, indices = torch.unique(
                ids.cpu() if there is None else there.cpu(), return_inverse=True
            )
            (on_device,) = self._inputs.to_device(
                [{"rows": table.fetch(unique), "indices": indices}]
            )
        else:
            shape = (ids.numel() if self._lookups_enabled else 1, module.embedding_dim)
            rows = torch.zeros(shape, dtype=self._stored.dtypes[name], device=ids.device)
            on_device = {"rows": rows, "indices": torch.zeros_like(ids)}
        absent = module._parameters["weight"]
        padding = module.padding_idx
        module._parameters["weight"] = nn.Parameter(on_device["rows"], requires_grad=False)
        # it says whose row gets no gradient, by a number that means another row here
        module.padding_idx = None
        try:
            return own_forward(module, on_device["indices"])
        finally:
            module._parameters["weight"] = absent
            module.padding_idx = padding


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"the input embeddings cannot stay off the device: {why}",
        where=SETTING,
        how="set it to auto",
    )
