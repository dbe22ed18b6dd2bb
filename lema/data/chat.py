"""A chat through the tokenizer's own template, with only the assistant's words learnt."""

import re
from typing import TYPE_CHECKING, Any

from lema.data.columns import Chat
from lema.data.files import Row
from lema.data.spans import Span, tokenize_spans
from lema.data.template import check_template, limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenize_chat"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ROLES = ("system", "developer", "user", "assistant", "tool")
_MARK_IT = (
    "mark the assistant's words in the chat template with {% generation %} ... {% endgeneration %}, "
    "or give each answer its own row as prompt + completion"
)


def tokenize_chat(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> tuple[list[int], list[bool]]:
    """The token ids of the rendered chat, and which of them are learnt.

    A template with `{% generation %}` says itself which words are the assistant's. For any other, what an assistant
    message adds to the rendering of the messages before it is learnt: from the end of the generation prompt to the
    end of the message, its end-of-turn token included. The template writes all special tokens; none are added.

    Raises:
        DataError: no template, the template refuses the chat, no assistant message, or the rendering of a chat does
            not begin with the rendering of its beginning, so that the assistant's words cannot be found.
    """
    if not tokenizer.chat_template:
        how = "use the tokenizer of an instruct model, put a chat_template.jinja beside it, or use prompt + completion"
        raise row.broken("the data are chats, and the tokenizer has no chat template", how=how)
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise row.broken("no message is the assistant's, so there is nothing to learn")
    template = _call(row, tokenizer.get_chat_template, tools=chat.tools)
    if refused := check_template(template):
        raise row.broken(f"{refused}, which no chat needs", how="do not use this template unless you trust it")
    _check_roles(chat, template, row)
    if chat.prompt_length is None and tokenizer.is_fast and _GENERATION.search(template):
        return _marked(chat, tokenizer, row)
    text = _render(chat.messages, chat, tokenizer, row)
    return tokenize_spans(text, _spans(text, chat, tokenizer, row), tokenizer, add_special_tokens=False)


def _check_roles(chat: Chat, template: str, row: Row) -> None:
    """Most templates write any role as it comes, so a slip would pass for a speaker whose words are not learnt."""
    for number, message in enumerate(chat.messages, 1):
        role = message["role"]
        if role not in ROLES and role not in template:
            how = f"use one of: {', '.join(ROLES)}; or one that the chat template names"
            raise row.broken(f"the role {role!r} is not known", at=f"message {number}", how=how)


def _call(row: Row, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Templates are programs from outside: they raise on roles they do not know, and stumble over what they get."""
    try:
        with limited():
            return function(*args, **kwargs)
    except Exception as error:
        what = f"the chat template does not take this chat: {str(error) or type(error).__name__}"
        raise row.broken(
            what, how="compare the roles and their order with what the model's template expects"
        ) from error


def _render(
    messages: list[dict[str, Any]], chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row, **kw: Any
) -> str:
    return str(_call(row, tokenizer.apply_chat_template, messages, tools=chat.tools, tokenize=False, **kw))


def _marked(chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> tuple[list[int], list[bool]]:
    encoded = _call(
        row,
        tokenizer.apply_chat_template,
        chat.messages,
        tools=chat.tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return list(encoded["input_ids"]), [bool(learnt) for learnt in encoded["assistant_masks"]]


def _spans(text: str, chat: Chat, tokenizer: "PreTrainedTokenizerBase", row: Row) -> list[Span]:
    """The characters to learn: those of each assistant message, or all after the prompt's messages."""
    count = len(chat.messages)
    if chat.prompt_length is not None:
        turns = [(chat.prompt_length, count)]
    else:
        turns = [(i, i + 1) for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if turns[0][0] == 0:
        raise row.broken("the chat begins with the assistant, before anything to answer", at="message 1", how=_MARK_IT)
    closing = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spans = []
    for first, last in turns:
        before = _render(chat.messages[:first], chat, tokenizer, row, add_generation_prompt=True)
        after = text if last == count else _render(chat.messages[:last], chat, tokenizer, row)
        if not (after.startswith(before) and text.startswith(after)):
            what = "the chat template rewrites earlier messages, so the assistant's words cannot be told from the rest"
            raise row.broken(what, at=f"message {first + 1}", how=_MARK_IT)
        # The newline a template writes after the end-of-turn token is never generated.
        words = after.rstrip()
        spans.append((len(before), len(words) if words.endswith(closing) else len(after)))
    return spans
