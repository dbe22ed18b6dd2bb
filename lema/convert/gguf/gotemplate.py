"""A chat template's texts as a template of Go (`text/template`), which Ollama reads.

All texts are constants in quotes, so that no blank between actions is a part of what is written.
Ollama gives `.Messages`, each with `.Role` and `.Content`; of messages with the same role in a row
it makes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lema.convert.gguf.roletexts import ROLES, START, RoleTexts

__all__ = ["go_template"]

ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def go_template(texts: RoleTexts) -> str:
    """Return a Go template that renders `.Messages` as a chat template does.

    Where the last message is the assistant's, what asks for an answer stands before it and nothing
    behind it, so that the model goes on with its words.

    Args:
        texts: of the chat template.

    Returns:
        The text, without a newline at its end.
    """
    return "\n".join(_lines(texts))


def _lines(texts: RoleTexts) -> Iterator[str]:
    yield '{{- $before := "" -}}'
    yield "{{- range $i, $message := .Messages -}}"
    roles = [role for role in ROLES if any(role == pair[1] for pair in texts.before)]
    for number, role in enumerate(roles):
        yield f'{{{{- {"if" if number == 0 else "else if"} eq .Role "{role}" -}}}}'
        yield from _before(texts, role)
        yield "{{- .Content -}}"
        yield "{{- $before = .Role -}}"
    yield "{{- end -}}"
    yield "{{- end -}}"
    for number, (role, text) in enumerate(sorted(texts.prompt.items())):
        yield f'{{{{- {"if" if number == 0 else "else if"} eq $before "{role}" -}}}}'
        yield _constant(text)
    yield "{{- end -}}"


def _before(texts: RoleTexts, role: str) -> Iterator[str]:
    """Yield what writes the text before the words of a role: by the role before it, and last of all
    the text that is most frequent, which also stands after roles that the template did not take.
    """
    by_last = {last: text for (last, this), text in texts.before.items() if this == role}
    usual, _ = Counter(
        text for last, text in by_last.items() if last != START or len(by_last) == 1
    ).most_common(1)[0]
    prompt = texts.prompt.get("user", "") if role == "assistant" else ""
    conditions = [(f'eq $before "{last}"', text) for last, text in sorted(by_last.items())]
    conditions = [(condition, text) for condition, text in conditions if text != usual]
    if role == "assistant" and prompt != by_last.get("user", prompt):
        continued = 'and (eq $before "user") (eq (len (slice $.Messages $i)) 1)'
        conditions.insert(0, (continued, prompt))
    for number, (condition, text) in enumerate(conditions):
        yield f"{{{{- {'if' if number == 0 else 'else if'} {condition} -}}}}{_constant(text)}"
    if conditions:
        yield f"{{{{- else -}}}}{_constant(usual)}{{{{- end -}}}}"
    else:
        yield _constant(usual)


def _constant(text: str) -> str:
    """Return what writes a text. A brace is written as its number, so that none ends an action."""
    written = "".join(
        ESCAPES.get(sign, f"\\u{ord(sign):04x}" if sign in "{}" or ord(sign) < 32 else sign)
        for sign in text
    )
    return f'{{{{- "{written}" -}}}}' if text else ""
