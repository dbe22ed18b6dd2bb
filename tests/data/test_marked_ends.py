"""A template whose `{% generation %}` marks leave the end of an answer outside: it is trained,
and that is said.
"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lema.data import prepare_data

Make = Callable[..., PreTrainedTokenizerFast]
CHAT = [
    {"role": "user", "content": "what is the name of the river?"},
    {"role": "assistant", "content": "The river is long."},
    {"role": "user", "content": "and the mill?"},
    {"role": "assistant", "content": "The mill."},
]
SAID = "marks leave out the token that ends an answer; LEMA trains it"
GENERATED = "{% generation %}{{ m.content }}{% endgeneration %}"
OUTSIDE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    + GENERATED
    + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)
# Like GLM's: a turn ends where the next one opens.
OPENING = (
    (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{% "
        "if m.role == 'assistant' %}"
    )
    + GENERATED
    + "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)


def trained(tokenizer: PreTrainedTokenizerFast) -> tuple[str, tuple[str, ...]]:
    """What is trained of the chat, and what is said of the data."""
    data = prepare_data([{"messages": CHAT}], tokenizer, max_length=200)
    return str(tokenizer.decode([one for one in data[0]["labels"] if one != -100])), data.notes


@pytest.mark.parametrize(
    ("template", "right"),
    [
        (OUTSIDE, "The river is long.<|im_end|>The mill.<|im_end|>"),
        (OPENING, "The river is long.\n<|im_start|>The mill.\n<|im_start|>"),
    ],
)
def test_the_end_is_trained_and_said_once(make_tokenizer: Make, template: str, right: str) -> None:
    learnt, notes = trained(make_tokenizer(template))
    assert learnt == right
    (note,) = notes
    assert SAID in note


def test_marks_with_the_end_inside_stay_as_they_are(make_tokenizer: Make, templates: Any) -> None:
    learnt, notes = trained(make_tokenizer(templates["marked"]))
    assert learnt == "The river is long.<|im_end|>The mill.<|im_end|>" and not notes


def test_marks_without_any_token_at_the_end_are_kept_and_said(make_tokenizer: Make) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}" + GENERATED
    )
    template += "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    learnt, (note,) = trained(make_tokenizer(template))
    assert learnt == " The river is long. The mill."
    assert "does not end an answer with a token" in note
