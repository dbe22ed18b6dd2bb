"""What LLaMA-Factory makes of a row: its text by the template, its length, its packs, and the
tokens that train.
"""

from collections.abc import Sequence

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.llamafactory.datasets import DataSource
from lema_tools.importing.llamafactory.templates import Format, chat_template, formats

__all__ = ["rows"]

OF_TEMPLATES = ("default_system", "enable_thinking", "preserve_thinking", "tool_format")
UNNAMED = {"dbrx": "its default system message", "moss_vl": "rows with images"}
"""Templates whose format is not in the table, and why."""


def rows(ledger: Ledger, sources: Sequence[DataSource]) -> None:
    """Translate templates, lengths, packing, and which tokens are trained on."""
    _lengths(ledger)
    if ledger["stage"] == "pt":
        _texts(ledger)
    else:
        _template(ledger, sources)
        _trained(ledger)
    if ledger["ignore_pad_token_for_loss"] is False:
        ledger.lost("ignore_pad_token_for_loss", "LEMA does not train on padding")
    else:
        ledger.same("ignore_pad_token_for_loss", "padding is not trained on")


def _lengths(ledger: Ledger) -> None:
    """Carry the longest row, and packing.

    LLaMA-Factory takes one token off where rows are packed because it pads packs to a multiple of
    8 afterwards.
    """
    stage = ledger["stage"]
    packing = True if ledger["neat_packing"] else ledger["packing"]
    length = int(ledger["cutoff_len"]) - bool(packing)
    positions = ledger.model_config.get("max_position_embeddings")
    longest = length if ledger["rope_scaling"] else min(length, positions or length)
    if stage != "pt":
        ledger.put(max_length=longest, overlong="error")
        what = (
            f"max_length: {longest}, overlong: error; of a longer row LLaMA-Factory shortens "
            "question and answer in proportion, and LEMA refuses it before the first step: "
            "`lema data` counts such rows, and overlong: truncate cuts their ends"
        )
        ledger.differs("cutoff_len", what, changes_numbers=False)
    elif longest < length:
        ledger.put(max_length=longest, overlong="truncate")
        ledger.differs("cutoff_len", f"max_length: {longest}, the positions of the model")
    else:
        ledger.put(overlong="truncate")
        ledger.carry("cutoff_len", "max_length", longest)
    if stage == "pt" and packing is None:
        packing = True
    if stage in ("dpo", "kto") or not packing:
        ledger.put(packing=False)
        ledger.same("packing", "packing: False")
        ledger.same("neat_packing", "packing: False")
        return
    ledger.put(packing="wrapped" if stage == "pt" else True)
    key = "neat_packing" if ledger["neat_packing"] and stage != "pt" else "packing"
    if stage == "pt":
        what = (
            "packing: wrapped; rows of a pack do not see each other in LEMA, and LLaMA-Factory "
            f"drops what is left of each {ledger['preprocessing_batch_size']} texts"
        )
    elif key == "neat_packing":
        what = "packing: true keeps rows apart, too, but fills packs with other rows"
    else:
        what = (
            "packing: true; rows of a pack see each other in LLaMA-Factory unless neat_packing is "
            "set, and its packs hold other rows"
        )
    ledger.differs(key, what)
    ledger.same("neat_packing" if key == "packing" else "packing", f"see {key}")


def _texts(ledger: Ledger) -> None:
    """Carry raw text, each with the end-of-sequence token, and all of it trained on."""
    ledger.put(train_on="all", chat_template=None)
    if ledger["template"] == "llama3":
        what = (
            "LLaMA-Factory ends texts with <|end_of_text|> for this template: LEMA ends them with "
            "the tokenizer's eos_token, which base models have as that"
        )
        ledger.differs("template", what, changes_numbers=False)
    else:
        ledger.same("template", "texts are not rendered by a template, in both")
    for key in (*OF_TEMPLATES, "train_on_prompt", "mask_history"):
        ledger.same(key, "of chats alone")


def _template(ledger: Ledger, sources: Sequence[DataSource]) -> None:
    """Carry the template by its name, as Jinja.

    Raises:
        ConfigError: LLaMA-Factory has no template of that name.
    """
    name = ledger["template"]
    if name is None:
        ledger.put(chat_template=None)
        what = (
            "without a template LLaMA-Factory takes the tokenizer's apart and puts it together "
            "again; LEMA renders the tokenizer's own: name a template there"
        )
        ledger.differs("template", what)
    elif name in UNNAMED:
        ledger.put(chat_template=None)
        ledger.lost("template", f"LEMA has not {UNNAMED[name]}: give chat_template yourself")
    elif name not in formats():
        what = f"LLaMA-Factory has no template {name!r}"
        raise ConfigError(what, where="template", how=_alike(name))
    else:
        _named(ledger, name, sources)
    for key in OF_TEMPLATES:
        if key not in ledger.settled():
            ledger.same(key, "in chat_template")


def _alike(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, formats(), 3)
    return f"did you mean {' or '.join(close)}?" if close else "see its README for the names"


def _named(ledger: Ledger, name: str, sources: Sequence[DataSource]) -> None:
    form = Format.named(name)
    preserves = bool(ledger["preserve_thinking"])
    pairs = ledger["stage"] in ("dpo", "kto")
    last = (pairs or bool(ledger["mask_history"])) and not preserves
    text = chat_template(
        form,
        default_system=ledger["default_system"],
        thinks=ledger["enable_thinking"],
        last_thought_only=last and bool(form.thought),
    )
    ledger.put(chat_template=text)
    several_turns = any(source.may_have_turns for source in sources)
    if form.efficient_eos and several_turns and not pairs:
        what = (
            f"chat_template: the text of {name}; but in chats of several turns LLaMA-Factory makes "
            "the end-of-sequence token the target where the next question begins, and LEMA that "
            "question's first token"
        )
        ledger.differs("template", what)
    else:
        ledger.translation.same["template"] = f"chat_template: the text and masks of {name}"
    if form.efficient_eos and ledger["train_on_prompt"]:
        what = f"LLaMA-Factory's template {name} does not take it"
        raise ConfigError(what, where="train_on_prompt", how="leave it out")
    if ledger["tool_format"]:
        tools = any(source.has_tools for source in sources)
        what = "the chat template shows no tools: give chat_template, such as the model's own"
        ledger.lost("tool_format", what, changes_numbers=tools)


def _trained(ledger: Ledger) -> None:
    prompts, last = bool(ledger["train_on_prompt"]), bool(ledger["mask_history"])
    if prompts and last:
        what = "mask_history and train_on_prompt exclude each other"
        raise ConfigError(what, where="mask_history", how="take one of them")
    if prompts:
        ledger.carry("train_on_prompt", "train_on", "all")
        ledger.same("mask_history", "no")
    elif last:
        ledger.carry("mask_history", "train_on", "last")
        ledger.same("train_on_prompt", "no")
    else:
        ledger.put(train_on="assistant")
        ledger.same("train_on_prompt", "train_on: assistant")
        ledger.same("mask_history", "train_on: assistant")
