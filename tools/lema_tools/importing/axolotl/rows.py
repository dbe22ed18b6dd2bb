"""How axolotl writes the rows of one data set as text, by its `type`."""

from collections.abc import Mapping
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.axolotl.templates import template_of
from lema_tools.importing.ledger import Ledger

__all__ = ["rows"]

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
STYLES = {
    "instruct": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}
"""Texts of Alpaca's rows by axolotl's styles: of the system, with an input, and without."""
Rendering = tuple[dict[str, Any], set[str]]


def rows(ledger: Ledger, entry: Mapping[str, Any], where: str) -> Rendering:
    """Return the settings of one data set, and which of its keys they settle.

    Raises:
        ConfigError: axolotl has dropped the type.
    """
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        return _user_defined(ledger, kind, where)
    name, _, style = str(kind or "").partition(":")
    if name.partition(".")[0] == "sharegpt":
        what = "axolotl has no type sharegpt any more"
        how = (
            "write type: chat_template with message_property_mappings {role: from, content: value}"
        )
        raise ConfigError(what, where=f"{where}.type", how=how)
    if name == "chat_template" or name.startswith("chat_template."):
        return _chat(ledger, entry, where)
    if name == "alpaca" and (style or "instruct") in STYLES:
        return _alpaca(ledger, style or "instruct"), {"type"}
    if name == "completion":
        what = "LEMA handles texts longer than sequence_len by overlong; axolotl makes several rows"
        ledger.differs(f"{where}.type", what)
        return {"columns": {"text": entry.get("field") or "text"}}, {"type", "field"}
    ledger.lost(f"{where}.type", f"LEMA does not write rows as axolotl's type {kind}")
    return {}, {"type"}


def _trained(ledger: Ledger) -> dict[str, Any]:
    return {"train_on": "all" if ledger["train_on_inputs"] else "assistant"}


def _alpaca(ledger: Ledger, style: str) -> dict[str, Any]:
    system, with_input, without_input = STYLES[style]
    prompt = system.replace("{system}", WITH_INPUT) + with_input
    plain = system.replace("{system}", WITHOUT_INPUT) + without_input
    form = {"prompt": prompt, "without_input": plain, "separate": True}
    return {"row_format": form, **_trained(ledger)}


def _user_defined(ledger: Ledger, kind: Mapping[str, Any], where: str) -> Rendering:
    """Return how rows are written by texts of the user's."""
    if ledger["rl"]:
        ledger.lost(f"{where}.type", "LEMA writes pairs by a chat template, and by no text")
        return {}, {"type"}
    columns = {
        name: kind[f"field_{name}"]
        for name in ("system", "instruction", "input", "output")
        if kind.get(f"field_{name}")
    }
    system = ""
    settings: dict[str, Any] = {"columns": columns} if columns else {}
    if kind.get("system_prompt") or kind.get("field_system"):
        system = kind.get("system_format") or "{system}"
        settings["system_prompt"] = kind.get("system_prompt") or None
    settings["row_format"] = {
        "prompt": system + (kind.get("format") or "{instruction} {input} "),
        "without_input": system + (kind.get("no_input_format") or "{instruction} "),
        "separate": True,
    }
    return {**settings, **_trained(ledger)}, {"type"}


def _chat(ledger: Ledger, entry: Mapping[str, Any], where: str) -> Rendering:
    """Return how chats are read: their fields, roles, template, and which messages train."""
    settings: dict[str, Any] = {}
    columns = _columns(ledger, entry)
    if columns:
        settings["columns"] = columns
    if entry.get("roles"):
        settings["roles"] = {role: list(names) for role, names in entry["roles"].items()}
    if entry.get("drop_system_message"):
        settings["drop_system_messages"] = True
    template = template_of(ledger, entry, where)
    if template is not None:
        settings["chat_template"] = template
    if ledger["rl"]:
        what = (
            "axolotl cuts off blanks behind the token that ends an answer, and writes eos_token "
            "there if it is another one; LEMA has pairs as the chat template writes them"
        )
        ledger.differs(f"{where}.type", what)
    else:
        settings["train_on"] = "contents"
        if ledger["eot_tokens"] is not None:
            settings["eot_tokens"] = list(ledger["eot_tokens"])
        if ledger["train_on_inputs"]:
            what = "LEMA trains the contents of answers, or whole chats, and not those of questions"
            ledger.lost("train_on_inputs", what)
    _training(ledger, entry, where)
    return settings, {
        *("type", "field_messages", "field_chosen", "field_rejected", "field_system"),
        *("field_tools", "message_property_mappings", "message_field_role"),
        *("message_field_content", "roles", "drop_system_message", "chat_template"),
        *("chat_template_jinja", "roles_to_train", "train_on_eos", "train_on_eot"),
        *("message_field_training", "message_field_training_detail"),
    }


def _columns(ledger: Ledger, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return names of columns and fields by LEMA's names."""
    mappings = dict(entry.get("message_property_mappings") or {})
    messages = "prompt" if ledger["rl"] else "messages"
    names = {
        messages: entry.get("field_messages") or "messages",
        "chosen": entry.get("field_chosen"),
        "rejected": entry.get("field_rejected"),
        "system": entry.get("field_system"),
        "tools": entry.get("field_tools"),
        "role": entry.get("message_field_role") or mappings.pop("role", None),
        "content": entry.get("message_field_content") or mappings.pop("content", None),
    }
    if str(entry.get("type")).endswith(".argilla"):
        del names[messages]
    return {name: column for name, column in names.items() if column and column != name}


def _training(ledger: Ledger, entry: Mapping[str, Any], where: str) -> None:
    """Note which messages train where LEMA has it otherwise."""
    roles = entry.get("roles_to_train")
    if roles is not None and list(roles) not in (["assistant"], ["gpt"]):
        ledger.lost(f"{where}.roles_to_train", "LEMA trains on the assistant's messages, or on all")
    if entry.get("train_on_eos", "turn") != "turn" or entry.get("train_on_eot"):
        what = "LEMA trains the token that ends each answer, and no others"
        ledger.lost(f"{where}.train_on_eos", what)
    if entry.get("message_field_training") not in (None, "train", "training", "weight"):
        what = "LEMA reads train, training and weight of a message: rename the field"
        ledger.lost(f"{where}.message_field_training", what)
    if entry.get("message_field_training_detail"):
        what = "LEMA trains whole messages, and no parts of them"
        ledger.lost(f"{where}.message_field_training_detail", what)
    extra = (entry.get("message_property_mappings") or {}).keys() - {"role", "content"}
    if extra:
        what = f"LEMA has names for role and content of a message, and none for {sorted(extra)}"
        ledger.lost(f"{where}.message_property_mappings", what)
