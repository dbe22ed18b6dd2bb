"""The small tokenizer of the cases, for axolotl's own code and for LEMA."""

from pathlib import Path
from typing import Any

from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

__all__ = ["tokenizer_of"]

FILE = Path(__file__).parents[1] / "llamafactory" / "tokenizer.json"


def tokenizer_of(about: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The small tokenizer with the special tokens, the template and the habits of a case."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(FILE),
        bos_token="<s>",
        eos_token=about["eos"],
    )
    if about.get("begins"):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
        )
    if about.get("prefix"):
        tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(about["prefix"])
    tokenizer.chat_template = about.get("template")
    return tokenizer
