"""LLaMA-Factory's templates as Jinja: what it writes around the messages of a chat, and which of
the tokens are trained.

`templates.json` has the formats of its templates by name. LLaMA-Factory builds the tokens of a
chat from such formats and leaves the tokenizer's own chat template aside.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Format", "chat_template", "formats"]

PLACES = re.compile(r"(\{\{(?:content|bos|eos)\}\})")


@cache
def formats() -> Mapping[str, Mapping[str, Any]]:
    """Return the formats of LLaMA-Factory's templates by name."""
    text = files("lema_tools.importing.llamafactory").joinpath("templates.json")
    return dict(json.loads(text.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Format:
    """What a template writes; `{{content}}`, `{{bos}}` and `{{eos}}` stand for what they say.

    Args:
        user: a question, and the beginning of its answer.
        assistant: an answer.
        system: the system message.
        observation: the result of a tool; empty: as `user`.
        prefix: the beginning of a chat.
        default_system: the system message of chats without one.
        efficient_eos: the end-of-sequence token comes once, after the last answer.
        eos: the token that the template makes the end of a sequence; empty: the tokenizer's own.
        system_in_user: the system message is part of the first question.
        thought: the words around a reasoning; empty: a template without one.
        empty_thought: what an answer without reasoning begins with.
        images: the template is for a model with images.
    """

    user: str
    assistant: str
    system: str = "{{content}}"
    observation: str = ""
    prefix: str = ""
    default_system: str = ""
    efficient_eos: bool = False
    eos: str = ""
    system_in_user: bool = False
    thought: tuple[str, ...] = ()
    empty_thought: str = ""
    images: bool = False

    @staticmethod
    def named(name: str) -> "Format":
        """Return the format of a template by LLaMA-Factory's name. `KeyError`: it has none."""
        values = dict(formats()[name])
        values["thought"] = tuple(values.get("thought", ()))
        return Format(**values)

    @property
    def without_thought(self) -> str:
        """What stands in the place of a reasoning that an answer does not have."""
        return self.empty_thought or "".join(self.thought)


def chat_template(
    form: Format,
    *,
    default_system: str | None = None,
    thinks: bool | None = True,
    last_thought_only: bool = False,
) -> str:
    """Return a chat template in Jinja that writes what LLaMA-Factory does, with marks around the
    tokens that it trains.

    Args:
        form: the template's formats.
        default_system: the system message of chats without one; None: the template's.
        thinks: LLaMA-Factory's `enable_thinking`: whether answers keep their reasoning, and an
            empty one is trained. None: they keep it, and an empty one is not trained.
        last_thought_only: leave the reasoning out of all answers but the last.
    """
    system = form.default_system if default_system is None else default_system
    lines = [
        "{%- if tools -%}{{- raise_exception('this chat template shows no tools') -}}{%- endif -%}",
        f"{{%- set system = {_quoted(system)} -%}}",
        "{%- if messages[0].role == 'system' -%}",
        "{%- set system = messages[0].content or system -%}",
        "{%- set messages = messages[1:] -%}",
        "{%- endif -%}",
        _written(form, form.prefix, ""),
    ]
    if form.system_in_user:
        system_text = _concatenated(form.system, "system")
        lines.append(f"{{%- if system -%}}{{%- set system = {system_text} -%}}{{%- endif -%}}")
    else:
        written = _written(form, form.system, "system")
        lines.append(f"{{%- if system -%}}{written}{{%- endif -%}}")
    lines += ["{%- for message in messages -%}", _question(form)]
    lines += [_observation(form), _answer(form, thinks, last_thought_only=last_thought_only)]
    lines += [
        "{%- else -%}{{- raise_exception('unknown role ' + message.role) -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    if form.thought and not thinks:
        prompt = f"{{{{- {_quoted(form.without_thought)} -}}}}"
        lines.append(f"{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}")
    return "\n".join(line for line in lines if line)


def _question(form: Format) -> str:
    content = "message.content"
    if form.system_in_user:
        content = "(system + message.content if loop.first else message.content)"
    return "{%- if message.role == 'user' -%}" + _written(form, form.user, content)


def _observation(form: Format) -> str:
    written = _written(form, form.observation or form.user, "message.content")
    return "{%- elif message.role == 'tool' -%}" + written


def _answer(form: Format, thinks: bool | None, *, last_thought_only: bool) -> str:
    """An answer, with marks around what is trained."""
    head = (
        "{%- elif message.role == 'assistant' -%}"
        "{%- if message.tool_calls -%}"
        "{{- raise_exception('this chat template shows no tool calls') -}}{%- endif -%}"
        "{%- set content = message.content -%}"
    )
    thought = ""
    if form.thought:
        opening, closing = (_quoted(word) for word in form.thought)
        removed = (
            f"{{%- if {opening} in content and {closing} in content -%}}{{%- set content = "
            f"(content.split({opening})[0] + content.split({closing})[-1]).lstrip('\\n') -%}}"
            "{%- endif -%}"
        )
        if thinks is False:
            head += removed
        elif last_thought_only:
            head += f"{{%- if not loop.last -%}}{removed}{{%- endif -%}}"
        opening, closing = (_quoted(word.strip()) for word in form.thought)
        without = f"{opening} not in content and {closing} not in content"
        if last_thought_only:
            without = f"loop.last and {without}"
        empty = f"{{{{- {_quoted(form.without_thought)} -}}}}"
        thought = f"{{%- if {without} -%}}{empty}{{%- endif -%}}"
    end = f"{{%- if loop.last -%}}{_eos(form)}{{%- endif -%}}" if form.efficient_eos else ""
    body = _written(form, form.assistant, "content") + end
    trained = thought + body if thinks else body
    before = "" if thinks else thought
    return f"{head}{before}{{%- generation -%}}{trained}{{%- endgeneration -%}}"


def _written(form: Format, text: str, content: str) -> str:
    """Return a format as Jinja that writes it, with an expression in the place of its content."""
    parts = []
    for part in PLACES.split(text):
        if part == "{{content}}":
            parts.append(f"{{{{- {content} -}}}}")
        elif part == "{{bos}}":
            parts.append("{{- bos_token -}}")
        elif part == "{{eos}}":
            parts.append(_eos(form))
        elif part:
            parts.append(f"{{{{- {_quoted(part)} -}}}}")
    return "".join(parts)


def _concatenated(text: str, content: str) -> str:
    """Return a format without special tokens as an expression."""
    parts = [content if part == "{{content}}" else _quoted(part) for part in PLACES.split(text)]
    return " + ".join(part for part in parts if part != _quoted(""))


def _eos(form: Format) -> str:
    return f"{{{{- {_quoted(form.eos)} -}}}}" if form.eos else "{{- eos_token -}}"


def _quoted(text: str) -> str:
    """Return a text as a string of Jinja."""
    return json.dumps(text, ensure_ascii=False)
