"""Selective checkpointing whose kept outputs wait off the device; everything else in the checkpoint
is recomputed.

For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=offloaded_ops(...))`.
Attention costs much to compute again and little to keep. Torch's own keeps such outputs on the
device; here they are moved.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lema.activations.context import OffloadActivations
from lema.activations.hooks import current
from lema.activations.offload import Offload, Packed
from lema.activations.policy import storages_of
from lema.errors import ConfigError, LemaError

__all__ = ["DEFAULT_ATTENTION_OPS", "offloaded_ops"]

# Of the kinds of attention that torch has, those that no torch here knows are passed over.
DEFAULT_ATTENTION_OPS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
)

Contexts = tuple[TorchDispatchMode, TorchDispatchMode]


def offloaded_ops(
    offload: Offload | OffloadActivations, ops: Collection[Any] = DEFAULT_ATTENTION_OPS
) -> Callable[[], Contexts]:
    """Return a `context_fn` for checkpoints that are not reentrant. `offload` is what moves the
    outputs, or the context that does, which need not be open. `ops` are the operators whose outputs
    are kept: names as "aten::mm", or what `torch.ops` has under these. All others' are recomputed.
    `ConfigError`: one of `ops` is unknown, writes into what it is given or returns a view of it, or
    is made of other operators, so that it never runs itself."""
    core = offload if isinstance(offload, Offload) else offload.offload
    if not isinstance(core, Offload):
        raise ConfigError(
            "outputs of operations are moved as storages, and tensors of this device have none"
        )
    chosen = frozenset(
        overload
        for op in ops
        for overload in _overloads(op, needed=ops is not DEFAULT_ATTENTION_OPS)
    )

    # One pair for each call of a checkpoint, because the graph of that call holds it until its
    # backward.
    def contexts() -> Contexts:
        forward = _Keeping(chosen, core)
        return forward, _BringingBack(chosen, forward.calls)

    return contexts


@dataclass(frozen=True)
class _Waiting:
    """Stands for a tensor in what an operator returned."""

    packed: Packed


@dataclass(frozen=True)
class _Call:
    op: Any  # the operator
    out: Any  # what it returned, with `_Waiting` for tensors
    drawn: dict[
        torch.device, tuple[Tensor, Tensor]
    ]  # where it drew, the generator's state before and after


class _Keeping(TorchDispatchMode):
    """One run of a checkpointed function, and the calls of chosen operators that it made, in
    order.
    """

    supports_higher_order_operators = True

    def __init__(self, ops: frozenset[Any], offload: Offload) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._ops = ops
        self._offload = offload
        self.calls = list[_Call]()
        self._outputs: dict[
            int, tuple[StorageWeakRef, Any]
        ] = {}  # storages of outputs, and whose they are

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            self._refuse_write(func, tensor)
        if func not in self._ops:
            return func(*args, **kwargs)
        devices = {tensor.device for tensor in _tensors((*args, *kwargs.values()))}
        before = {device: _random_state(device) for device in devices}
        out = func(*args, **kwargs)
        after = {device: _random_state(device) for device in devices}
        drawn = {
            device: (old, after[device])
            for device, old in before.items()
            if not torch.equal(old, after[device])
        }
        self.calls.append(_Call(func, tree_map_only(Tensor, self._packed, out), drawn))
        for tensor in _tensors(out):
            for key in storages_of(tensor):
                self._outputs[key] = StorageWeakRef(tensor.untyped_storage()), func
        return out

    def _packed(self, tensor: Tensor) -> _Waiting:
        # Down here aliases do not share their version with what they are aliases of. Those that
        # `pack` makes must, so that a write into the tensor is seen, and with this they do.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            if (scope := current()) is None:
                return _Waiting(self._offload.pack(tensor))
            scope.mark(tensor)  # chosen by name, even where only layers' inputs are
            try:
                return _Waiting(self._offload.pack(tensor))
            finally:
                scope.unmark(tensor)

    def _refuse_write(self, func: OpOverload, tensor: Tensor) -> None:
        for key in storages_of(tensor):
            if key in self._outputs:
                op = self._outputs[key][1]
                what = f"the output of {op} is kept for the backward, and {func} writes into it"
                how = f"leave {op} out of the operators, or write to a copy"
                raise ConfigError(what, where="offloaded_ops", how=how)


class _BringingBack(TorchDispatchMode):
    """The recomputation of what made these calls, which may take place more than once."""

    supports_higher_order_operators = True

    def __init__(self, ops: frozenset[Any], calls: Sequence[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._ops = ops
        self._calls = calls
        self._next = 0

    def __enter__(self) -> Self:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call] # torch's is
        return self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func not in self._ops:
            return func(*args, **(kwargs or {}))
        call = self._calls[self._next] if self._next < len(self._calls) else None
        if call is None or call.op is not func:
            raise LemaError(
                f"a checkpoint's recomputation came to {func} where its forward had "
                f"{'no more of the chosen operators' if call is None else call.op}",
                where=f"operator {self._next} of those that offloaded_ops keeps",
                how="the function inside the checkpoint must do the same in both runs",
            )
        self._next += 1
        for device, (before, after) in call.drawn.items():
            # The code after it must draw the same numbers. A checkpoint that does not preserve the
            # state draws again.
            if torch.equal(_random_state(device), before):
                _set_random_state(device, after)
        # An alias, because autograd makes it part of a graph, and a tensor that stayed may be
        # requested again.
        return tree_map_only(_Waiting, lambda waiting: waiting.packed.unpack().detach(), call.out)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call of `func` writes into."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )


def _overloads(op: str | OpOverloadPacket | OpOverload, *, needed: bool) -> Iterator[OpOverload]:
    """Yield an operator's overloads that can be kept; if not `needed`, there may be no such
    operator.
    """
    operator: Any = op
    if isinstance(op, str):
        space, _, name = op.partition("::")
        operator = getattr(getattr(torch.ops, space), name, None) if name else None
        if operator is None and needed:
            raise ConfigError(
                f"there is no operator {op!r}",
                where="offloaded_ops",
                how='name it as in "aten::mm"',
            )
        if operator is None:
            return
    # Every overload, because which of them runs depends on how a model calls the operator.
    all_overloads: list[OpOverload] = (
        [getattr(operator, name) for name in operator.overloads()]
        if hasattr(operator, "overloads")
        else [operator]
    )
    refused = [
        (overload, why) for overload in all_overloads if (why := _why_refused(overload)) is not None
    ]
    if len(refused) == len(all_overloads):
        what = f"the output of {refused[0][0]} cannot be kept: {refused[0][1]}"
        how = "choose operators that return new tensors"
        raise ConfigError(what, where="offloaded_ops", how=how)
    yield from set(all_overloads) - {overload for overload, _ in refused}


def _why_refused(overload: OpOverload) -> str | None:
    schema = getattr(overload, "_schema", None)
    if schema is None:
        return None
    if schema.is_mutable:
        return "it writes into its input"
    if any(result.alias_info is not None for result in schema.returns):
        return "it returns a view of its input"
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return "it has no tensor as input"
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return "it consists of other operators, and only those run"
    return None
