"""A chat template is a program from outside: whatever it does, it ends in an error that names
it, or in a chat.
"""

import threading

import pytest
from faults.words import TEMPLATE, word_tokenizer

from lema.data import prepare_data
from lema.data.chat import template
from lema.errors import DataError

CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
HOSTILE = {
    "reaches for classes": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "reaches for modules": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "formats its way": ("{{ '{0.__class__.__mro__}'.format('a') }}{{ 1 / 0 }}", "chat template"),
    "includes a file": ("{% include '/etc/passwd' %}", "no loader"),
    "imports a file": ("{% import '/etc/passwd' as x %}", "no loader"),
    "changes the chat": ("{{ messages.clear() }}", "unsafe"),
    "divides by nothing": ("{{ 1 / 0 }}", "division"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "takes a power": (
        "{{ 10 ** 10 ** 8 }}",
        "line 1 of the chat template raises a number to a power",
    ),
    "takes a power, further down": ("a\n{# #}\n{{ 2 ** 9 }}", "line 3"),
    "counts far": ("{% for a in range(1000000000) %}{% endfor %}", "the number 1000000000"),
    "multiplies far": ("{{ 'a' * 99999999999 }}", "the number 99999999999"),
    "multiplies again": ("{{ ('a' * 999999 * 999999)|length }}", "more than 512 MiB"),
    "multiplies what it is given": (
        "{{ (messages[0].role * 999999 * 999999)|length }}",
        "more than 512 MiB",
    ),
    "pads far": ("{{ '%99999999999d' % 1 }}", "more than 512 MiB"),
    "is cut off": ("{% for m in messages %}", "the chat template rejects this chat"),
    "compares in C": (
        "{% set a = ('x'*999999)*100 %}{% set l = [a ~ 'y']*99999 %}{{ (a ~ 'w') in l }}",
        "0.2 seconds",
    ),
    "counts in C": (
        "{% set a = ('x'*999999)*100 %}{% set l = [a ~ 'y']*99999 %}{{ l.count(a ~ 'w') }}",
        "0.2 seconds",
    ),
    "writes much": (
        "{% for a in range(99) %}{{ 'x' * 999999 }}{% endfor %}",
        "more than 67,108,864 characters",
    ),
    "loops for ever": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "0.2 seconds",
    ),
    "lists for ever": (
        "{% for a in range(99999) %}{{ range(9999)|list|length }}{% endfor %}",
        "0.2 seconds",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_is_an_error_of_the_row(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = HOSTILE[what]
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    with pytest.raises(DataError, match=message) as caught:
        prepare_data(CHAT, word_tokenizer(text), max_length=64)
    assert caught.value.where == "rows:1"
    assert "chat template" in caught.value.what


def test_a_slow_template_is_not_tried_again_with_messages_in_another_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A template that refuses the first form is given two others; with all three, it would take
    three times as long.
    """
    tokenizer = word_tokenizer(HOSTILE["loops for ever"][0])
    rendered = []
    render = type(tokenizer).apply_chat_template
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda *given, **how: rendered.append(1) or render(*given, **how),
    )
    with pytest.raises(DataError, match=r"more than 0\.2 seconds"):
        prepare_data(CHAT, tokenizer, max_length=64)
    assert len(rendered) == 1


def test_a_template_is_stopped_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals reach the main thread alone."""
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            prepare_data(CHAT, word_tokenizer(HOSTILE["loops for ever"][0]), max_length=64)
        except DataError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "0.2 seconds" in str(caught[0])


def test_a_role_nobody_knows_is_an_error_unless_the_template_names_it() -> None:
    chat = [{"messages": [*CHAT[0]["messages"], {"role": "asistant", "content": "b"}]}]
    with pytest.raises(DataError, match="the role 'asistant' is not known") as caught:
        prepare_data(chat, word_tokenizer(), max_length=64)
    assert caught.value.where == "rows:1, message 3"
    named = TEMPLATE + "{# the role asistant #}"
    assert len(prepare_data(chat, word_tokenizer(named), max_length=64)) == 1
