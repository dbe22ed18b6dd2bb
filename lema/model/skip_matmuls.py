"""The matrix products of a layer that its recomputation leaves out, because no dropped tensor depends on them.

An adapter saves its inputs after the module it wraps has been called, so the last product of a layer would be computed
again only to be added to a value that is thrown away. The products are found at a layer's first recomputation. Every
operation is seen below autograd, and its results are marked with the products they depend on. A product is needed if a
saved tensor carries its mark, or if Python, a buffer or a shape could see its value. Memory that no operation was seen
to fill counts as dependent on everything.

The result is tried once: the products left out return NaN, and no NaN may reach a saved tensor. They return NaN in
every later step too, so that a product left out by mistake shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lema.model.capture import tensors_in

__all__ = ["Kinds", "Needless", "Product", "Reach"]


PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul"})
COPIES = frozenset({"_to_copy", "clone", "_unsafe_view", "contiguous"})

# What reads shapes of its tensors, and no values.
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"})
NEW = frozenset({"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"})

# What makes a tensor for its values, not as memory for others'.
CONSTANTS = frozenset({"eye", "arange", "scalar_tensor"})

# What fills the tensor it is called on, whatever that held.
FILLS = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"})

# How Python gets at values, or at their address, without an operation.
LOOKS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"})
SHAPED_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
UNSEEN = -1  # in place of marks: what this memory holds was made by nothing that was seen


@dataclass(frozen=True)
class Product:
    """A call of a module that multiplied its one argument by a matrix, and did nothing else.

    Attributes:
        saved: how many tensors had been saved before it.
        given: dtype of its argument, `[..., in]`.
        made: dtype of its result, `[..., out]`.
        features: `out`.
    """

    module: nn.Module
    saved: int
    given: torch.dtype
    made: torch.dtype
    features: int


class Reach:
    """Follows the products of one run of a layer.

    Args:
        layer: its modules without parts are those whose calls may be products.
    """

    def __init__(self, layer: nn.Module) -> None:
        parts = [part for part in layer.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._leaves = [part for part in parts if next(part.children(), None) is None]
        self._products: list[Product] = []
        self._marks: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage; the reference keeps its number taken
        self._needed = 0
        self._saved = 0
        self._called: list[Any] | None = None  # the operations of the leaf that runs

    def needless(self) -> tuple[Product, ...]:
        """Return the products seen that nothing needs, in their order."""
        return tuple(one for number, one in enumerate(self._products) if not self._needed >> number & 1)

    def save(self, tensor: Tensor) -> None:
        """Take note that the backward needs `tensor`."""
        self._saved += 1
        self._needed |= self._read(tensor)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what runs in the `with` block."""
        with ExitStack() as stack:
            for leaf in self._leaves:
                if "forward" not in vars(leaf):  # else somebody has put another in its place
                    leaf.forward = partial(self._call, leaf, leaf.forward)
                    stack.callback(delattr, leaf, "forward")
            stack.enter_context(_Looks(self._look))
            stack.enter_context(_Operations(self._operate))
            yield

    def _call(self, leaf: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called: list[Any] = []
        saved, around, self._called = self._saved, self._called, called
        try:
            out = forward(*args, **kwargs)
        finally:
            self._called = around
            if around is not None:
                around.extend(called)
        if kwargs or len(args) != 1 or not (_plain(args[0]) and _plain(out)) or self._saved != saved:
            return out
        given, names = args[0], {_name(one) for one in called}
        others = [one for one in called if _name(one) not in PRODUCTS | COPIES]
        if not names & PRODUCTS or not all(map(_is_view, others)):
            return out
        whole = out.is_contiguous() and out.is_floating_point() and _fills(out)
        if whole and out.dim() > 0 and out.shape[:-1] == given.shape[:-1] and self._made_here(out):
            product = Product(leaf, saved, given.dtype, out.dtype, out.shape[-1])
            self._mark(out, self._read(out) | 1 << len(self._products))
            self._products.append(product)
        return out

    def _operate(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._called is not None:
            self._called.append(operation)
        name, schema = _name(operation), getattr(operation, "_schema", None)
        given = list(tensors_in((args, kwargs)))
        written = [] if schema is None else _written(schema, args, kwargs)
        filled = [one for one in written if name in FILLS and _fills(one)]
        sources = [] if name in LIKE | NEW else [one for one in given if not any(one is other for other in filled)]
        marks = 0
        for source in sources:
            marks |= self._read(source)
        shaping = list(tensors_in(args[1:])) if name == "index" else sources
        if schema is None or any(tag in operation.tags for tag in SHAPED_BY_VALUES):
            for source in shaping:
                self._needed |= self._read(source)
        out = operation(*args, **kwargs)
        for one in written:
            if not self._made_here(one):
                self._needed |= marks  # it outlives this run
            elif any(one is other for other in filled):
                self._mark(one, marks)
            else:
                self._mark(one, self._raw(one) | marks)
        made = list(tensors_in(out))
        for place, one in enumerate(made):
            if any(one is other for other in written) or (schema is not None and self._is_known(one, given)):
                continue
            drawn = name == "native_dropout" and place == 1  # its mask
            known = drawn or name in CONSTANTS
            self._mark(one, 0 if known else marks if sources else UNSEEN)
        return out

    def _look(self, tensor: Tensor) -> None:
        self._needed |= self._read(tensor)

    def _is_known(self, one: Tensor, given: Sequence[Tensor]) -> bool:
        """Whether a result lies where an argument does."""
        place = _place(one)
        return any(_place(other) == place for other in given)

    def _made_here(self, tensor: Tensor) -> bool:
        return _place(tensor) in self._marks

    def _raw(self, tensor: Tensor) -> int:
        return self._marks.get(_place(tensor), (None, 0))[1]

    def _read(self, tensor: Tensor) -> int:
        """Return the marks of what `tensor` holds now."""
        marks = self._raw(tensor) if _plain(tensor) else UNSEEN
        return (1 << len(self._products)) - 1 if marks == UNSEEN else marks

    def _mark(self, tensor: Tensor, marks: int) -> None:
        if _plain(tensor):
            storage = tensor.untyped_storage()
            self._marks[storage._cdata] = (StorageWeakRef(storage), marks)


class _Operations(TorchDispatchMode):
    """Hands every operation to a function that runs it."""

    supports_higher_order_operators = True

    def __init__(self, operate: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._operate = operate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operate(func, args, kwargs or {})


class _Looks(TorchFunctionMode):
    """Tells a function of every tensor whose values, or address, Python asks for."""

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in LOOKS:
            for tensor in tensors_in(args):
                self._look(tensor)
        return func(*args, **(kwargs or {}))


def _name(operation: Any) -> str:
    packet = getattr(operation, "overloadpacket", operation)
    name: str = packet.__name__
    return name


def _is_view(operation: Any) -> bool:
    """Whether all an operation does is to look at its argument's memory in another way."""
    returns = operation._schema.returns if hasattr(operation, "_schema") else ()
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    found: list[Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def _plain(value: Any) -> bool:
    """Whether a value is a tensor whose elements lie in one memory of its own kind."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if _plain(tensor) else 0


def _fills(tensor: Tensor) -> bool:
    """Whether a tensor is all there is in its memory."""
    return _plain(tensor) and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class Kinds:
    """The kinds of the tensors that one run of a layer saves, in order: dtype and number of dimensions, a byte each.

    They tell whether two runs, of micro-batches of any shapes, went the same way.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, int], int] = {}

    def of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's kind."""
        return self._numbers.setdefault((tensor.dtype, tensor.dim()), len(self._numbers))


@dataclass(frozen=True)
class _LeftOut:
    """A product to leave out of the runs that end as the one did in which it was found needless."""

    product: Product
    ending: bytes  # kinds of what is saved after it


class Needless:
    """The products that recomputations of one layer leave out.

    Args:
        layer: the layer, in whose modules' place something else is called while it is recomputed.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.kinds = Kinds()
        self._learnt: dict[bool, tuple[_LeftOut, ...]] = {}

    @property
    def learnt(self) -> bool:
        """Whether it is known, for the mode the layer is in, training or not, what to leave out."""
        return self.layer.training in self._learnt

    def learn(self, products: tuple[Product, ...], kinds: bytes | bytearray) -> None:
        """Leave out `products`, seen in a run that saved tensors of `kinds`."""
        self._learnt[self.layer.training] = tuple(_LeftOut(one, bytes(kinds[one.saved :])) for one in products)

    def forget(self) -> None:
        """Know nothing again of the mode the layer is in."""
        self._learnt.pop(self.layer.training, None)

    @contextmanager
    def left_out(self, kinds: bytes | bytearray, to_come: Callable[[], int]) -> Iterator[bool]:
        """Leave products out in the `with` block, a run that saves tensors of `kinds`; yield whether there are any.

        What is data-dependent, as which experts are called, may go another way than in the run that was followed. A
        product is left out only where as much is saved after it as there was, of the same kinds; and only where nobody
        else has put something in the module's place, or a hook on it.

        Args:
            kinds: what the forward saved.
            to_come: how much of that is still to come.
        """
        found = [one for one in self._learnt[self.layer.training] if kinds.endswith(one.ending)]
        stubs: dict[nn.Module, list[_LeftOut]] = {}
        for one in found:
            stubs.setdefault(one.product.module, []).append(one)
        replaced = [module for module in stubs if _is_left_alone(module)]
        for module in replaced:
            module.forward = partial(_product, module, module.forward, stubs[module], to_come)
        try:
            yield bool(replaced)
        finally:
            for module in replaced:
                del module.forward


def _is_left_alone(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _product(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    stubs: list[_LeftOut],
    to_come: Callable[[], int],
    given: Tensor,
) -> Tensor:
    """Stand for a module: return NaN where its product is needless, else the product."""
    for stub in stubs:
        product = stub.product
        if to_come() == len(stub.ending) and given.dtype == product.given:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            made: Tensor = _NotComputed.apply(product, given, *trained)  # type: ignore[no-untyped-call] # torch's is
            return made
    return forward(given)


class _NotComputed(torch.autograd.Function):
    """A tensor that requires grad where the product would, and is like it but for its values."""

    @staticmethod
    def forward(ctx: Any, product: Product, given: Tensor, *trained: Tensor) -> Tensor:  # noqa: ARG004 - autograd looks at them
        return given.new_full((*given.shape[:-1], product.features), torch.nan, dtype=product.made)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("a recomputation is not differentiated")
