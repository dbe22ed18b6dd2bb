"""Tags that a chat template's prompt for generation gives are not trained, unless the settings
say so.
"""

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from lema.data import Forms, prepare_data

CHAT = [{"role": "user", "content": "and the mill?"}, {"role": "assistant", "content": "The mill."}]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == "
    "'assistant' %}{{ '<think></think>' }}"
    "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("told", "right"), [(False, "</think>The mill.<|im_end|>"), (True, "<think></think>The mill.")]
)
def test_an_opened_tag_is_trained_only_if_told(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast], told: bool, right: str
) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    data = prepare_data(
        [{"messages": CHAT}], tokenizer, max_length=200, forms=Forms(trains_prompt=told)
    )
    learnt = str(tokenizer.decode([one for one in data[0]["labels"] if one != -100]))
    assert learnt.strip().startswith(right)
