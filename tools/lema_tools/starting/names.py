"""The models that a name may mean: those known offline, and those in the hub's cache."""

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cached_ids", "meant_models", "where_to_look"]

MOST = 3  # that are named
NEAR = 0.2  # by how much less the others are like it than the first
LIKE = 0.6  # how much two names have in common, of 1, so that one may mean the other


def cached_ids() -> list[str]:
    """Return the ids of the models in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    folders = cache.glob("models--*--*/snapshots") if cache.is_dir() else []
    names = (folder.parent.name.removeprefix("models--") for folder in folders)
    return sorted(name.replace("--", "/", 1) for name in names)


def known_ids() -> list[str]:
    """Return the hub ids of the checkpoints whose sizes are known offline, as in
    docs/coverage.md."""
    from lema_tools.models.checkpoints import CHECKPOINTS

    return [checkpoint.hub_id for checkpoint in CHECKPOINTS]


def meant_models(name: str, ids: Iterable[str] | None = None) -> list[str]:
    """Return the ids that a name may mean, the likeliest first; none: it is like none.

    Args:
        name: what was typed.
        ids: the ids to choose from; None: those in the cache and those known offline.
    """
    choices = list(dict.fromkeys([*cached_ids(), *known_ids()] if ids is None else ids))
    typed = _plain(name)
    owned = "/" in name
    likeness: dict[str, float] = {}
    for choice in choices:
        compared = _plain(choice if owned else choice.rpartition("/")[2])
        begins = typed and compared.startswith(typed)
        ratio = difflib.SequenceMatcher(None, typed, compared).ratio()
        likeness[choice] = 1 + ratio if begins else ratio
    likely = sorted(choices, key=lambda choice: -likeness[choice])
    least = max(LIKE, likeness[likely[0]] - NEAR) if likely else LIKE
    return [choice for choice in likely if likeness[choice] >= least][:MOST]


def where_to_look(name: str) -> str:
    """Return a sentence on which model may be meant, and where the names are."""
    meant = meant_models(name)
    question = f"did you mean {' or '.join(meant)}? " if meant else ""
    cached = cached_ids()
    shown = f" ({', '.join(cached[:MOST])}{', ...' * (len(cached) > MOST)})" if cached else ""
    return (
        f"{question}MODEL is a directory with config.json, a hub id in the cache{shown}, or a name "
        "of docs/coverage.md; `hf download ORG/NAME` fetches another one"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "/")
