"""The chat template of one of axolotl's data sets."""

from collections.abc import Mapping
from typing import Any

from lema_tools.importing.ledger import Ledger

__all__ = ["template_of"]

NAMED = frozenset(
    {
        "alpaca",
        "chatml",
        "llama3",
        "gemma",
        "gemma3",
        "phi_3",
        "phi_35",
        "mistral_v1",
        "mistral_v2v3",
        "mistral_v3_tekken",
        "deepseek_v2",
        "deepseek_v3",
        "cohere",
        "falcon_h1",
        "qwen_25",
        "qwen3",
    }
)
"""Templates that LEMA has under axolotl's name, with the same text of chats that train."""
FALLBACK = "tokenizer_default_fallback_"


def template_of(ledger: Ledger, entry: Mapping[str, Any], where: str) -> str | None:
    """Return a name, a file or a text; None: the tokenizer's own.

    Args:
        ledger: the run.
        entry: the data set, whose template has precedence over the run's.
        where: the data set, for notes.
    """
    key = f"{where}.chat_template" if entry.get("chat_template") else "chat_template"
    name = entry.get("chat_template") or ledger["chat_template"]
    jinja = entry.get("chat_template_jinja") or ledger["chat_template_jinja"]
    if jinja and name in (None, "jinja"):
        return str(jinja)
    if name in (None, "tokenizer_default"):
        return None
    if str(name).startswith(FALLBACK):
        what = f"LEMA takes the tokenizer's template; if it has none, write {name[len(FALLBACK) :]}"
        ledger.differs(key, what)
        return None
    if name not in NAMED:
        what = f"LEMA has no template {name}: leave it out for the tokenizer's, or name a file"
        ledger.lost(key, what)
        return None
    if name == "qwen3" and not ledger["rl"]:
        what = (
            "chat_template: qwen3; of chats with several answers axolotl trains the words of each, "
            "and LEMA may miss those of all but the last"
        )
        ledger.differs(key, what)
    return str(name)
