"""The problems of the settings a user gave: all of them at once, in plain words, with the nearest right name."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lema.config.peft import SETTING_OF
from lema.errors import ConfigError

__all__ = ["Contradiction", "Problem", "SettingsError", "nearest", "problems_of", "unknown_setting"]


# Names other trainers use for the same thing, where spelling alone would not lead a newcomer there.
_ELSEWHERE = {
    **SETTING_OF,
    "alpha": "lora_alpha",
    "base_model": "model_name_or_path",
    "dataset": "train_data",
    "datasets": "train_data",
    "epochs": "num_train_epochs",
    "gradient_clipping": "max_grad_norm",
    "lora_r": "lora_rank",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "num_epochs": "num_train_epochs",
    "per_device_train_batch_size": "batch_size",
    "rank": "lora_rank",
    "sequence_len": "max_length",
    "torch_dtype": "dtype",
    "val_set_size": "eval_split",
}

# What is asked for in another place.
_NO_SETTINGS = {"trust_remote_code": "a file must not say what code is run; give --trust-remote-code with the command"}

# Likeness below which a name is not offered, and how far below the best still counts as about as close.
_LIKE, _TIE = 0.5, 0.1

_NOUNS = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
}

_EMPTY = "not empty"

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class Problem:
    """One setting that is wrong.

    Args:
        key: the setting as the user wrote it; empty where the problem lies between settings.
        what: what is wrong with it.
        how: what to write instead; may be empty.
        place: `file:line`, once known.
    """

    key: str
    what: str
    how: str = ""
    place: str = ""

    def __str__(self) -> str:
        head = f"{self.place}: " if self.place else ""
        return head + self.what + (f" ({self.how})" if self.how else "")


class Contradiction(ValueError):
    """One setting contradicts another; raised where settings are checked together.

    Args:
        key: the setting to say it of.
        what: what is wrong, and how to mend it.
    """

    def __init__(self, key: str, what: str) -> None:
        self.key = key
        super().__init__(what)


class SettingsError(ConfigError):
    """One or more settings are wrong; `problems` holds each of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            only = self.problems[0]
            super().__init__(only.what, where=only.place or only.key, how=only.how)
        else:
            listed = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} settings are wrong:{listed}")

    def located(self, places: Mapping[str, str]) -> "SettingsError":
        """The same problems, with the place of every key that `places` knows."""
        return SettingsError([replace(p, place=places.get(p.key, p.place)) for p in self.problems])


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names spelt like `name`, the likeliest first."""
    known = list(known)
    lowered = name.lower().replace("-", "_")
    if (meant := _ELSEWHERE.get(lowered)) in known:
        return [meant]
    likeness = {one: _likeness(lowered, one) for one in known}
    ranked = sorted(known, key=lambda one: -likeness[one])[:3]
    # One clear winner is offered alone; names about as close are offered with it.
    return [one for one in ranked if likeness[one] >= max(_LIKE, likeness[ranked[0]] - _TIE)]


def _likeness(one: str, other: str) -> float:
    """0 to 1. Half counts letters in order, half whatever their order: swapped letters are a common slip."""
    compared = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return (compared.ratio() + compared.quick_ratio()) / 2


def unknown_setting(key: str, known: Iterable[str]) -> Problem:
    """The problem of a key that is no setting, with the nearest names."""
    if how := _NO_SETTINGS.get(key):
        return Problem(key, f"unknown setting {key!r}", how)
    near = nearest(key, known)
    how = f"did you mean {_listed(near)}?" if near else "`lema config schema` lists every setting"
    return Problem(key, f"unknown setting {key!r}", how)


def problems_of(error: ValidationError, defaults: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's complaints, one problem per setting, in the order the settings were checked.

    Args:
        error: what pydantic raised.
        defaults: every setting's default by name; the keys are the known names.
    """
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key(detail), []).append(detail)
    return [_problem(key, details, defaults) for key, details in by_key.items()]


def _key(detail: ErrorDetails) -> str:
    error = detail.get("ctx", {}).get("error")
    return str(detail["loc"][0]) if detail["loc"] else error.key if isinstance(error, Contradiction) else ""


def _problem(key: str, details: list[ErrorDetails], defaults: Mapping[str, Any]) -> Problem:
    kinds = {detail["type"] for detail in details}
    first = details[0]
    if "extra_forbidden" in kinds:
        return unknown_setting(key, defaults)
    if "missing" in kinds:
        return Problem(key, f"{key} is not given", f"add `{key}: ...`")
    if first["input"] is None and "value_error" not in kinds:
        return Problem(key, f"{key} is empty", f"leave it out for the default, {defaults.get(key)!r}")
    # A value that fits one form of a setting but breaks its bounds is more telling than the forms it does not fit.
    telling = [detail for detail in details if detail["type"] not in _NOUNS] or details
    what = " or ".join(dict.fromkeys(_demand(detail) for detail in telling))
    given = first["input"]
    near = nearest(given, _choices(telling)) if isinstance(given, str) else []
    how = f"did you mean {_listed(near)}?" if near else ""
    if "value_error" in kinds:
        named = what.startswith(key) or not first["loc"]
        return Problem(key, f"{key} {what}" if what.startswith("must") else what if named else f"{key}: {what}")
    if what == _EMPTY:
        return Problem(key, f"{key} is empty", "leave it out for the default")
    return Problem(key, f"{key} must be {what}, not {given!r}", how)


def _demand(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind == "finite_number":
        return "finite"
    if kind in ("string_too_short", "too_short"):
        return _EMPTY
    noun = _NOUNS.get(kind, detail["msg"])
    if detail["loc"][-1] == "[key]":  # of a mapping
        return f"named by {noun}"
    # Inside a list: ("lora_target_modules", "list[str]", 0)
    return f"a list of {noun}" if isinstance(detail["loc"][-1], int) else noun


def _choices(details: Iterable[ErrorDetails]) -> list[str]:
    """The words a literal setting allows, from pydantic's `'a', 'b' or 'c'`."""
    expected = (str(d.get("ctx", {}).get("expected", "")) for d in details if d["type"] == "literal_error")
    return [word.strip("' ") for text in expected for word in text.replace(" or ", ", ").split(",")]


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names)
