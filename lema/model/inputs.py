"""The inputs of a step on their way to the device: all micro-batches in one copy that the host need
not await.

One by one, from memory that is not page-locked, each would stop the host until all queued work is
done. So would each question about their values, which a model's forward asks to leave out a mask;
`HostCopies` answers it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.integrations.neftune import activate_neftune

from lema.backend import Backend, Upload
from lema.errors import ConfigError

__all__ = ["IMAGES", "HostCopies", "Inputs", "Lookups", "add_noise", "model_inputs"]

MODEL_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})
TARGETS = "targets"
IMAGES = "images"  # of a micro-batch: what becomes pixels when it comes to the model
ALIGNMENT = 256  # of a tensor in memory: a multiple of torch's own
NUM_BUFFERS = 2  # the copy of one step may be under way while those of the next are gathered
LEAST_BYTES = 4096  # of a buffer
# of a tensor that is followed in host memory: more than the tokens of a micro-batch
MOST_ELEMENTS = 1 << 17
# What answers the host with a value, and what forwards make of ids, positions and masks before they
# ask.
QUESTIONS = frozenset(
    {"__bool__", "__contains__", "__int__", "__index__", "item", "tolist", "equal", "is_nonzero"}
)
FOLLOWED = frozenset({
    "add", "sub", "rsub", "__radd__", "__rsub__", "cumsum", "diff", "sum", "max", "min", "clamp",
    "eq", "__eq__", "ne", "__ne__", "lt", "__lt__", "le", "__le__", "gt", "__gt__", "ge", "__ge__",
    "__and__", "__or__", "__invert__", "logical_and", "logical_or", "logical_not", "all", "any",
    "where", "masked_fill", "arange", "full", "full_like", "ones", "ones_like", "zeros",
    "zeros_like", "new_ones", "new_zeros", "clone", "__getitem__", "expand", "flatten", "flip",
    "repeat", "reshape", "squeeze", "unsqueeze", "view", "cat", "stack",
    "bool", "int", "long", "to", "type", "contiguous", "detach",
})  # fmt: skip
# What is followed of other numbers as well, because it rounds nothing: some masks begin as ones.
EXACT = frozenset(
    {
        "full",
        "ones",
        "ones_like",
        "zeros",
        "zeros_like",
        "bool",
        "to",
        "__getitem__",
        "expand",
        "view",
    }
)
MicroBatch = Mapping[str, Tensor]


def model_inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the parts of a micro-batch that are arguments of the model."""
    return {name: tensor for name, tensor in batch.items() if name in MODEL_INPUTS}


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Have the input's embeddings come with noise while the model is in training mode, as
    `transformers` draws it. `ConfigError`: the model looks its tokens up in no table."""
    try:
        table: Any = model.get_input_embeddings()
        assert isinstance(table.weight, Tensor)
        activate_neftune(model, alpha)
    except (NotImplementedError, AttributeError, AssertionError) as error:
        what = f"a {type(model).__name__} has no input embeddings for the noise"
        raise ConfigError(what, where="neftune_noise_alpha", how="leave it out") from error


class HostCopies:
    """What tensors on the device are, for as long as they are there: the same in host memory."""

    def __init__(self) -> None:
        self._copies: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def note(self, tensor: Tensor, copy: Tensor) -> None:
        """Note what a tensor on the device is."""
        if copy.device.type == "cpu":
            self._copies[tensor] = copy

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the same tensor in host memory; None: it is not known."""
        return self._copies.get(tensor)

    def answering(self) -> TorchFunctionMode:
        """Return a context in which the host is answered from the copies where it asks for a value
        on the device, and does not wait. What forwards make of known tensors there is known too."""
        return _Answering(self._copies)


class _Answering(TorchFunctionMode):
    """Follows integers and truth values in host memory, and answers from there."""

    def __init__(self, copies: MutableMapping[Tensor, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        kwargs = kwargs or {}
        if name in QUESTIONS and (host_arguments := self._in_host_memory(args, kwargs)) is not None:
            return function(*host_arguments[0], **host_arguments[1])
        target = (
            args[0]
            if args and isinstance(args[0], Tensor) and args[0].device.type != "cpu"
            else None
        )
        version = None if target is None or target.is_inference() else target._version
        result = (
            _unawaited(function, args, kwargs) if target is not None else function(*args, **kwargs)
        )
        if target is not None and version is not None and target._version != version:
            # it was changed in place, and with it all in its memory
            self._forget(target.untyped_storage()._cdata)
            return result
        host_arguments = (
            self._in_host_memory(args, kwargs)
            if name in FOLLOWED and self._follows(name, result)
            else None
        )
        if host_arguments is not None:
            self._copies[result] = function(*host_arguments[0], **host_arguments[1])
        return result

    def _forget(self, storage: int) -> None:
        for tensor in [
            tensor for tensor in self._copies if tensor.untyped_storage()._cdata == storage
        ]:
            del self._copies[tensor]

    def _follows(self, name: str, result: Any) -> bool:
        if (
            not isinstance(result, Tensor)
            or result.device.type == "cpu"
            or result.numel() > MOST_ELEMENTS
        ):
            return False
        return not result.is_meta and (
            name in EXACT or not (result.is_floating_point() or result.is_complex())
        )

    def _in_host_memory(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Return the arguments of a call with copies in host memory in the place of tensors;
        None: one is not known.
        """
        unknown: list[Tensor] = []

        def copy(value: Any) -> Any:
            if isinstance(value, Tensor):
                host_copy = value if value.device.type == "cpu" else self._copies.get(value)
                if host_copy is None:
                    unknown.append(value)
                return host_copy
            return torch.device("cpu") if isinstance(value, torch.device) else value

        copied = tree_map(copy, (args, kwargs))
        if "device" in kwargs:
            copied[1]["device"] = torch.device("cpu")
        return None if unknown else copied


def _unawaited(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, or what makes the same without the host: reading a list of places copies the
    list to the device, and writing where a mask is true counts the places first."""
    name = getattr(function, "__name__", "")
    if name == "__getitem__" and isinstance(args[1], tuple) and isinstance(args[1][-1], list):
        *before, indices = args[1]
        if (
            indices
            and all(key == slice(None) for key in before)
            and all(type(index) is int for index in indices)
        ):
            return torch.stack(
                [args[0].select(len(before), index) for index in indices], len(before)
            )
    if name == "__setitem__" and isinstance(args[1], Tensor) and isinstance(args[2], int | float):
        is_mask = args[1].dtype == torch.bool and args[1].shape == args[0].shape
        if is_mask:
            args[0].masked_fill_(args[1], args[2])
            return None
    return function(*args, **kwargs)


class Lookups(Protocol):
    """What looks ids up in host memory, and so asks what the inputs on the device are."""

    copies: HostCopies

    def expect(self, num_micro_batches: int) -> None:
        """Know how many micro-batches the step has."""


class Inputs:
    """Puts the tensors of micro-batches on the device, through page-locked buffers that are used in
    turn: the next is the one whose copy began longest ago. It is waited for, so there are as many
    as copies of one step (`expect`)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shared = backend.memory().shared
        self._buffers: deque[tuple[Tensor, Upload]] = deque()
        self._num_buffers = NUM_BUFFERS
        self._largest = LEAST_BYTES

    def expect(self, num_copies: int) -> None:
        """Have as many buffers as a step makes copies, so that each is used again in the next
        step, and not before.
        """
        self._num_buffers = max(self._num_buffers, num_copies)

    def to_device(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """Return the same micro-batches on the device: views of memory that nothing else uses."""
        device = self._backend.device
        here = {
            id(tensor): tensor
            for batch in micro_batches
            for tensor in batch.values()
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu"
        }
        if self._shared or not here:
            return [
                {
                    name: tensor.to(device) if isinstance(tensor, Tensor) else tensor
                    for name, tensor in batch.items()
                }
                for batch in micro_batches
            ]
        on_device = self._upload(list(here.values()))
        there = dict(zip(here, on_device, strict=True))
        return [
            {name: there.get(id(tensor), tensor) for name, tensor in batch.items()}
            for batch in micro_batches
        ]

    def step_to_device(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Sequence[Tensor],
        lookups: Lookups | None = None,
    ) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Return what the model is given, and the targets, on the device; `lookups` are told what
        these are.
        """
        pairs = zip(micro_batches, targets, strict=True)
        on_device = self.to_device(
            [{**model_inputs(batch), TARGETS: target} for batch, target in pairs]
        )
        there = [batch.pop(TARGETS) for batch in on_device]
        for batch, original in zip(on_device, micro_batches, strict=True):
            if IMAGES in original:
                batch[IMAGES] = original[IMAGES]
        if lookups is not None:
            lookups.expect(len(micro_batches))
            for batch, original in zip(on_device, micro_batches, strict=True):
                for name, tensor in batch.items():
                    if name != IMAGES:
                        lookups.copies.note(tensor, original[name])
        return on_device, there

    def _upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts = []
        end = 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._buffer(end)
        for tensor, start in zip(tensors, starts, strict=True):
            _view(buffer, start, tensor).copy_(tensor)
        upload = self._backend.device_slots(end, 1).upload(buffer[:end])
        self._buffers.append((buffer, upload))
        slot = upload.wait()
        return [_view(slot, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]

    def _buffer(self, nbytes: int) -> Tensor:
        """Return a host buffer that no copy reads any more: that of the step before has long
        been copied.
        """
        # Twice as large, and all that are new alike, because locking memory takes long, and batches
        # change in length.
        while self._largest < nbytes:
            self._largest *= 2
        if len(self._buffers) < self._num_buffers:
            return self._backend.host_buffer(self._largest)
        buffer, upload = self._buffers.popleft()
        upload.drained()
        return buffer if len(buffer) >= nbytes else self._backend.host_buffer(self._largest)


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from `start` on as a contiguous tensor of the shape and dtype of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
