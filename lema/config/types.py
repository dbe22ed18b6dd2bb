"""The types a setting may have: which values each accepts, and in which words any other value is
refused.
"""

import json
import math
import os
import re
from datetime import date
from enum import StrEnum
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lema.config.peft import INITIAL_VALUES, why_not_initial
from lema.config.units import memory_bytes

if TYPE_CHECKING:
    import torch


class MemoryStrategy(StrEnum):
    """Where frozen weights wait before they are copied to the device."""

    STREAMING = "streaming"
    """On disk; a few layers at a time pass through host memory."""
    RESIDENT = "resident"
    """In host memory, all of them."""


def dtype_name(dtype: "torch.dtype") -> str:
    """Return a type's name as settings write it."""
    return str(dtype).removeprefix("torch.")


def _as_text(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value


def _day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"must be a date such as 2026-03-31, not {value!r}") from None


def _retained_count(value: int) -> int:
    if value < 2:
        raise ValueError(
            f"must be 2 or more, not {value}, so that a run can continue if the newest one "
            "is damaged"
        )
    return value


def _memory(value: object) -> object:
    if isinstance(value, int | float | str):
        memory_bytes(value, 1)
    return value


def _bytes(value: object) -> object:
    """Return a size such as 1MB as bytes. A fraction, and auto, are none: of what, nothing says."""
    if not isinstance(value, str | float):
        return value
    size = memory_bytes(value, 0)  # 0 or 1 for shares of nothing
    if size <= 1:
        raise ValueError(f"must be a size such as 32MiB, or bytes, not {value!r}")
    return size


def _strategy(value: object) -> object:
    names = [strategy.value for strategy in MemoryStrategy]
    if isinstance(value, str) and value.lower() in names:
        return MemoryStrategy(value.lower())
    raise ValueError(f"must be one of {', '.join(names)}, not {value!r}")


def _switch(*names: str) -> BeforeValidator:
    """Return a validator of what is true, false, or one of some names."""

    def check(value: object) -> object:
        if isinstance(value, bool) or (isinstance(value, str) and value in names):
            return value
        raise ValueError(
            f"must be {', '.join(('true', 'false', *names[:-1]))} or {names[-1]}, not {value!r}"
        )

    return BeforeValidator(check)


def _split(value: object) -> object:
    if isinstance(value, int | float) and not (
        0 < value < 1 if isinstance(value, float) else value >= 1
    ):
        raise ValueError(f"must be a fraction between 0 and 1, or a number of rows, not {value!r}")
    return value


# That data may call by other names; the last two are of a message.
_OF_TOKENS = ("input_ids", "labels", "attention_mask")
_OF_CHATS = ("messages", "conversations", "tools", "system", "history")
_OF_TEXT = (
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "chosen",
    "rejected",
    "label",
)
_OF_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_OF_MESSAGES = ("role", "content")
COLUMNS = (*_OF_TOKENS, *_OF_CHATS, *_OF_TEXT, *_OF_MEDIA, "train", "weight", *_OF_MESSAGES)
NO_COLUMN = "NONE"  # in the place of a name, as null: LEMA's column is not read


def _columns(value: dict[str, str | None]) -> dict[str, str | None]:
    value = {ours: None if theirs == NO_COLUMN else theirs for ours, theirs in value.items()}
    if wrong := [name for name in value if name not in COLUMNS]:
        is_reversed = value[wrong[0]] in COLUMNS
        how = (
            f"; write {{{value[wrong[0]]}: {wrong[0]}}}"
            if is_reversed
            else f"; there are {', '.join(COLUMNS)}"
        )
        raise ValueError(f"must map LEMA's names of columns to yours, not {wrong[0]!r}{how}")
    names = [theirs for theirs in value.values() if theirs is not None]
    if len(set(names)) < len(names):
        raise ValueError("must name each of your columns once")
    if absent := [ours for ours in _OF_MESSAGES if ours in value and value[ours] is None]:
        raise ValueError(f"must name a field for {absent[0]!r}, which every message has")
    return value


def _path(value: object) -> object:
    path = os.fspath(value) if isinstance(value, PathLike) else value
    if isinstance(path, str) and path.startswith("~") and os.path.expanduser(path) == path:  # noqa: PTH111 - it raises
        raise ValueError(f"must not begin with the home of an unknown user, {path!r}")
    return path


def _names(value: object) -> object:
    return (
        [_path(item) for item in value] if isinstance(value, list | tuple | set) else _path(value)
    )


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple | set) else value


def _reports(value: object) -> object:
    named = _listed(value)
    return [] if named in ("none", ["none"]) else named  # as transformers calls it


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


def _initial(value: object) -> object:
    if value in INITIAL_VALUES and isinstance(value, bool | str):
        return value
    choices = ", ".join(json.dumps(choice) for choice in INITIAL_VALUES)
    if isinstance(value, str) and (reason := why_not_initial(value)) is not None:
        raise ValueError(f"{json.dumps(value)} {reason}; use one of {choices}")
    raise ValueError(f"must be one of {choices}, not {value!r}")


def _dtype(value: Any) -> object:
    # asking torch would import it
    return dtype_name(value) if type(value).__module__ == "torch" else value


# of the parameters of rotary embeddings, those whose numbers are above zero
POSITIVE = frozenset(
    {
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
    }
)


def _rope_parameters(value: dict[str, object]) -> dict[str, object]:
    kinds = [part for part in value.values() if isinstance(part, dict)]
    if not value or (kinds and len(kinds) < len(value)):
        raise ValueError("must have the keys of one rotary embedding, or one for each layer type")
    if kinds:
        return {kind: _rope_parameters(dict(part)) for kind, part in value.items()}  # type: ignore[call-overload] # all are mappings
    renamed = {"rope_type" if key == "type" else key: part for key, part in value.items()}
    if not isinstance(renamed.get("rope_type"), str):
        raise ValueError("must name a rope_type, such as yarn, llama3, longrope, dynamic or linear")
    for key, part in renamed.items():
        for number in part if isinstance(part, list | tuple) else [part]:
            _check_rope_number(key, number)
    return renamed


def _check_rope_number(key: str, number: object) -> None:
    if key in POSITIVE and number is not None:
        most = 1 if key == "partial_rotary_factor" else math.inf
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number <= most or number == math.inf:  # type: ignore[operator] # a number
            limit = "" if most == math.inf else f" and no more than {most}"
            raise ValueError(f"must have a number above 0{limit} as {key}, not {number!r}")
    elif isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"must have a finite number as {key}, not {number!r}")


Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
# A number, or None where the plan of the run chooses it, which may be written as auto.
AutoCount = Annotated[Count | None, BeforeValidator(_auto)]
# The same where zero is a number to give.
AutoSteps = Annotated[NotNegative | None, BeforeValidator(_auto)]
RetainedCount = Annotated[
    int, Field(json_schema_extra={"minimum": 2}), AfterValidator(_retained_count)
]
Name = Annotated[str, Field(min_length=1)]
Location = Annotated[Name, BeforeValidator(_path)]
Names = Annotated[Name | Annotated[list[Name], Field(min_length=1)], BeforeValidator(_names)]
Columns = Annotated[dict[Name, Name | None], AfterValidator(_columns)]
RowSplit = Annotated[int | float, BeforeValidator(_split)]
Strategy = Annotated[MemoryStrategy, BeforeValidator(_strategy)]
RopeParameters = Annotated[dict[str, object], AfterValidator(_rope_parameters)]
Pattern = Annotated[Name, AfterValidator(_pattern)]
Patterns = Annotated[
    Pattern | Annotated[list[Pattern], Field(min_length=1)], BeforeValidator(_listed)
]

# PEFT takes a text for an expression over full names, and the items of a list for the ends of
# names.
Targets = Annotated[Pattern | list[Name], BeforeValidator(_listed)]
Rows = Annotated[list[NotNegative], Field(min_length=1), BeforeValidator(_listed)]
TokenIndices = Rows | dict[Name, Rows]
Reports = Annotated[Name | list[Name], BeforeValidator(_reports)]
Several = Annotated[list[Name], BeforeValidator(_listed)]  # or none
NameList = Annotated[Several, Field(min_length=1)]
InitialValues = Annotated[bool | str, BeforeValidator(_initial)]
Memory = Annotated[int | float | str, BeforeValidator(_memory)]
Bytes = Annotated[
    Count, Field(json_schema_extra={"type": ["integer", "string"]}), BeforeValidator(_bytes)
]
Indices = NotNegative | Annotated[list[NotNegative], Field(min_length=1), BeforeValidator(_listed)]
Offloading = Annotated[
    bool | Literal["legacy", "hidden_states", "disk"], _switch("legacy", "hidden_states", "disk")
]
Packing = Annotated[bool | Literal["wrapped", "bfd"], _switch("wrapped", "bfd")]
Scale = Annotated[int | float, Field(gt=0)]
Day = Annotated[str, BeforeValidator(_as_text), AfterValidator(_day)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(_dtype)]
ComputeDtype = Annotated[
    Literal["auto", "weights", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)
]

# The values of transformers.SchedulerType, which costs seconds to import (a test holds the two
# together), and our own.
Scheduler = Literal[  # noqa: RUF041 - nested, so that each kind has its line
    Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
    ],
    Literal[
        "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr"
    ],
    Literal["warmup_stable_decay", "greedy"],
    Literal["wsd", "wsds", "cosine_rewarm"],
]
PhaseScheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "wsd", "wsds", "cosine_rewarm"
]

# Those of transformers.training_args.OptimizerNames that torch, transformers, bitsandbytes and
# torchao have, and whose state is tensors, or made of such, and numbers: a checkpoint holds nothing
# that is pickled.
Optimizer = Literal[  # noqa: RUF041 - nested, so that each kind has its line
    Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"],
    Literal["adamw_torch_8bit", "adamw_torch_4bit"],
    Literal["adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit"],
    Literal[
        "rmsprop_bnb",
        "rmsprop_bnb_8bit",
        "rmsprop_bnb_32bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
    ],
    Literal["paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit"],
]

Positive = Annotated[float, Field(gt=0)]
# The forms of lema.storage.quantized, which cost seconds to import (a test holds the two together).
QuantizedKind = Literal["nf4", "int8", "fp8"]


def _tokens(value: object) -> object:
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kMBG]?)", value)):
        value = float(match[1]) * {"": 1, "k": 10**3, "M": 10**6}.get(match[2], 10**9)
    if isinstance(value, float) and value.is_integer():  # YAML reads 1e9 as a float
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError(
            f"must be at least 1, not {value}; leave out data sets that are not trained on"
        )
    return value


def _step_tokens(value: object) -> object:
    value = _tokens(value)
    if value is None or value == "auto" or type(value) is int:
        return value
    raise ValueError(f"must be a number of tokens, such as 16k, or auto, not {value!r}")


Tokens = Annotated[
    Count, Field(json_schema_extra={"type": ["integer", "string"]}), BeforeValidator(_tokens)
]
StepTokens = Annotated[Tokens | Literal["auto"], BeforeValidator(_step_tokens)]
