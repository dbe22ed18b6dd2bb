"""The weights outside the decoder layers: loaded, looked up row by row, or leased in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from lema.backend import Backend
from lema.config import LemaConfig
from lema.engine.head.cut import HeadCut, open_embed_head
from lema.errors import ConfigError
from lema.model import Split
from lema.model.outer_weights import StoredTensors, load_outside, load_towers, towers_layout
from lema.model.partition import local_records
from lema.model.row_tables import RowTables
from lema.model.skeleton import find_towers
from lema.model.towers import check_towers, close_towers, open_towers
from lema.model.towers.cached import CachedTowers
from lema.model.towers.identity import open_store, towers_identity
from lema.model.towers.stacks import slot_bytes, stack_bytes, streams_towers, tower_stacks
from lema.train.opened.towers import TowerLayers

__all__ = ["OuterWeights"]


class OuterWeights:
    """The weights of a model outside its decoder layers, loaded but for what need not be.

    Embeddings may be looked up row by row, and the head may be leased in pieces after the layers,
    until a change of the model needs them whole. Processes that hold a model together divide both.

    Args:
        skeleton: the model, without adapters, its parameters on `meta`.
        stored: where its weights are.
        config: the settings of embeddings and head.
        backend: the device.
        layers_name: what the decoder layers are called in the model.

    Attributes:
        head: the head, as long as it may be leased in pieces.
        tables: the embeddings that are looked up row by row.
        nbytes: bytes of what is loaded, on the device.
        towers: the modules that text does not reach: what sees images, for one.
        closed_towers: those of them that are not loaded, because the settings ask for text alone. A
            call of one is refused.
        tower_layers: the layers of towers, where these stream; None: they do not.
        cached_towers: the towers whose outputs are kept on disk; None: they are not.
        divided: whether the processes that hold the model together have divided it.

    Raises:
        ConfigError: the settings ask for rows, pieces or towers that cannot be.
        WeightsError: a tower is to be opened, and the files do not have its weights.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        stored: StoredTensors,
        config: LemaConfig,
        backend: Backend,
        layers_name: str,
    ) -> None:
        self._skeleton = skeleton
        self._stored = stored
        self._backend = backend
        self.head: HeadCut
        self.tables: RowTables
        # before rows stand for embeddings, whose weights text does not seem to reach then
        self.towers = towers = find_towers(skeleton)
        self.head, self.tables = open_embed_head(skeleton, stored, config, backend.parallel)
        unloaded = self.tables.names | self.head.names
        self.closed_towers = towers if config.modalities == "text" else []
        if config.modalities != "text":
            check_towers(skeleton, towers, stored.records, backend.parallel)
        stacks = tower_stacks(skeleton, towers) if streams_towers(config) else {}
        self.cached_towers: CachedTowers | None = None
        cached = towers if config.tower_cache is not False else []
        elsewhere = [*self.closed_towers, *stacks, *cached]
        self.nbytes = load_outside(skeleton, stored, layers_name, unloaded, elsewhere)
        self.tower_layers: TowerLayers | None = None
        if streams_towers(config) and towers and not stacks:
            what = f"no layers to stream were found in {', '.join(towers)}"
            raise ConfigError(what, where="towers", how="set it to device")
        if stacks:
            layers = stack_bytes(stacks, stored)
            self.tower_layers = TowerLayers(stacks, layers, backend, stored.reader)
            self.nbytes += slot_bytes(layers, backend)
        if config.modalities == "text":
            close_towers(skeleton, towers)
        else:
            open_towers(skeleton, towers)
        if cached:
            self.nbytes += towers_layout(skeleton, stored, cached, stacks)[1].nbytes
            self.cached_towers = CachedTowers(
                skeleton,
                cached,
                open_store(config),
                towers_identity(skeleton, cached, stored, config),
                partial(load_towers, skeleton, stored, cached, stacks),
                backend,
            )
        self.divided = False

    def check_frozen(self) -> None:
        """Refuse, with `ConfigError`, what trains in towers that stream, or whose outputs are
        kept."""
        if self.tower_layers is not None:
            self.tower_layers.check_frozen()
        if self.cached_towers is not None:
            self.cached_towers.check_frozen()

    def close(self) -> None:
        """Stop reading layers of towers."""
        if self.tower_layers is not None:
            self.tower_layers.stream.leave()

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
        if head is None and any(map(chosen, self.head.names)):
            head = "its weight has an adapter, or trains"
        if head is not None:
            self.keep_head(head)
        if names := [name for name in self.tables.names if chosen(name)]:
            self.nbytes += self.tables.keep_whole(names)

    def keep_head(self, why: str = "") -> None:
        """Load the head whole if it is not; `ConfigError`: the settings require pieces, and `why`
        says why that cannot be.
        """
        self.nbytes += self.head.keep_whole(self.tables, why)

    def divide(self, split: Split) -> None:
        """Divide the model, adapters attached or not, among the processes that hold it together;
        once.
        """
        parallel = self._backend.parallel
        if parallel.size > 1 and not self.divided:
            words = self.head.handed_over() | self.tables.handed_over()
            parallel.shard(self._skeleton, words)
            shard_records = local_records(self._skeleton, self._stored.records, parallel)
            self.nbytes += load_outside(
                self._skeleton,
                replace(self._stored, records=shard_records),
                split.layers_name,
                shard_records.keys() - words,
                self.closed_towers,
            )
            split.adapters_changed()
        self.divided = True
