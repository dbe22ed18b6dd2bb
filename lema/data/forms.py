"""What the settings say of the form of the data, and values of rows in the forms that they may
have.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lema.config import LemaConfig
from lema.config.data.rows import READING, InstructionForm
from lema.data.files import MAX_ROW, SHORTER, TOO_LONG, Row
from lema.data.templates.named import named_template, suggestion
from lema.errors import ConfigError, DataError
from lema.storage.modelfiles import MAX_TEMPLATE_BYTES
from lema.storage.regular import expanded, is_path, read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "Forms",
    "Remarks",
    "Rows",
    "TrainOn",
    "at_path",
    "beyond_positions",
    "check_ids",
    "flag_of",
    "forms_of",
    "list_of",
    "longest_row",
    "num_alike",
    "num_positions",
    "text_of",
    "with_chat_template",
]

IGNORED = -100
"""The label of a token which is read but not trained on; the value
`torch.nn.functional.cross_entropy` ignores.
"""

TrainOn: TypeAlias = Literal[
    "assistant", "last", "all", "completion", "contents", "all_but_prompts"
]
"""What is trained on: every answer; the last one; every token; the answers after the user's last
message; the contents of answers; or every token but those of a prompt in a column of its own.
"""

MESSAGE_FIELDS = ("role", "content")
"""Names of `columns` that mean fields of a message rather than columns of a row."""


class Rows(Protocol):
    """The rows of a data set by number, or its examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...  # columns by name; of an example, its rows


@dataclass(frozen=True)
class Forms:
    """How rows are to be read."""

    # our name of a column to the data's; None: no column is read as it
    columns: Mapping[str, str | None] = field(default_factory=dict)
    # a file, a Jinja text, or a name among the tokenizer's; None: the tokenizer's own
    chat_template: str | None = None
    train_on: TrainOn = "assistant"
    # that end a turn, for `contents`; None: the end-of-sequence token
    eot_tokens: Sequence[str] | None = None
    # whether what a generation prompt gives, such as an opened <think>, is trained
    trains_prompt: bool = False
    # that chat templates are told for today, YYYY-MM-DD; None: today's
    template_date: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)  # the data's name of a role to ours
    system_prompt: str | None = None  # of chats that have no system message
    drops_system: bool = False  # whether chats' own system messages are left out
    row_format: str | Mapping[str, Any] = "auto"  # how instructions are written
    truncation_side: Literal["right", "left"] = "right"
    pictures: bool = False  # whether rows may hold images

    def of_data_set(self, options: Mapping[str, Any]) -> "Forms":
        """Return the forms with the settings that a data set has of its own."""
        return replace(self, **_values_of(options)) if options else self

    def described(self) -> dict[str, Any]:
        """Return what decides the tokens of rows besides `columns`, `train_on` and the template,
        where it is not the default.
        """
        about = {
            "roles": dict(self.roles),
            "eot_tokens": self.eot_tokens,
            "system_prompt": self.system_prompt,
            "drops_system": self.drops_system,
            "row_format": self.row_format,
            "truncation_side": self.truncation_side,
        }
        return {name: value for name, value in about.items() if value != getattr(_DEFAULTS, name)}

    @property
    def fields(self) -> dict[str, str]:
        """The data's names of the fields of a message, by ours."""
        named = ((name, self.columns.get(name)) for name in MESSAGE_FIELDS)
        return {name: theirs for name, theirs in named if theirs is not None}

    def renamed(self, row: Row) -> Row:
        """Return the row with the columns under our names. `DataError`: the row lacks a column
        that was named.
        """
        columns = {
            ours: theirs for ours, theirs in self.columns.items() if ours not in MESSAGE_FIELDS
        }
        if not columns:
            return row
        renames = {ours: theirs for ours, theirs in columns.items() if theirs is not None}
        values = dict(row.values)
        for theirs in renames.values():
            if theirs not in values and (nested := at_path(row.values, theirs)) is not None:
                values[theirs] = nested
        if missing := [theirs for theirs in renames.values() if theirs not in values]:
            present = ", ".join(sorted(map(str, row.values)))
            what = (
                f"the settings name the column {missing[0]!r}, and the row has {present or 'none'}"
            )
            raise row.broken(
                what, how="correct `columns`, which maps LEMA's names to yours: {prompt: question}"
            )
        taken = set(renames.values()) | set(columns)
        taken |= {theirs.partition(".")[0] for theirs in renames.values()}
        remaining = {name: value for name, value in row.values.items() if name not in taken}
        return Row(
            remaining | {ours: values[theirs] for ours, theirs in renames.items()},
            row.source,
            row.line,
        )

    def with_template(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
        """Return the tokenizer with the chat template of the settings; a copy, since the tokenizer
        is the caller's. `DataError`: the setting is neither a Jinja text, nor a template of the
        tokenizer's, nor a file."""
        template = self.chat_template
        named_templates = tokenizer.chat_template
        if template is None:
            return tokenizer
        text = template
        if isinstance(named_templates, dict) and template in named_templates:
            text = named_templates[template]
        elif not ("{{" in template or "{%" in template):
            named_text = None if is_path(template) else named_template(template)
            if named_text is not None:
                return with_chat_template(tokenizer, named_text)
            try:
                text = read_regular(expanded(template), MAX_TEMPLATE_BYTES).decode("utf-8")
            except (OSError, ValueError, RuntimeError) as error:  # that of a home that is not here
                names = [*named_templates] if isinstance(named_templates, dict) else []
                listed = f"the tokenizer's are {', '.join(names)}; " if names else ""
                how = (
                    f"give a .jinja file, the template itself, or a name: {listed}"
                    f"{suggestion(template)}"
                )
                raise DataError(
                    f"the chat template cannot be read: {error}", where="chat_template", how=how
                ) from error
        return with_chat_template(tokenizer, text)


def _values_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of how rows are read by the names that `Forms` has for them."""
    values = {_NAMES.get(name, name): value for name, value in settings.items()}
    if "roles" in values:
        values["roles"] = {
            theirs: ours
            for ours, names in (values["roles"] or {}).items()
            for theirs in ([names] if isinstance(names, str) else names)
        }
    if isinstance(form := values.get("row_format"), InstructionForm):
        values["row_format"] = form.to_dict()
    return values


_NAMES = {"drop_system_messages": "drops_system"}
_DEFAULTS = Forms()


def at_path(values: Mapping[str, Any], name: str) -> object:
    """Return the value of a name, or of one within another, `outer.inner`; None: there is none."""
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    nested = values.get(outer) if dot else None
    return at_path(nested, inner) if isinstance(nested, Mapping) else None


def with_chat_template(
    tokenizer: "PreTrainedTokenizerBase", template: str | dict[str, str]
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer with another chat template, or several by name; a copy, since the
    tokenizer is the caller's.
    """
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def forms_of(config: LemaConfig) -> Forms:
    """Return what a run's settings say of the form of its data."""
    return Forms(
        trains_prompt=config.train_generation_prompt,
        template_date=config.template_date,
        **_values_of({name: getattr(config, name) for name in READING}),
    )


@dataclass
class Remarks:
    """What a user should know of the data, each thing once: how many rows it holds for, and the
    first of them.
    """

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def begin(self) -> dict[str, tuple[int, str]]:
        """Begin to count other rows; return the counts, which grow with them."""
        self.counts = {}
        return self.counts

    def add(self, row: Row, what: str) -> None:
        """Count one more row for which this holds."""
        count, first = self.counts.get(what, (0, row.origin))
        self.counts[what] = (count + 1, first)

    def lines(self) -> tuple[str, ...]:
        """What was found, one line for each."""
        return tuple(
            f"{what} ({count:,} {'row' if count == 1 else 'rows'}, the first is {first})"
            for what, (count, first) in self.counts.items()
        )


def check_ids(
    row: Row, columns: Mapping[str, Sequence[int] | npt.NDArray[Any]], vocab_size: int | None
) -> None:
    """Refuse token ids of a row that are outside the vocabulary of `vocab_size` tokens; None: any
    that are ids. Of the `columns`, by their names, `labels` may hold -100. `DataError`: names the
    column, the id and its position."""
    limit = 2**31 if vocab_size is None else vocab_size
    for column, values in columns.items():
        ids = np.asarray(values)
        wrong = (ids < 0) & ((ids != IGNORED) | (column != "labels")) | (ids >= limit)
        if wrong.any():
            at = int(wrong.argmax())
            what = f"{column} holds {values[at]}, which is outside the vocabulary of {limit} tokens"
            raise row.broken(
                what, at=f"position {at}", how="use the tokenizer of the model being trained"
            )


_YES_OR_NO = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def list_of(row: Row, column: str) -> list[Any]:
    """A list; or one written as JSON in a string, which is the only way a .csv can hold one."""
    value = row.values[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.broken(
                f"'{column}' should be a list, and the text there is not JSON: {error}"
            ) from error
    elif hasattr(value, "tolist"):  # arrays and tensors, in rows from memory
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise row.broken(f"'{column}' should be a list, not {type(value).__name__}")
    if not value:
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return list(value)


def text_of(row: Row, value: object, name: str, at: str = "") -> str:
    """A text that any tokenizer takes."""
    if not isinstance(value, str):
        raise row.broken(f"{name} should be text, not {type(value).__name__}", at=at)
    if len(value) > MAX_ROW:
        raise row.broken(f"{name} is {TOO_LONG}", at=at, how=SHORTER)
    if "\0" in value:
        raise row.broken(
            f"{name} holds a NUL character", at=at, how="remove it; the text is probably damaged"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{name} has half a surrogate pair, which is not a character"
            how = "the text was cut inside a character; repair or remove the row"
            raise row.broken(what, at=at, how=how) from error
    return value


def flag_of(row: Row, value: object, name: str, at: str = "") -> bool:
    """Whether to train, as `train: false` or `weight: 0` say; a weight between the two is
    refused.
    """
    # of arrays and tensors, in rows from memory
    value = value.item() if hasattr(value, "item") else value
    flag = value.lower() if isinstance(value, str) else value
    if not isinstance(flag, (bool, int, float, str)) or flag not in _YES_OR_NO:
        what = f"{name} marks what to train on, and should be true or false, 1 or 0, not {value!r}"
        raise row.broken(what, at=at, how="weights between 0 and 1 do not work here")
    return _YES_OR_NO[flag]


def num_alike(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


DEFAULT_LENGTH = 1024  # tokens; what TRL cuts at


def num_positions(config: "PreTrainedConfig", settings: LemaConfig | None = None) -> int | None:
    """Return the most tokens that a model takes at once, as the config of its text part says;
    None: any number.

    Args:
        config: of the model.
        settings: of a run. Rotary embeddings have a value for every position, so rows may be as
            long as `max_length` says, or as `rope_parameters` reach.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # -1 is how some configs say that there is no limit
    if positions is None or positions < 1:
        return None
    if settings is None or not getattr(text, "rope_parameters", None):
        return int(positions)
    override = settings.rope_parameters or {}
    kinds = [kind for kind in override.values() if isinstance(kind, dict)] or [override]
    reaches = [_reach(kind, int(positions)) for kind in kinds]
    return max(int(positions), settings.max_length or 0, *reaches)


def _reach(rope: Mapping[str, Any], positions: int) -> int:
    """Return the positions that rotary parameters are made for."""
    original = rope.get("original_max_position_embeddings") or positions
    factor = rope.get("factor") or 1
    return int(factor * original) if isinstance(factor, int | float) else positions


def beyond_positions(config: "PreTrainedConfig", settings: LemaConfig) -> list[str]:
    """Say that rows may be longer than a model was made for, with nothing set for that; empty: they
    are not, or something is.

    Args:
        config: of the model.
        settings: of the run.
    """
    positions = num_positions(config)
    length = settings.max_length
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if settings.rope_parameters is not None or not (rope and positions and length):
        return []
    if length <= positions:
        return []
    return [
        f"max_length is {length:,}, and the model was made for {positions:,} positions "
        "(max_position_embeddings): later ones are new to it; rope_parameters, such as "
        "{rope_type: yarn, factor: "
        f"{length / positions:.3g}"
        "}, make it read longer rows"
    ]


def longest_row(max_length: int | None, positions: int | None) -> int:
    """Return the most tokens a row may have: as `max_length`, else 1024, or the model's `positions`
    where they are fewer (None: any number). `ConfigError`: the model takes fewer than asked for."""
    if positions is None:
        return max_length or DEFAULT_LENGTH
    if max_length is not None and max_length > positions:
        what = f"the model has {positions} positions, fewer than max_length: {max_length}"
        raise ConfigError(
            what, where="max_length", how=f"set max_length to {positions} or less, or leave it out"
        )
    return max_length or min(DEFAULT_LENGTH, positions)
