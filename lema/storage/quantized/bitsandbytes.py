"""nf4 as bitsandbytes stores it: blocks of 64 weights with a scale each, the scales quantised in
blocks themselves.

The format is that of QLoRA (https://arxiv.org/abs/2305.14314); the names are those of
`Linear4bit.state_dict()`. The library's int8, one scale per row (https://arxiv.org/abs/2208.07339),
is expanded where a model is published in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lema.errors import ModelError
from lema.storage.header import TensorRecord, are_sizes
from lema.storage.index import GlobalBinaryIndex
from lema.storage.quantized.records import (
    PartSpecs,
    QuantizedRecord,
    collected,
    cut_when_expanded,
    nonsense,
    parsed,
    pieces,
    quiet_import,
)
from lema.storage.slices import rows_of

__all__ = [
    "KINDS",
    "cut_rows",
    "expand",
    "find",
    "metadata",
    "part_name",
    "part_of_quantized",
    "quantize",
    "settings",
    "specs",
    "takes",
]

KINDS: tuple[str, ...] = ("nf4",)

QUANT_STATE = ".quant_state.bitsandbytes__"
FLOATS = ("float32", "float16", "bfloat16")
LARGEST_STATE = 1 << 16  # bytes of the state of a weight; it needs fewer than 300
BLOCK = 64
NESTED_BLOCK = 256
STATE = "quant_state.bitsandbytes__nf4"
# the key of what is said of a part of a weight for how many scales belong to what lies before it
SKIPPED = "skipped"
# filled up with spaces: known before the weights are read, and what follows it is aligned
STATE_BYTES = 256


def takes(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape can be quantised: where blocks do not fill the rows,
    bitsandbytes 0.50 expands some shapes on a processor as if they did. Experts in one tensor are
    quantised like the rows of one matrix."""
    return len(shape) in (2, 3) and shape[-1] % BLOCK == 0


def specs(kind: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartSpecs, dict[str, Any]]:
    """Say what a weight becomes: the dtype and shape of each part, and what the library says of
    it, but for the offset of its scales. In a file that is a part itself.
    """
    elements = prod(shape)
    blocks = -(-elements // BLOCK)
    parts: PartSpecs = {
        "": (torch.uint8, ((elements + 1) // 2, 1)),
        "absmax": (torch.uint8, (blocks,)),
        "nested_absmax": (torch.float32, (-(-blocks // NESTED_BLOCK),)),
        "nested_quant_map": (torch.float32, (256,)),
        "quant_map": (torch.float32, (16,)),
        STATE: (torch.uint8, (STATE_BYTES,)),
    }
    about = {
        "quant_type": kind,
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": 0.0,
    }
    return parts, about


def quantize(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise a weight, some blocks at a time; return its parts, and what the library says of
    it.
    """
    functional = quiet_import("bitsandbytes.functional")
    flat = weight.reshape(-1)
    done = [
        functional.quantize_4bit(flat[span], blocksize=BLOCK, quant_type=kind)
        for span in pieces(flat, block=BLOCK)
    ]
    # The library's own way to quantise the scales, which is of all of them together.
    scales = torch.cat([state.absmax for _, state in done])
    offset = scales.mean()
    absmax, nested = functional.quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
    state = functional.QuantState(
        absmax=absmax,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=BLOCK,
        code=done[0][1].code,
        quant_type=kind,
        offset=offset,
        state2=nested,
    )
    parts: dict[str, Tensor] = {
        "": torch.cat([packed for packed, _ in done]),
        **state.as_dict(packed=True),
    }
    padded = torch.full((STATE_BYTES,), ord(" "), dtype=torch.uint8)
    padded[: parts[STATE].numel()] = parts[STATE]
    return parts | {STATE: padded}, {
        key: value for key, value in state.as_dict().items() if key not in parts
    }


def expand(parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    """Fill `out` with what the library dequantises the parts to, some blocks or rows at a time."""
    functional = quiet_import("bitsandbytes.functional")
    if about["quant_type"] == "int8":
        for rows in pieces(out):
            out[rows].copy_(functional.int8_vectorwise_dequant(parts[""][rows], parts["SCB"][rows]))
        return
    scales = parts["absmax"]
    packed = parts[""].reshape(-1).view(torch.uint8)
    flat = out.view(-1)
    if "nested_absmax" in parts:
        nested = functional.QuantState(
            absmax=parts["nested_absmax"],
            code=parts["nested_quant_map"],
            blocksize=about["nested_blocksize"],
            dtype=getattr(torch, about["nested_dtype"]),
        )
        scales = (functional.dequantize_blockwise(scales, nested) + about["nested_offset"]).float()
        scales = scales[about.get(SKIPPED, 0) :]
    block = about["blocksize"]
    for span in pieces(flat, block=block):
        size = span.stop - span.start
        state = functional.QuantState(
            absmax=scales[span.start // block : -(-span.stop // block)],
            shape=torch.Size((1, size)),
            blocksize=block,
            quant_type=about["quant_type"],
            dtype=out.dtype,
        )
        piece = packed[span.start // 2 : (span.stop + 1) // 2, None]
        flat[span].copy_(functional.dequantize_4bit(piece, state).reshape(-1))


part_of_quantized = cut_when_expanded  # because blocks do not end where a part does


def cut_rows(record: QuantizedRecord, first: int, end: int) -> QuantizedRecord:
    """Return some rows of a weight along its first dimension. Their scales are read with those that
    share a block of scales of scales with them. `ValueError`: rows and blocks of weights do not
    begin at the same places."""
    block = record.about.get("blocksize", 0)
    row = prod(record.shape[1:])
    packed = record.parts[""]
    scales = record.parts.get("absmax")
    if not block or row % block or scales is None or packed.shape[0] != prod(record.shape) // 2:
        raise ValueError(f"{record.name} is stored in blocks that several experts share")
    begin = first * row // block
    stop = end * row // block  # of the blocks
    parts = {**record.parts, "": rows_of(packed, first * row // 2, end * row // 2)}
    about = {**record.about, "shape": [end - first, *record.shape[1:]]}
    if "nested_absmax" in parts:
        of = int(record.about["nested_blocksize"])
        about[SKIPPED] = begin % of
        parts["nested_absmax"] = rows_of(parts["nested_absmax"], begin // of, -(-stop // of))
        begin -= begin % of
    parts["absmax"] = rows_of(scales, begin, stop)
    return replace(record, parts=parts, shape=tuple(about["shape"]), about=about)


def find(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters that the library has quantised. Errors are those of `fold`."""
    return [*_four_bits(index), *_eight_bits(index)]


def _four_bits(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters that have one of the library's packed quantisation states."""
    records = []
    for stored, record in index.items():
        name, separator, kind = stored.partition(QUANT_STATE)
        if not separator:
            continue
        if record.dtype != "U8" or record.nbytes > LARGEST_STATE:
            raise nonsense(name, index.path)
        with record.file.open("rb") as stream:
            stream.seek(record.offset)
            about = parsed(stream.read(record.nbytes), name, index.path)
        if about.get("quant_type") != kind or not are_sizes(about.get("shape")):
            raise nonsense(name, index.path)
        part_names = {"": name, "absmax": f"{name}.absmax", "quant_map": f"{name}.quant_map"}
        if "nested_offset" in about:
            part_names |= {part: f"{name}.{part}" for part in ("nested_absmax", "nested_quant_map")}
        parts = collected(index, name, part_names | {f"quant_state.bitsandbytes__{kind}": stored})
        if not _fits(parts, about):
            raise nonsense(name, index.path)
        # Codes are bytes, whatever type `bnb_4bit_quant_storage` gave them; as floats, some would
        # be called NaN.
        parts[""] = replace(parts[""], dtype="U8", shape=(parts[""].nbytes, 1))
        records.append(QuantizedRecord(name, "bitsandbytes", parts, tuple(about["shape"]), about))
    return records


def _eight_bits(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters of 8 bits that have the library's absolute maxima of their rows."""
    records = []
    for stored, record in index.items():
        owner, _, leaf = stored.rpartition(".")
        weight = index.get(f"{owner}.weight")
        if leaf != "SCB" or weight is None or weight.dtype != "I8":
            continue
        if record.dtype != "F32" or len(weight.shape) != 2 or record.nbytes != 4 * weight.shape[0]:
            raise nonsense(weight.name, index.path)
        parts = {"": weight, "SCB": record}
        if (layout := index.get(f"{owner}.weight_format")) is not None:
            with layout.file.open("rb") as stream:
                stream.seek(layout.offset)
                if layout.nbytes != 1 or stream.read(1) != b"\0":
                    what = (
                        "the parameter is stored in tiles, as bitsandbytes does for older devices"
                    )
                    how = (
                        "save the model again with a newer bitsandbytes, or use the unquantised one"
                    )
                    raise ModelError(what, where=f"{index.path}: {weight.name}", how=how)
            parts["weight_format"] = layout
        records.append(
            QuantizedRecord(
                weight.name, "bitsandbytes", parts, weight.shape, {"quant_type": "int8"}
            )
        )
    return records


def _fits(parts: Mapping[str, TensorRecord], about: Mapping[str, Any]) -> bool:
    """Whether tensors are as long as the library takes them to be: it does not ask, and would
    read past their ends.
    """
    block = about.get("blocksize")
    nested = about.get("nested_blocksize", 1)
    if not are_sizes([block, nested]) or 0 in (block, nested):
        return False
    if "nested_absmax" in parts and not (
        type(about["nested_offset"]) is float and about.get("nested_dtype") in FLOATS
    ):
        return False
    elements = prod(about["shape"])
    blocks = -(-elements // block)
    sizes = {
        "": (elements + 1) // 2,
        "absmax": blocks * (1 if "nested_absmax" in parts else 4),
        "quant_map": 16 * 4,
    }
    if "nested_absmax" in parts:
        sizes |= {"nested_absmax": -(-blocks // nested) * 4, "nested_quant_map": 256 * 4}
    return all(parts[part].nbytes == nbytes for part, nbytes in sizes.items())


def part_name(parameter: str, part: str) -> str:
    """Return what a part is called in a file."""
    return f"{parameter}.{part}" if part else parameter


def metadata(abouts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:  # noqa: ARG001 - as every library's
    """Return what the library writes into a file's header: nothing."""
    return {}


def settings(kind: str, dtype: torch.dtype, unchanged: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` for `transformers`. Weights expand to `dtype`, but for
    modules `unchanged`.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(unchanged),
    )
    return dict(config.to_dict())
