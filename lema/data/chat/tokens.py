"""A chat as token ids, with only the assistant's words trained on, or what the settings and the data say instead."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lema.data.chat.messages import Chat
from lema.data.chat.template import Template, open_template
from lema.data.chat.turns import Known, Rendered, Span, render_chat
from lema.data.files import Row, num_alike
from lema.data.forms import Remarks, TrainOn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chats", "check_roles", "tokenize_spans"]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class Chats:
    """Chats of one tokenizer: what is trained on of them, what was found out about its template, what is to be said."""

    tokenizer: "PreTrainedTokenizerBase"
    train_on: TrainOn
    remarks: Remarks
    known: Known

    def tokenize(self, chat: Chat, row: Row) -> tuple[list[int], list[bool]]:
        """The token ids of the rendered chat, and which of them are learnt; none is where the data say so of all.

        A template with `{% generation %}` says itself which words are the assistant's. For any other, an answer goes
        from the end of its generation prompt to the end of its turn, its end token included. That its words stand there
        and no other message's is looked at. The template writes all special tokens; none are added.

        Raises:
            DataError: no template, it refuses the chat, no assistant message, or it does not write an answer.
        """
        if not any(message["role"] == "assistant" for message in chat.messages):
            raise row.broken("no message is the assistant's, so there is nothing to learn")
        template = open_template(self.tokenizer, chat.tools, row)
        check_roles(chat, template, row)
        trained = self._trained(chat, row)
        if not trained:
            return [], []
        rendered = render_chat(template, self.known, chat.messages, row)
        self._remark(rendered, chat, row)
        text, spans = rendered.text, [rendered.span(number) for number in trained]
        if trained[-1] == len(chat.messages) - 1 and rendered.said is None:
            text, spans[-1] = self._ended(rendered, spans[-1])
        if self.train_on == "all":
            spans = [(0, len(text))]
        return tokenize_spans(text, spans, self.tokenizer, add_special_tokens=False)

    def _trained(self, chat: Chat, row: Row) -> list[int]:
        """The messages to train on."""
        for number, flag in enumerate(chat.flags):
            assistant = chat.messages[number]["role"] == "assistant"
            if flag is False and self.train_on == "all":
                what = "the settings say to train on all words, and this message not to"
                raise row.broken(what, at=f"message {number + 1}", how="set train_on: assistant, or take the flag out")
            if flag and not assistant and self.train_on != "all":
                what = "the message says to train on it, and is not the assistant's"
                raise row.broken(what, at=f"message {number + 1}", how="take the flag out, or set train_on: all")
        answers, roles = chat.answers(), [message["role"] for message in chat.messages]
        if self.train_on == "last":
            return [number for number in answers if "assistant" not in roles[number + 1 :]]
        if self.train_on == "completion" and chat.prompt_length is None:
            return [number for number in answers if "user" not in roles[number + 1 :]]
        return answers

    def _remark(self, rendered: Rendered, chat: Chat, row: Row) -> None:
        """Say what the template leaves out: of answers, of what they answer, and the tools."""
        if chat.tools and "tools" not in rendered.template.text:
            self.remarks.add(row, "the chat template does not show the tools")
        hidden = [message["role"] for number, message in enumerate(rendered.messages) if rendered.hidden(number)]
        for role in dict.fromkeys(hidden):
            what = "reasoning, or words beside a tool call," if role == "assistant" else f"words of the role {role}"
            self.remarks.add(row, f"the chat template leaves out {what} in some messages")

    def _ended(self, rendered: Rendered, span: Span) -> tuple[str, Span]:
        """The text with the last answer's end token, where a template leaves ending a turn to the next message."""
        (start, end), text = span, rendered.text
        if rendered.ends_in_token(end):
            return text, span
        token = rendered.next_token()
        if not token:
            if not rendered.tail[2].strip():
                what = "the chat template ends an answer with nothing that a model could stop at"
                self.remarks.add(rendered.row, what)
            return text, span
        return text[:end] + token, (start, end + len(token))


def check_roles(chat: Chat, template: Template, row: Row) -> None:
    """Refuse unknown roles: most templates write any role, and the words of a misspelt one would not be learnt."""
    for number, message in enumerate(chat.messages, 1):
        role = message["role"]
        if role not in ROLES and role not in template.text:
            how = f"use one of: {', '.join(ROLES)}; or one that the chat template names"
            raise row.broken(f"the role {role!r} is not known", at=f"message {number}", how=how)


def tokenize_spans(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """The token ids of the text, and for each whether it lies in one of the spans.

    The text is tokenised as a whole, as the model will meet it. A token across the start of a span lies in it (it
    holds the first characters to learn); one across the end does not (it holds characters which come later).
    """
    if not tokenizer.is_fast:
        return _by_prefixes(text, spans, tokenizer, add_special_tokens)
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    inside, count = [False] * len(ends), len(ends)
    while count and ends[count - 1] == 0:  # put after the text, for no character of it
        count -= 1
    for start, stop in spans:  # no token ends before the one in front of it
        first, last = bisect_right(ends, start, 0, count), bisect_right(ends, stop, 0, count)
        inside[first:last] = [True] * (last - first)
    return list(encoded["input_ids"]), inside


def _by_prefixes(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """Tokenizers written in Python do not know characters: compare with the tokens of the text up to each border."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    ids = encode(text)
    inside = [False] * len(ids)
    for start, stop in spans:
        first = num_alike(ids, encode(text[:start]))
        last = len(ids) if stop == len(text) else num_alike(ids, encode(text[:stop]))
        inside[first:last] = [True] * (last - first)
    return ids, inside
