"""A tokenizer of a few words, with a chat template; made in a millisecond, and from no file."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["TEMPLATE", "word_tokenizer"]

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' : ' + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def word_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows three words and takes every other for unknown."""
    words: Any = Tokenizer(
        models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer
