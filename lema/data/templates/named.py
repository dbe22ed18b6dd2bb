"""Chat templates by name: the formats that models were published with, each in a file beside
this one, and the token that ends a turn in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lema.config.problems import meant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EOS", "NAMED", "NamedTemplate", "end_token", "named_template", "suggestion"]

EOS = "eos"
"""A turn ends with the tokenizer's end-of-sequence token."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class NamedTemplate:
    """A format of chats.

    Attributes:
        folder: the folder of its Jinja text, beside this file.
        end: the text of the token that ends a turn, or `EOS`.
        aliases: its other names.
        source: the model, or the paper, that it was published with.
    """

    folder: str
    end: str
    aliases: tuple[str, ...]
    source: str


_IM_END = "<|im_end|>"
_GEMMA_END = "<end_of_turn>"
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_COHERE = "<|END_OF_TURN_TOKEN|>"

NAMED: Mapping[str, NamedTemplate] = {
    "chatml": NamedTemplate("chatml", _IM_END, ("yi", "hermes"), "OpenAI's ChatML"),
    "qwen25": NamedTemplate("chatml", _IM_END, ("qwen_25", "qwen2.5", "qwen"), "Qwen2.5-Instruct"),
    "qwen3": NamedTemplate("chatml", _IM_END, (), "Qwen3"),
    "falcon_h1": NamedTemplate("chatml", _IM_END, (), "Falcon-H1-Instruct"),
    "llama2": NamedTemplate("llama", EOS, ("llama-2",), "Llama-2-chat"),
    "llama3": NamedTemplate("llama", "<|eot_id|>", ("llama-3",), "Meta-Llama-3-Instruct"),
    "gemma": NamedTemplate("gemma", _GEMMA_END, ("gemma2",), "gemma-it, gemma-2-it"),
    "gemma3": NamedTemplate("gemma", _GEMMA_END, (), "gemma-3-it, text alone"),
    "mistral_v1": NamedTemplate("mistral", EOS, (), "Mistral-7B-Instruct-v0.1, Mixtral"),
    "mistral_v2v3": NamedTemplate("mistral", EOS, ("mistral",), "Mistral-7B-Instruct-v0.3"),
    "mistral_v3_tekken": NamedTemplate("mistral", EOS, (), "Mistral-Nemo-Instruct-2407"),
    "mistral_v7": NamedTemplate("mistral", EOS, ("mistral_small",), "Mistral-Small-Instruct-2501"),
    "phi_3": NamedTemplate("phi", "<|end|>", ("phi3",), "Phi-3-mini-instruct"),
    "phi_35": NamedTemplate("phi", "<|end|>", ("phi3.5", "phi"), "Phi-3.5-mini-instruct"),
    "phi_4": NamedTemplate("phi", _IM_END, ("phi4",), "phi-4"),
    "phi_4_mini": NamedTemplate("phi", "<|end|>", ("phi4_mini",), "Phi-4-mini-instruct"),
    "deepseek_v2": NamedTemplate("marked", EOS, (), "DeepSeek-V2.5"),
    "deepseek_v3": NamedTemplate("marked", _DEEPSEEK_END, ("deepseek3",), "DeepSeek-V3"),
    "cohere": NamedTemplate("marked", _COHERE, ("command_r",), "c4ai-command-r-v01"),
    "zephyr": NamedTemplate("marked", EOS, (), "zephyr-7b-beta"),
    "tulu": NamedTemplate("marked", EOS, ("tulu2", "tulu3"), "Llama-3.1-Tulu-3"),
    "alpaca": NamedTemplate("plain", EOS, (), "Stanford Alpaca's headings"),
    "vicuna": NamedTemplate("plain", EOS, (), "vicuna-7b-v1.5"),
    "falcon": NamedTemplate("plain", EOS, (), "falcon-180B-chat"),
}


@cache
def _texts() -> Mapping[str, str]:
    """Return the text of every template by its name."""
    return {
        name: (_FOLDER / about.folder / f"{name}.jinja").read_text(encoding="utf-8")
        for name, about in NAMED.items()
    }


def named_template(name: str) -> str | None:
    """Return the text of a template; None: there is none of that name."""
    for key, about in NAMED.items():
        if name.lower().replace("-", "_") in {
            alias.replace("-", "_") for alias in (key, *about.aliases)
        }:
            return _texts()[key]
    return None


def suggestion(name: str) -> str:
    """Return which template may be meant by a name that none has, and all names."""
    near = meant(name, NAMED)
    return f"{near + '; ' if near else ''}there are {', '.join(NAMED)}"


def end_token(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, int | None]:
    """Return the text that ends a turn if the tokenizer has a named template that ends them with
    a token of its own, and its id; None: it is no single token of the tokenizer. Of any other
    template the text is empty."""
    template = tokenizer.chat_template
    name = next((name for name, text in _texts().items() if text == template), None)
    if name is None or NAMED[name].end == EOS:
        return "", None
    end = NAMED[name].end
    ids = tokenizer(end, add_special_tokens=False, verbose=False)["input_ids"]
    return end, int(ids[0]) if len(ids) == 1 else None
