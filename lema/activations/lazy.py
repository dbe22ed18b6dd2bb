"""Offloading on a lazy device, which runs operations later, as graphs, and whose tensors have no
memory to show.

On such a device nothing is known of storages, views or streams, and looking at a tensor in the
middle of a layer would cut the graph in two. So only the inputs of layers are moved, whole, between
two layers, where the graph is cut anyway.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lema.activations.offload import Order, Packed, UnmovedTensor
from lema.activations.protocols import Choice, Counters

__all__ = ["ByValue"]


class _Value:
    def __init__(self, source: Tensor) -> None:
        self.device = source.device
        self.nbytes = source.numel() * source.element_size()
        self.host = source.to("cpu")
        # references of graphs that have not fetched it yet
        self.waiting: WeakSet[_Away] = WeakSet()
        # the returned value; it stays until all of them have fetched it
        self.back: Tensor | None = None
        self.reached = False  # one of them has asked, and others are waiting


class ByValue:
    """Moves what a choice says to host memory, as values; used as
    `lema.activations.offload.Offload` is. `choice` must not look at a tensor's memory. `sync` runs
    what was computed so far; it is called where a value leaves and, in the backward, where it is
    wanted, so the device holds no more than is computed in between. One is brought back ahead."""

    def __init__(self, choice: Choice, *, sync: Callable[[], None]) -> None:
        self._choice = choice
        self._sync = sync
        self.counters = Counters()
        self._values: WeakSet[_Value] = WeakSet()
        # by tensor: its version then, and a reference to the value
        self._value_by_tensor: Any = WeakTensorKeyDictionary()
        self._order: Order[_Value] = Order()

    @property
    def live_bytes(self) -> int:
        """Bytes that wait for a backward."""
        return sum(value.nbytes for value in list(self._values))

    def order(self) -> Order[_Value]:
        """Return a new order; values that are packed without any go by the newest."""
        self._order = Order[_Value]()
        return self._order

    def pack(self, tensor: Tensor, order: Order[_Value] | None = None) -> Packed:
        """Return the object that a graph keeps instead of `tensor`."""
        self.counters.seen += 1
        if (why := self._choice(tensor)) is not None:
            self.counters.kept[why] += 1
            return UnmovedTensor(tensor)
        self.counters.moved += 1
        return _Away(self, self._value_of(tensor), order or self._order)

    def expect(self, order: Order[_Value]) -> None:
        """Begin to bring back the tensors that were packed last, because their backward comes
        soon.
        """
        self.bring_ahead(order, len(order.pieces))

    def let_go(self) -> None:
        """Hold nothing on the device any more: a forward is over, or a backward was given up."""
        for value in list(self._values):
            value.back = None
            value.reached = False

    close = let_go

    def bring(self, value: _Value) -> Tensor:
        """Return a value on its device. The first request runs the operations before it."""
        if not value.reached:
            self._sync()
            value.reached = True
        return self._back(value)

    def bring_ahead(self, order: Order[_Value], position: int) -> None:
        """Begin to bring back what left before what stands at `position`."""
        value = order.pieces[position - 1]() if 0 < position <= len(order.pieces) else None
        if value is not None and value.waiting:
            value.back = self._back(value)

    def _back(self, value: _Value) -> Tensor:
        if value.back is not None:
            return value.back
        self.counters.copies_back += 1
        self.counters.bytes_back += value.nbytes
        return value.host.to(value.device)

    def _value_of(self, tensor: Tensor) -> _Value:
        version, reference = self._value_by_tensor.get(tensor, (None, None))
        value = None if reference is None or version != tensor._version else reference()
        if value is None:
            source = tensor.detach()
            self._sync()
            value = _Value(source)
            self._value_by_tensor[tensor] = tensor._version, ref(value)
            self._values.add(value)
            self.counters.copies_out += 1
            self.counters.bytes_out += value.nbytes
        return value


class _Away:
    """The object that a graph keeps instead of a tensor that was moved."""

    def __init__(self, offload: ByValue, value: _Value, order: Order[_Value]) -> None:
        self._offload = offload
        self._value = value
        self._order = order
        self._position = order.add(value)
        value.waiting.add(self)

    def unpack(self) -> Tensor:
        """Return the tensor. Tensors that share a value share one copy; a second use by a graph
        fetches it again.
        """
        offload = self._offload
        value = self._value
        offload.counters.restored += 1
        tensor = offload.bring(value)
        value.waiting.discard(self)
        value.reached = bool(value.waiting)
        value.back = tensor if value.reached else None
        offload.bring_ahead(self._order, self._position)
        return tensor
