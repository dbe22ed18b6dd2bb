"""What TRL makes of a row of data: its text, its length, its packs, and the tokens that train."""

from pathlib import Path

from lema_tools.importing.trl.ledger import Ledger

__all__ = ["rows"]

MARK = "{% generation"
"""How a template begins that says itself what an assistant wrote; or with a minus sign."""


def rows(ledger: Ledger) -> None:
    """Translate columns, templates, lengths, packing, and which tokens are trained on."""
    _length(ledger)
    _padding(ledger)
    if ledger.kind != "sft":
        return
    field = ledger["dataset_text_field"]
    if field != "text":
        ledger.carry("dataset_text_field", "columns", {"text": field})
    else:
        ledger.same("dataset_text_field", "the column text")
    _packing(ledger)
    _template(ledger)
    _trained(ledger)


def _length(ledger: Ledger) -> None:
    length = ledger["max_length"]
    config = ledger.model_config
    positions = config.get("text_config", config).get("max_position_embeddings")
    if length is None and positions is None:
        what = "TRL cuts no row; set max_length to the positions that the model's config has"
        ledger.lost("max_length", what)
    elif length is None or (
        length > (positions or length) and "rope_parameters" not in ledger.translation.settings
    ):
        ledger.put(max_length=positions)
        what = f"max_length: {positions}, the model's positions; TRL also computes longer rows"
        ledger.differs("max_length", what)
    else:
        ledger.carry("max_length", "max_length")
    ledger.put(overlong="truncate")
    side = ledger["truncation_mode"]
    if ledger.kind != "kto":
        ledger.carry(
            "truncation_mode", "truncation_side", "left" if side == "keep_end" else "right"
        )
    if ledger["eos_token"]:
        what = (
            "LEMA ends texts with the tokenizer's own eos_token: change it in its files (chats "
            "end as their template has it, in both)"
        )
        ledger.lost("eos_token", what)


def _padding(ledger: Ledger) -> None:
    multiple = ledger["pad_to_multiple_of"]
    ledger.carry(
        "pad_to_multiple_of",
        "pad_to_multiple_of",
        None if multiple in ("auto", "none", "null", None) else int(multiple),
    )


def _packing(ledger: Ledger) -> None:
    strategy = ledger["packing_strategy"]
    if not ledger["packing"]:
        ledger.carry("packing", "packing", False)
        ledger.same("packing_strategy", "without packing")
    elif strategy == "bfd":
        ledger.carry("packing", "packing", "bfd")
        ledger.translation.same["packing"] += (
            " (rows of which max_length leaves the prompt alone are left out of packs)"
        )
        ledger.translation.same["packing_strategy"] = "packing: bfd"
    else:
        ledger.carry("packing", "packing", "wrapped")
        what = (
            "packing: wrapped cuts in the same way, but rows of a pack do not see each other, and "
            "the order of rows is another"
            if strategy == "wrapped"
            else "packing: wrapped; LEMA does not split long rows into packs by best fit"
        )
        ledger.differs("packing_strategy", what)
    if ledger["eval_packing"] not in (None, ledger["packing"]):
        what = "evaluation rows are packed as those of training are"
        ledger.differs("eval_packing", what, changes_numbers=False)
    else:
        ledger.same("eval_packing", "as packing")


def _template(ledger: Ledger) -> None:
    path = ledger["chat_template_path"]
    if path is None:
        ledger.carry("chat_template_path", "chat_template", None)
        return
    file = Path(path)
    if path.endswith((".jinja", ".j2")):
        ledger.carry("chat_template_path", "chat_template", path)
        return
    ledger.put(chat_template=str(file / "chat_template.jinja"))
    what = (
        "the template is that tokenizer's; TRL also takes its eos_token and adds its tokens to the "
        "model, which LEMA does not"
    )
    ledger.differs("chat_template_path", what)


def _trained(ledger: Ledger) -> None:
    """Carry which tokens train. TRL trains on completions where rows have a prompt of their own,
    and on every token of texts and chats, prompts included, unless it is told otherwise.
    """
    only = ledger["completion_only_loss"]
    if ledger["assistant_only_loss"]:
        ledger.carry("assistant_only_loss", "train_on", "assistant")
        if not _marks_answers(ledger):
            what = (
                "train_on: assistant; but TRL replaces a template without {% generation %} by its "
                "own for training, which trains other tokens around answers: save that as a file "
                "and name it in chat_template_path"
            )
            del ledger.translation.same["assistant_only_loss"]
            ledger.differs("assistant_only_loss", what)
        if only is False:
            what = "answers in a column `prompt` are not trained on"
            ledger.differs("completion_only_loss", what)
        else:
            ledger.same("completion_only_loss", "answers of the completion")
    else:
        ledger.carry(
            "completion_only_loss", "train_on", "all" if only is False else "all_but_prompts"
        )
        ledger.same("assistant_only_loss", "all words of chats")


def _marks_answers(ledger: Ledger) -> bool:
    """Whether the chat template that applies says itself what the assistant wrote."""
    path = ledger["chat_template_path"]
    model = Path(str(ledger["model_name_or_path"]))
    files = (
        [Path(path)] if path else [model / "chat_template.jinja", model / "tokenizer_config.json"]
    )
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return any(MARK in text.replace("{%-", "{%") for text in texts)
