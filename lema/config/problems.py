"""The problems of the settings a user gave: all of them at once, in plain words, with the
nearest right name.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lema.config.foreign import CALLED_HERE, FOREIGN_HINTS
from lema.config.peft import SETTING_OF
from lema.errors import ConfigError, listed

# Names that other trainers, and other settings here, use for the same thing, where spelling alone
# would not lead a newcomer there. Of the settings that are meant the first is offered that there is
# where the name stands.
_MEANT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("batch_size",), "global_batch global_batch_size per_device_train_batch_size"),
    (("block_size",), "max_length"),
    (("decay_ratio", "decay_pct"), "decay"),
    (("decay_ratio",), "decay_pct"),
    (("eval_data",), "held_out"),
    (("lora_alpha",), "alpha"),
    (("lora_rank", "rank"), "r"),
    (("lora_rank",), "lora rank"),
    (("lora_target_modules", "target_modules"), "targets"),
    (("lr",), "learning_rate"),
    (("lr_scheduler_type", "schedule"), "lr_scheduler schedule_type scheduler"),
    (("lr_scheduler_type",), "schedule"),
    (("max_grad_norm",), "gradient_clipping"),
    (
        ("max_length", "block_size"),
        "block max_seq_len max_seq_length seq_len sequence_len sequence_length",
    ),
    (("max_length",), "block_size"),
    (("micro_batch_size",), "per_device_batch_size"),
    (("mixture", "datasets"), "train_data"),
    (("mixture", "train_data"), "samplings"),
    (("rate",), "proportion ratio weight"),
    (("schedule",), "lr_scheduler_type"),
    (("tail_ratio", "constant_pct"), "tail"),
    (("tail_ratio",), "constant_pct"),
    (("train_data", "mixture", "datasets"), "data dataset"),
    (("train_data", "mixture"), "datasets"),
    (("trains",), "kind mode train type"),
    (("warmup_pct",), "warmup_ratio"),
    (("warmup_ratio", "warmup_pct"), "warmup"),
    (("warmup_ratio",), "warmup_pct"),
)
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    **{name: (ours,) for name, ours in CALLED_HERE.items()},
    **{option: (setting, option) for option, setting in SETTING_OF.items()},
    **{name: settings for settings, names in _MEANT for name in names.split()},
}

# Likeness below which a name is not offered, and how far below the best still counts as about as
# close.
_LIKE = 0.5
_TIE = 0.1

# Names that a message may list.
_FEW = 12

_NOUNS = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
    "string_unicode": "text of whole characters",
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
    """One setting that is wrong."""

    key: str  # the setting as the user wrote it; empty where the problem lies between settings
    what: str  # what is wrong with it
    how: str = ""  # what to write instead; may be empty
    location: str = ""  # `file:line`, once known

    def __str__(self) -> str:
        head = f"{self.location}: " if self.location else ""
        return head + self.what + (f" ({self.how})" if self.how else "")


class Several(ValueError):
    """What a validator has found wrong: problems whose keys are as seen from the settings that
    it validates.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


class SettingsError(ConfigError):
    """One or more settings are wrong; `problems` holds each of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            only = self.problems[0]
            super().__init__(only.what, where=only.location or only.key, how=only.how)
        else:
            super().__init__(
                f"{len(self.problems)} settings are wrong:{listed([*map(str, self.problems)])}"
            )

    def located(self, locations: Mapping[str, str], outside: Iterable[str] = ()) -> "SettingsError":
        """Return the same problems, each with its place in a file: that of its key, or else of the
        settings around it. `locations` are `file:line` by path (`phases[1].tokens`), that of "" the
        file; those `outside` are not in it."""
        problems = []
        elsewhere = set(outside)
        for problem in self.problems:
            key = problem.key
            if key and key.partition(".")[0].partition("[")[0] in elsewhere:
                problems.append(problem)
                continue
            while key and key not in locations:
                key = key[: max(key.rfind("."), key.rfind("["), 0)]
            problems.append(replace(problem, location=locations.get(key, problem.location)))
        return SettingsError(problems)


def problem_at(key: str, what: str, how: str) -> Problem:
    """Return a problem whose sentence begins with the path of its setting, because several
    phases have one of it.
    """
    return Problem(key, f"{key}: {what}", how)


def prefixed(problem: Problem, path: str) -> Problem:
    """Return a problem of nested settings with its name from outside; `path` leads to those
    settings.
    """
    if not path:
        return problem
    key = _joined(path, problem.key)
    head = problem.what.partition(": ")[0]  # a path of the problem already, or its words
    begins = problem.key and (
        problem.what.startswith(problem.key) or problem.key.startswith((f"{head}.", f"{head}["))
    )
    what = _joined(path, problem.what) if begins else f"{path}: {problem.what}"
    return replace(problem, key=key, what=what)


def _joined(path: str, suffix: str) -> str:
    return path + suffix if not suffix or suffix.startswith("[") else f"{path}.{suffix}"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Up to three known names spelt like `name`, the likeliest first."""
    names = list(names)
    lowered = name.lower().replace("-", "_")
    if meant := [candidate for candidate in _ELSEWHERE.get(lowered, ()) if candidate in names]:
        return meant[:1]
    likeness = {}
    for candidate in names:
        # Half counts letters in order, half whatever their order, because swapped letters are a
        # common slip.
        compared = difflib.SequenceMatcher(None, lowered, candidate, autojunk=False)
        likeness[candidate] = (compared.ratio() + compared.quick_ratio()) / 2
    ranked = sorted(names, key=lambda candidate: -likeness[candidate])[:3]
    # One clear winner is offered alone; names about as close are offered with it.
    return [
        candidate
        for candidate in ranked
        if likeness[candidate] >= max(_LIKE, likeness[ranked[0]] - _TIE)
    ]


def meant(name: str, names: Iterable[str]) -> str:
    """Return a question whether the nearest of the known names is meant; empty where none is
    near.
    """
    near = nearest(name, names)
    return f"did you mean {' or '.join(near)}?" if near else ""


def unknown_setting(key: str, names: Iterable[str]) -> Problem:
    """The problem of a key that is no setting, with the nearest names."""
    if how := FOREIGN_HINTS.get(key.lower().replace("-", "_")):
        return Problem(key, f"unknown setting {key!r}", how)
    names = list(names)
    if "device" in names:
        listed = "`lema config schema` lists every setting"
    else:
        listed = (
            f"there are {', '.join(names)}"
            if len(names) <= _FEW
            else "docs/phases.md lists every setting"
        )
    return Problem(key, f"unknown setting {key!r}", meant(key, names) or listed)


def problems_of(error: ValidationError, defaults: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's complaints, those of settings inside settings too: one problem per setting, in the
    order of checking. A path is written as in Python: `phases[1].mixture[0].rate`. The keys of
    `defaults` are the known settings."""
    by_path: dict[str, list[Problem]] = {}
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        loc = detail["loc"]
        if isinstance(cause, Several):
            path = "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc
            ).removeprefix(".")
            by_path.setdefault(path, []).extend(
                prefixed(problem, path) for problem in cause.problems
            )
        else:
            key = str(loc[0]) if loc else ""
            by_path.setdefault(key, [])
            by_key.setdefault(key, []).append(detail)
    for key, details in by_key.items():
        by_path[key].append(_problem(key, details, defaults))
    return [problem for problems in by_path.values() for problem in problems]


def _problem(key: str, details: list[ErrorDetails], defaults: Mapping[str, Any]) -> Problem:
    kinds = {detail["type"] for detail in details}
    first = details[0]
    if "extra_forbidden" in kinds:
        return unknown_setting(key, defaults)
    if "missing" in kinds:
        return Problem(key, f"{key} is not given", f"add `{key}: ...`")
    if first["input"] is None and "value_error" not in kinds:
        return Problem(
            key, f"{key} is empty", f"leave it out for the default, {defaults.get(key)!r}"
        )
    # A value that fits one form of a setting but breaks its bounds is more telling than the forms
    # it does not fit.
    telling = [detail for detail in details if detail["type"] not in _NOUNS] or details
    what = " or ".join(dict.fromkeys(_demand(detail) for detail in telling))
    input_value = first["input"]
    # The words a literal setting allows, from pydantic's `'a', 'b' or 'c'`.
    allowed = [
        str(detail.get("ctx", {}).get("expected", ""))
        for detail in telling
        if detail["type"] == "literal_error"
    ]
    words = [word.strip("' ") for text in allowed for word in text.replace(" or ", ", ").split(",")]
    how = meant(input_value, words) if isinstance(input_value, str) else ""
    if "value_error" in kinds:
        named = what.startswith(key) or not first["loc"]
        return Problem(
            key, f"{key} {what}" if what.startswith("must") else what if named else f"{key}: {what}"
        )
    if what == _EMPTY:
        return Problem(key, f"{key} is empty", "leave it out for the default")
    return Problem(key, f"{key or 'a setting'} must be {what}, not {input_value!r}", how)


def _demand(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
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
    # no place: the name of a setting has half a character
    last = detail["loc"][-1] if detail["loc"] else "[key]"
    if last == "[key]":  # of a mapping
        return f"named by {noun}"
    # Inside a list: ("lora_target_modules", "list[str]", 0)
    return f"a list of {noun}" if isinstance(last, int) else noun
