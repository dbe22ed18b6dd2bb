"""Which of TRL's trainers a file or a command line is for; a file alone does not say so."""

from collections.abc import Mapping
from pathlib import PurePath

from lema.errors import ConfigError
from lema_tools.importing.translation import DefaultsTable, ForeignRun

__all__ = ["DEFAULTS", "KINDS", "kind_of", "words_of_trl"]

DEFAULTS = DefaultsTable("trl")
KINDS = ("sft", "dpo", "kto", "reward", "grpo")
"""The kinds of run with a script in TRL that this importer tells apart."""

FILES = {f"{kind}.py": kind for kind in KINDS}
"""TRL's scripts, as `python trl/scripts/sft.py` names them."""

OTHER_SCRIPTS = ("rloo", "distillation")


def words_of_trl(run: ForeignRun) -> list[str]:
    """Return the words of a command line that name TRL or one of its scripts."""
    names = [PurePath(word).name for word in run.words]
    return [
        name
        for word, name in zip(run.words, names, strict=True)
        if name == "trl" or (name in FILES and ("trl" in word or "examples" in word))
    ]


def kind_of(run: ForeignRun) -> str:
    """Return the kind of a run: what the caller says, what the command line says, or the only
    kind that has all keys of the file.

    Raises:
        ConfigError: the kind is unclear, or one that this importer does not know.
    """
    spoken = [FILES.get(PurePath(word).name, word) for word in run.words]
    words = [word for word in spoken if word in (*KINDS, *OTHER_SCRIPTS)]
    kind = run.objective or (words[0] if words else None)
    if kind in KINDS:
        return kind
    if kind is not None:
        how = f"use one of {', '.join(KINDS)}"
        raise ConfigError(f"LEMA has no importer for TRL's {kind}", where="--objective", how=how)
    votes = _kinds_by_keys(run.values)
    if len(votes) == 1:
        return votes[0]
    what = (
        "the file has keys of " + " and of ".join(votes)
        if votes
        else "TRL's files do not say what they are for, and no key here is one of a single trainer"
    )
    how = "say it with --objective sft, dpo, kto, reward or grpo"
    raise ConfigError(what, where="--objective", how=how)


def _kinds_by_keys(values: Mapping[str, object]) -> list[str]:
    """Return the kinds with a key of their own among these."""
    tables = {kind: set(DEFAULTS.of(kind)) for kind in KINDS}
    voted = []
    for kind, keys in tables.items():
        others = set[str]().union(*(table for name, table in tables.items() if name != kind))
        if values.keys() & (keys - others):
            voted.append(kind)
    if not voted and "beta" in values and isinstance(values.get("loss_type"), str | list):
        voted = ["kto"] if values["loss_type"] in ("kto", "apo_zero_unpaired") else ["dpo"]
    return voted
