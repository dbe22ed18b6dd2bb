"""The core of offloading: moves what autograd saves for the backward off the device, and brings it
back.

What is moved, where to, and by which means are parts that are given to it (`choice`, `store`,
`carrier`). It remembers nothing that a graph does not hold: what is packed into a graph owns its
piece, and with the graph everything goes. So a graph may be kept, differentiated twice, dropped
half way, or live beside others. Casts of weights, as autocast makes them for adapters, are kept as
the weight and the type, and are cast again (`lema.activations.policy.WeightView`).
"""

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor

from lema.activations.pieces import Piece, span_of, view
from lema.activations.policy import WeightView
from lema.activations.protocols import Choice, Counters, StayReason, Store, WaitingPiece
from lema.backend import Carrier

__all__ = ["Offload", "Order", "Packed"]

P = TypeVar("P")
NO_BACKWARD = -1  # the number of the backward where none runs

OVERWRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: "
    "a tensor {shape} of {dtype} is at version {now}, and was saved at version {then}"
)


class Packed(Protocol):
    """The object that a graph keeps instead of a tensor."""

    def unpack(self) -> Tensor:
        """Return the tensor, on its device, as it was saved; `RuntimeError`: it was written into
        since.
        """


class UnmovedTensor:
    """A tensor that stays where it is. Under hooks autograd does not look whether it was written
    into; this does.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Not the tensor itself: an operation that keeps its output would hold itself, and would
        # never be freed.
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """Return it."""
        check_version(self._tensor._version, self._version, self._tensor.shape, self._tensor.dtype)
        return self._tensor


class Order(Generic[P]):
    """The pieces of one graph in the order in which they left; they are wanted back last first."""

    def __init__(self) -> None:
        self.pieces: list[ref[P]] = []

    def add(self, piece: P) -> int:
        """Add a piece, if it is not the last already; return where it stands."""
        while self.pieces and self.pieces[-1]() is None:
            self.pieces.pop()
        if not self.pieces or self.pieces[-1]() is not piece:
            self.pieces.append(ref(piece))
        return len(self.pieces) - 1


class OffloadedTensor:
    """A tensor whose piece left the device."""

    __slots__ = (
        "_dtype",
        "_first",
        "_offload",
        "_order",
        "_piece",
        "_position",
        "_round",
        "_shape",
        "_stride",
    )

    def __init__(
        self, offload: "Offload", piece: Piece, order: Order[Piece], tensor: Tensor
    ) -> None:
        self._offload = offload
        self._piece = piece
        self._order = order
        self._position = order.add(piece)
        self._round = piece.tensors.round
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._first = int(tensor.storage_offset()) * tensor.element_size()
        piece.tensors.add()

    def unpack(self) -> Tensor:
        """Return the tensor: a view of the source if that is still there, else of the returned
        copy.
        """
        with self._offload.alone():
            return self._unpacked()

    def _unpacked(self) -> Tensor:
        offload = self._offload
        piece = self._piece
        offload.counters.count_request()
        check_version(piece.version_copied, piece.version, self._shape, self._dtype)
        if (source := piece.source) is not None:
            offload.counters.count_early_request()
            tensor = view(source, self._first, self._shape, self._stride, self._dtype)
        else:
            offload.bring(piece)
            memory = piece.memory()
            first = int(memory.storage_offset()) + self._first - piece.start
            tensor = view(memory, first, self._shape, self._stride, self._dtype)
            self._ask()
        offload.fetch_ahead(self._order, self._position)
        return tensor

    def _ask(self) -> None:
        """Count a request for this copy of the piece; the last request frees it."""
        piece = self._piece
        if self._round != piece.tensors.round:
            self._round = piece.tensors.round
            piece.tensors.count_request()
        if piece.tensors.num_pending == 0:
            piece.spend(torch._C._current_graph_task_id())

    def __del__(self) -> None:
        self._offload.lost(self._piece, self._round)


class _Stash:
    """Pieces that are held on the device while they leave, `size` at most."""

    def __init__(self, size: int) -> None:
        assert size >= 1, f"{size} pieces cannot leave at once"
        self.size = size
        self._pieces: deque[ref[Piece]] = deque()

    def add(self, piece: Piece) -> None:
        """Hold a piece, for which there is room."""
        self._pieces.append(ref(piece))

    def make_room(self) -> None:
        """Let go of the pieces that were held longest, so that there is room for another."""
        while len(self._pieces) >= self.size:
            if (oldest := self._pieces.popleft()()) is not None:
                oldest.release()

    def release_all(self) -> None:
        """Let go of all."""
        while self._pieces:
            if (piece := self._pieces.popleft()()) is not None:
                piece.release()


class _Space:
    """The store that pieces leave for. It is closed with this object at the latest."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.close = weakref.finalize(self, store.close)
        self._warned = False

    def allocate(self, nbytes: int) -> WaitingPiece | None:
        """Return where bytes can wait; None: nowhere, which is warned of once."""
        waiting_piece = self.store.allocate(nbytes)
        if waiting_piece is None:
            if not self._warned:
                what = (
                    f"no space for {nbytes:,} bytes of activations in host memory, so they "
                    "stay on the device; "
                )
                warnings.warn(
                    f"{what}free memory, or give a directory on a disk for the rest", stacklevel=1
                )
            self._warned = True
        return waiting_piece


class Offload:
    """Moves what a choice says to a store, through the carrier of each device. As many as `stash`
    pieces are held on the device while they leave, and as many are fetched ahead of a backward;
    without `fetch`, only read from a disk. `certify`: what is moved is kept on the device too, and
    every byte that comes back is compared."""

    def __init__(
        self,
        choice: Choice,
        store: Store,
        carrier: Callable[[torch.device], Carrier],
        *,
        stash: int = 5,
        fetch: bool = True,
        certify: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self._choice = choice
        # Goes not before the last packed tensor, because each of them holds this object.
        self._space = _Space(store)
        self._carrier = cache(carrier)  # one for each device
        self._stash = _Stash(stash)
        self._fetch = fetch
        self._certify = certify
        self.counters = counters or Counters()
        # because a graph may be differentiated in one thread, and dropped in another
        self._lock = threading.Lock()
        self._lost: deque[tuple[Piece, int]] = deque()
        self._pieces: dict[tuple[int, int], list[Piece]] = {}  # alive, by storage and version
        self._back: dict[int, WeakSet[Piece]] = {}  # pieces that came back, by backward
        self._order: Order[Piece] = Order()

    @property
    def live_bytes(self) -> int:
        """Bytes that wait for a backward."""
        with self.alone():
            return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    def order(self) -> Order[Piece]:
        """Return a new order; pieces that are packed without any go by the newest."""
        self._order = Order()
        return self._order

    def pack(self, tensor: Tensor, order: Order[Piece] | None = None) -> Packed:
        """Return what a graph is to keep in the place of `tensor`, which belongs to the newest
        order if none is given. `DiskError`: this or something before it could not be written."""
        with self.alone():
            self.counters.count_saved()
            why = self._choice(tensor)
            if why is None and (piece := self._piece_of(tensor)) is not None:
                self.counters.count_move()
                return OffloadedTensor(self, piece, order or self._order, tensor)
            self.counters.count_stay(why or StayReason.FULL)
            if why is StayReason.WEIGHT and (reference := WeightView.of(tensor)) is not None:
                return reference
            return UnmovedTensor(tensor)

    def expect(self, order: Order[Piece]) -> None:
        """Begin to bring back the tensors that were packed last, because their backward comes
        soon.
        """
        with self.alone():
            self.fetch_ahead(order, len(order.pieces))

    def let_go(self) -> None:
        """Hold nothing on the device any more: a forward is over, or a backward was given up."""
        with self.alone():
            self._stash.release_all()
            for backward in list(self._back):
                self._forget(backward)

    def close(self) -> None:
        """Give back where things wait. What still waits is lost."""
        self.let_go()
        self._space.close()

    def bring(self, piece: Piece) -> None:
        """Bring a piece back, until it has been used or the backward that runs is over."""
        if not piece.here:
            piece.fetch()
            if self._certify:
                piece.compare()
        backward = torch._C._current_graph_task_id()
        if backward not in self._back:
            self._back[backward] = WeakSet()
            if backward != NO_BACKWARD:
                torch.autograd.Variable._execution_engine.queue_callback(
                    lambda: self._end_backward(backward)
                )
        self._back[backward].add(piece)

    def fetch_ahead(self, order: Order[Piece], position: int) -> None:
        """Begin to bring back what left before what stands at `position`: it is wanted next."""
        backward = torch._C._current_graph_task_id()
        to_fetch = self._stash.size
        while position > 0 and to_fetch > 0:
            position -= 1
            piece = order.pieces[position]() if position < len(order.pieces) else None
            if piece is None or piece.source is not None or piece.tensors.spent == backward:
                continue
            to_fetch -= 1
            if not piece.here and piece.expect(fetch=self._fetch):
                self.bring(piece)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other thread in, and no graph that goes meanwhile take a piece away, in a
        `with` block.
        """
        with self._lock:
            self._sweep()
            yield
            self._sweep()

    def lost(self, piece: Piece, came: int) -> None:
        """Know that a packed tensor has gone, which was last asked for when its piece came back for
        the `came`th time. A garbage collector calls this in any thread, also one that another waits
        for, so nothing is waited for here."""
        self._lost.append((piece, came))
        while self._lost and self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._lost:
            piece, came = self._lost.popleft()
            piece.tensors.lose()
            if piece.tensors.alive == 0:
                pieces = self._pieces[piece.key]
                pieces.remove(piece)
                if not pieces:
                    del self._pieces[piece.key]
                piece.gone()
            elif came != piece.tensors.round:
                piece.tensors.count_request()
                if piece.tensors.num_pending == 0:
                    piece.forget()

    def _piece_of(self, tensor: Tensor) -> Piece | None:
        """Return the piece that `tensor` lies in, new if need be; None: there is no space for
        it.
        """
        start, nbytes = span_of(tensor)
        pieces = self._pieces.get((tensor.untyped_storage()._cdata, tensor._version), [])
        for piece in pieces:
            if piece.covers(start, nbytes):
                return piece
        waiting_piece = self._space.allocate(nbytes)
        if waiting_piece is None:
            return None
        carrier = self._carrier(tensor.device)
        # Before the next piece leaves, because its source is held as well until its copy is waited
        # for.
        self._stash.make_room()
        try:
            piece = Piece(tensor, start, nbytes, waiting_piece, carrier, self.counters)
        except BaseException:
            waiting_piece.drop()
            raise
        if self._certify:
            piece.certify()
        self._pieces.setdefault(piece.key, []).append(piece)
        self._stash.add(piece)
        return piece

    def _end_backward(self, backward: int) -> None:
        """Free returned copies that are still wanted, by an unused branch or a graph that is
        kept.
        """
        with self.alone():
            self._forget(backward)

    def _forget(self, backward: int) -> None:
        for piece in list(self._back.pop(backward, ())):
            piece.forget()


def check_version(now: int, then: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise what autograd raises where a tensor was written into since it was saved."""
    if now != then:
        raise RuntimeError(OVERWRITTEN.format(shape=list(shape), dtype=dtype, now=now, then=then))
