"""The messages of the Tinker API that are not JSON: requests with rows, and their answers.

Their fields are written down here, and protobuf's own library reads and writes them. Nothing of
what a client sends is executed, and numbers are read from bytes whose length has been checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

from lema.errors import DataError
from lema.train.learner.heads import Scored
from lema.train.learner.images import LearnerImages, RowOfChunks
from lema.train.learner.rows import ROUTED, AdapterRows, Datum

__all__ = [
    "RowsRequest",
    "SampledText",
    "addressed",
    "canonical",
    "read_rows",
    "sample_answer",
    "scored_answer",
]

PACKAGE = "tinker_public"
FLOAT32, INT64 = 1, 2  # numbers of the types of tensors
STOP, LENGTH = 0, 1  # numbers of the reasons why a text ends
MOST_DIMENSIONS = 2
MOST_DENSE = 1 << 24  # numbers of a matrix that is sent in compressed rows
KINDS: Mapping[str, int] = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "message": 11,
    "bytes": 12,
    "uint32": 13,
    "enum": 5,  # an enum is an int32 on the wire, and no number of one is refused while reading
}
# Of each message: name, number and type of each field. `*` repeats it, `?` says whether it is set,
# `{}` maps texts to it, and a name with a capital letter is a message.
MESSAGES: Mapping[str, Sequence[tuple[str, int, str]]] = {
    "SparseCsr": [
        ("values", 1, "bytes"),
        ("crow_indices", 2, "bytes"),
        ("col_indices", 3, "bytes"),
    ],
    "Tensor": [
        ("dense", 1, "bytes?"),
        ("sparse_csr", 2, "SparseCsr"),
        ("dtype", 3, "enum"),
        ("shape", 4, "int64*"),
    ],
    "BatchedTensor": [
        ("data", 1, "bytes"),
        ("offsets", 2, "bytes"),
        ("dtype", 3, "enum"),
        ("trailing_shape", 4, "int64*"),
    ],
    "ArrayRecord": [
        ("type_tag", 1, "string"),
        ("fields", 2, "BatchedTensor{}"),
        ("num_datums", 3, "int64"),
    ],
    "ForwardBackwardOutput": [
        ("loss_fn_output_type", 1, "string"),
        ("loss_fn_outputs", 2, "ArrayRecord*"),
        ("metrics", 3, "double{}"),
    ],
    "LossConfigValue": [("number", 1, "double?"), ("text", 2, "string?")],
    "EncodedTextChunk": [("tokens", 1, "bytes")],
    "ImageChunk": [("data", 1, "bytes"), ("format", 2, "string")],
    "DmelChunk": [("dmel", 1, "bytes")],
    "Chunk": [
        ("encoded_text", 1, "EncodedTextChunk"),
        ("image", 2, "ImageChunk"),
        ("dmel", 3, "DmelChunk"),
    ],
    "Datum": [("model_input", 1, "Chunk*"), ("loss_fn_inputs", 2, "Tensor{}")],
    "ForwardBackwardRequest": [
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "Datum*"),
        ("loss_fn", 4, "string"),
        ("loss_fn_config", 5, "double{}"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config_v2", 7, "LossConfigValue{}"),
    ],
    "SampledSequence": [
        ("stop_reason", 1, "enum"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "bytes?"),
    ],
    "SampleResponse": [
        ("sequences", 1, "SampledSequence*"),
        ("prompt_logprobs", 2, "bytes?"),
        ("prompt_cache_hit_tokens", 4, "int32"),
    ],
}


@dataclass(frozen=True)
class RowsRequest:
    """A request with rows.

    Args:
        model_id: whose adapter.
        seq_id: its number among the requests of that adapter.
        forward_only: whether no gradient is asked for.
        data: the rows.
        loss: the name of the loss.
        options: its options.
    """

    model_id: str
    seq_id: int
    forward_only: bool
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float]

    def of_adapter(self, adapter: str) -> AdapterRows:
        """Return the rows as a learner takes them."""
        return AdapterRows(adapter, self.data, self.loss, self.options)


@dataclass(frozen=True)
class SampledText:
    """One text that was sampled.

    Args:
        tokens: its tokens.
        logprobs: of each, as it was sampled.
        stopped: whether it ended by itself, and not because it was long enough.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


@cache
def _message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="lema_learner.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            if kind.endswith("{}"):
                entry = f"{''.join(part.capitalize() for part in field.split('_'))}Entry"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                _add_field(nested, "key", 1, "string")
                _add_field(nested, "value", 2, kind.removesuffix("{}"))
                _add_field(message, field, number, f"{name}.{entry}*")
            else:
                _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    bare = kind.rstrip("*?")
    field = message.field.add(name=name, number=number)
    field.label = 3 if kind.endswith("*") else 1
    if bare in KINDS:
        field.type = KINDS[bare]
    else:
        field.type = KINDS["message"]
        field.type_name = f".{PACKAGE}.{bare}"
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def canonical(body: bytes) -> bytes:
    """Return a request with rows in one order of its fields, so that two that say the same are the
    same bytes.
    """
    canonical_bytes: bytes = _parsed(body).SerializeToString(deterministic=True)
    return canonical_bytes


def _parsed(body: bytes) -> Any:
    message = _message("ForwardBackwardRequest")()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError("the request is no ForwardBackwardRequest of the Tinker API") from error
    return message


def addressed(body: bytes) -> tuple[str, int]:
    """Return whose adapter a request with rows is for, and its number. `DataError`: it is none."""
    message = _parsed(body)
    return message.model_id, message.seq_id


def read_rows(body: bytes, images: LearnerImages | None) -> RowsRequest:
    """Return what a request with rows says.

    Args:
        body: the request.
        images: makes tokens of images; None: the model is open for text alone.

    Raises:
        DataError: it is none, or a tensor or a row in it is not whole.
    """
    message = _parsed(body)
    options = {name: float(value) for name, value in message.loss_fn_config.items()}
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise DataError(f"the option {name!r:.80} is no number", where="loss_fn_config")
        options[name] = float(value.number)
    data = [_datum(row, images) for row in message.data]
    return RowsRequest(
        message.model_id, message.seq_id, message.forward_only, data, message.loss_fn, options
    )


def _datum(row: Any, images: LearnerImages | None) -> Datum:
    parts = RowOfChunks(images)
    for chunk in row.model_input:
        if chunk.HasField("encoded_text"):
            ids = _array(chunk.encoded_text.tokens, np.dtype("<i4"))
            parts.add_tokens(torch.from_numpy(ids.astype(np.int64)))
        elif chunk.HasField("image"):
            parts.add_image(chunk.image.data)
        else:
            what = "a row has something else than text and images"
            raise DataError(what, where="model_input")
    tensors = {name: _tensor(tensor, name) for name, tensor in row.loss_fn_inputs.items()}
    targets = tensors.pop("target_tokens", None)
    if targets is None:
        raise DataError("a row has no target_tokens", where="loss_fn_inputs")
    if targets.is_floating_point():
        raise DataError("target_tokens are no whole numbers", where="loss_fn_inputs")
    routed = tensors.pop(ROUTED, None)
    if routed is not None and routed.is_floating_point():
        raise DataError(f"{ROUTED} are no whole numbers", where="loss_fn_inputs")
    return Datum(
        parts.tokens,
        targets,
        {name: tensor.float() for name, tensor in tensors.items()},
        routed,
        tuple(parts.images),
    )


def _array(content: bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(content) % kind.itemsize:
        raise DataError(f"an array ends within a number: it has {len(content)} bytes")
    return np.frombuffer(content, dtype=kind)


def _tensor(tensor: Any, name: str) -> Tensor:
    """Return a tensor, dense, of the shape that it says."""
    kinds: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
    if tensor.dtype not in kinds:
        raise DataError(f"{name:.80} is of an unknown type", where="loss_fn_inputs")
    kind = kinds[tensor.dtype]
    shape = [*tensor.shape]
    if len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise DataError(f"{name:.80} has the shape {shape!s:.80}", where="loss_fn_inputs")
    if tensor.HasField("sparse_csr"):
        return _densified(tensor.sparse_csr, kind, shape, name)
    values = _array(tensor.dense, kind)
    if not shape:
        shape = [len(values)]
    if int(np.prod(shape, dtype=object)) != len(values):
        what = f"{name:.80} has {len(values)} numbers, and the shape {shape!s:.80}"
        raise DataError(what, where="loss_fn_inputs")
    return torch.from_numpy(values.copy()).view(shape)


def _densified(csr: Any, kind: np.dtype[Any], shape: list[int], name: str) -> Tensor:
    """Return a tensor that is given as compressed rows; zero where it says nothing."""
    values = _array(csr.values, kind)
    crow = _array(csr.crow_indices, np.dtype("<i8"))
    columns = _array(csr.col_indices, np.dtype("<i8"))
    rows, width = shape if len(shape) == MOST_DIMENSIONS else (-1, 1)
    fits = (
        0 <= rows * width <= MOST_DENSE
        and len(crow) == rows + 1
        and len(values) == len(columns)
        and crow[0] == 0
        and crow[-1] == len(columns)
        and bool((np.diff(crow) >= 0).all())
        and bool(((columns >= 0) & (columns < width)).all())
    )
    if not fits:
        raise DataError(f"{name:.80} is no matrix in compressed rows", where="loss_fn_inputs")
    dense = np.zeros((rows, width), dtype=kind)
    dense[np.repeat(np.arange(rows), np.diff(crow)), columns] = values
    return torch.from_numpy(dense)


def scored_answer(scored: Scored) -> bytes:
    """Return the answer to a request with rows."""
    message = _message("ForwardBackwardOutput")(loss_fn_output_type="TorchLossReturn")
    fields = {"logprobs": scored.logprobs, "elementwise_loss": scored.losses}
    # one record for rows that follow each other and have the same number of candidates
    first = 0
    while first < len(scored.logprobs):
        trailing = scored.logprobs[first].shape[1:]
        last = first
        while last < len(scored.logprobs) and scored.logprobs[last].shape[1:] == trailing:
            last += 1
        record = message.loss_fn_outputs.add(type_tag="TorchLossReturn", num_datums=last - first)
        for name, rows in fields.items():
            arrays = [np.asarray(row.numpy(), dtype="<f4") for row in rows[first:last]]
            ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
            batched = record.fields[name]
            batched.data = b"".join(array.tobytes() for array in arrays)
            batched.offsets = ends.tobytes()
            batched.dtype = FLOAT32
            batched.trailing_shape.extend(trailing)
        first = last
    message.metrics["loss:sum"] = scored.loss
    answer: bytes = message.SerializeToString(deterministic=True)
    return answer


def sample_answer(texts: Sequence[SampledText], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Return the answer to a request of texts. `prompt_logprobs`: of each token of the prompt, NaN
    for the first; None: not asked for.
    """
    message = _message("SampleResponse")()
    for text in texts:
        message.sequences.add(
            stop_reason=STOP if text.stopped else LENGTH,
            tokens=np.asarray(text.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(text.logprobs, dtype="<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype="<f4").tobytes()
    answer: bytes = message.SerializeToString(deterministic=True)
    return answer
