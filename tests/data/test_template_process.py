"""Templates are rendered in a process that can be ended: what it writes is what `transformers`
writes, and no more is taken from it than that."""

import math
import os
import select
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from chatfamilies import FAMILIES
from days import set_day
from faults.words import TEMPLATE, word_tokenizer
from forked import run_forked
from transformers.utils.chat_template_utils import render_jinja_template

from lema.data import prepare_data
from lema.data.chat import process
from lema.data.chat.template import open_template
from lema.data.files import Row
from lema.data.preference import prepare_preferences
from lema.errors import DataError, printable

ROW = Row({}, "chats.jsonl", 7)
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"city": "Köln", "n": 3.0}},
}
CHATS: list[list[dict[str, Any]]] = [
    CHAT,
    [{"role": "system", "content": " s "}, *CHAT, {"role": "user", "content": "<b>\n{{ c }}"}],
    [
        *CHAT[:1],
        {"role": "assistant", "content": None, "reasoning_content": "why\n", "tool_calls": [CALL]},
    ],
    [
        *CHAT[:1],
        {
            "role": "assistant",
            "thinking": "",
            "content": [{"type": "text", "text": "\U0001f600 \u2028"}],
        },
    ],
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
VALUES = {
    "a": (1, 2),
    3: [None, True],
    "n": math.nan,
    "i": -math.inf,
    "f": 1e-300,
    "big": 10**400,
    "s": "\x00\x1b é",
}
PARTICULAR = {
    "what values are": "{{ messages[0] }}{{ messages[0].extra.a }}{{ messages[0].extra[3] }}",
    "sorted json": "{{ messages | tojson(indent=1, sort_keys=true, separators=(',', ' : ')) }}",
    "escapes json": "{{ messages | tojson(ensure_ascii=true) }}",
    "leaves loops": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% "
        "break %}{% endfor %}"
    ),
    "blocks": "  {% if true %}\n  a\n  {%- endif %}\n b{# c #}\n\n",
    "dictionaries": "{{ dict(a=1) }}{{ dict.fromkeys([1, 2], 3) }}",
    "spaces": "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ namespace(self=3).self }}",
    "tells the time": "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}",
    "answers in answers": (
        "{% generation %}a{% generation %}é{% endgeneration %}{% endgeneration %}"
        "{% generation %}{% endgeneration %}{% generation %}b{% endgeneration %}"
    ),
    "special tokens": (
        "{{ eos_token }}{{ unk_token }}{{ bos_token is defined }}{{ tools is none }}{{ "
        "documents is none }}"
    ),
    "its own errors": "{{ raise_exception('no \\u202e role \\n') }}",
    "undefined": "{{ a.b }}",
    "underscores": "{% set n = namespace(_a=1) %}",
    "attributes": "{{ messages.__class__ }}",
    "changes": "{{ messages.append(1) }}",
    "syntax": "{% for m in messages %}\n{{ m. }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "types": "{{ 1 + 'a' }}",
}


def ours(text: str, messages: list[dict[str, Any]], tools: Any, *, prompt: bool) -> Any:
    template = open_template(word_tokenizer(text), tools, ROW)
    try:
        if prompt:
            return template.render(messages, ROW, prompt=True)
        written, places = template.render_marked(messages, ROW)
    except DataError as error:
        return error.what.removeprefix("the chat template rejects this chat: ")
    assert template.render(messages, ROW) == written
    return written, places


def theirs(text: str, messages: list[dict[str, Any]], tools: Any, *, prompt: bool) -> Any:
    tokenizer = word_tokenizer(text)
    try:
        written = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        if prompt:
            return written
        whole = [
            {key: value for key, value in one.items() if value is not None} for one in messages
        ]
        named: dict[str, Any] = {
            "chat_template": text,
            "tools": tools,
            **tokenizer.special_tokens_map,
        }
        (again,), (places,) = render_jinja_template(
            [whole], return_assistant_tokens_mask=True, **named
        )
    except Exception as error:  # noqa: BLE001 - whichever it is, ours is the same
        return printable(str(error) or type(error).__name__)
    assert again == written
    return written, [place for place in places if place[0] < place[1]]


@pytest.mark.parametrize("name", [*FAMILIES, *PARTICULAR])
def test_texts_places_and_errors_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_day(monkeypatch, "2026-02-03T04:05:06.000789")
    text = FAMILIES[name].template if name in FAMILIES else PARTICULAR[name]
    special = [{**CHAT[0], "extra": VALUES}, CHAT[1]]
    for messages in [*CHATS, *([special] if name in PARTICULAR and "json" not in name else [])]:
        for tools in (None, [TOOL]):
            for prompt in (False, True):
                given = deepcopy(messages)
                assert ours(text, given, tools, prompt=prompt) == theirs(
                    text, messages, tools, prompt=prompt
                )
                assert repr(given) == repr(messages)


@pytest.mark.parametrize("text", ["a", "a ", [{"type": "text", "text": "a"}], None])
def test_a_last_message_that_is_continued_ends_as_with_transformers(text: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content if m.content is string else "
        "m.content[0].text }}</s>"
    )
    tokenizer = word_tokenizer(template + "{% endfor %}")
    chat = [CHAT[0], {"role": "assistant", "content": text}]
    found = []
    for render in (
        lambda: open_template(tokenizer, None, ROW).render(chat, ROW, continued=True),
        lambda: tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True),
    ):
        try:
            found.append(render())
        except (DataError, ValueError) as error:
            found.append(
                str(error).splitlines()[0].removeprefix("the chat template rejects this chat: ")
            )
    assert found[0] == found[1]


def test_a_tokenizer_that_writes_chats_by_itself_or_changes_them_is_obeyed() -> None:
    class Own(type(word_tokenizer())):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **how: Any) -> Any:
            return f"{len(messages)} messages"

    class Changing(type(word_tokenizer())):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **how: Any) -> Any:
            return super().apply_chat_template(messages, **how).upper()

    for kind, expected in ((Own, "2 messages"), (Changing, "USER : A </S> ASSISTANT : B </S> ")):
        tokenizer = word_tokenizer()
        tokenizer.__class__ = kind
        assert open_template(tokenizer, None, ROW).render(CHAT, ROW) == expected
        assert expected == tokenizer.apply_chat_template(CHAT, tokenize=False)


def prepared(template: str = TEMPLATE, count: int = 1) -> list[list[int]]:
    rows = [
        {"messages": [*CHAT, {"role": "user", "content": "a " * n}, CHAT[1]]}
        for n in range(1, count + 1)
    ]
    return [
        list(row["input_ids"])
        for row in prepare_data(rows, word_tokenizer(template), max_length=4096)
    ]


def test_rows_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    exchange = process._Process.exchange
    monkeypatch.setattr(
        process._Process,
        "exchange",
        lambda own, rows, how: sent.append(len(rows)) or exchange(own, rows, how),
    )
    rows = prepared(count=300)
    assert [len(row) for row in rows] == [len(rows[0]) + number for number in range(300)]
    assert max(sent) == 64 and len(sent) < 15


def pair(text: str) -> dict[str, Any]:
    sides = [[{"role": "assistant", "content": word}] for word in ("b", "a b")]
    return {"prompt": [{"role": "user", "content": text}], "chosen": sides[0], "rejected": sides[1]}


def test_pairs_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    exchange = process._Process.exchange
    monkeypatch.setattr(
        process._Process,
        "exchange",
        lambda own, rows, how: sent.append(len(rows)) or exchange(own, rows, how),
    )
    data = [pair("a " * number) for number in range(1, 41)]
    read = prepare_preferences(data, word_tokenizer(), labelled=False, max_length=256)
    assert len(read) == 40 and sent == [3 * 32, 3 * 8]


@pytest.mark.parametrize("rows", ["chats", "pairs"])
def test_the_first_row_that_is_wrong_is_named_whatever_is_wrong_with_it(rows: str) -> None:
    """The template refuses the third; the fourth is malformed, which is seen before the third is
    rendered.
    """
    refusing = (
        "{% if messages[0].content == 'a b' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(DataError, match="the chat template rejects this chat: no") as caught:
        if rows == "pairs":
            pairs = [pair("a"), pair("b"), pair("a b"), {"chosen": 1}]
            prepare_preferences(pairs, word_tokenizer(refusing), labelled=False, max_length=64)
        else:
            chats = [[{**CHAT[0], "content": text}, CHAT[1]] for text in ("a", "b", "a b")]
            given = [{"messages": messages} for messages in [*chats, 1]]
            prepare_data(given, word_tokenizer(refusing), max_length=64)
    assert caught.value.where == "rows:3"


def test_the_row_that_goes_on_for_ever_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lema.data.chat.template.MAX_SECONDS", 0.2)
    slow = (
        "{% if messages|length > 2 and messages[2].content|length == 40 %}" + LOOP + "{% endif %}"
    )
    with pytest.raises(DataError, match=r"0\.2 seconds") as caught:
        prepared(slow + TEMPLATE, count=64)
    assert caught.value.where == "rows:20"
    assert prepared()  # by another process


NESTED = (
    "{% set n = namespace(l=[]) %}{% for i in range(100000) %}{% set n.l = [n.l] %}{% endfor "
    "%}{{ n.l | tojson }}"
)


def test_a_template_that_fails_slowly_is_tried_with_one_row_and_not_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    exchange = process._Process.exchange
    monkeypatch.setattr(
        process._Process,
        "exchange",
        lambda *given: counts.append(len(found := exchange(*given))) or found,
    )
    deep = "maximum recursion depth exceeded|Stack overflow"  # since Python 3.14 it is the second
    with pytest.raises(DataError, match=deep) as raised:
        prepared(NESTED, count=50)
    assert ":1" in raised.value.where
    assert set(counts) == {1}


def current() -> process._Process:
    found = process._RENDERERS[os.getpid()].process
    assert found is not None
    return found


def test_a_process_that_was_killed_is_told_and_another_one_started() -> None:
    expected = prepared()
    number = current().pid
    os.kill(number, signal.SIGKILL)
    with pytest.raises(
        DataError, match=r"ends the process in which it is rendered \(exit code -9\)"
    ):
        prepared()
    assert prepared() == expected
    assert current().pid != number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_goes_to_all_processes_is_the_parents(number: signal.Signals) -> None:
    assert prepared()
    started = current().pid
    os.kill(started, number)
    assert prepared()
    assert current().pid == started


def test_the_consoles_keys_are_the_parents_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows sends Ctrl-Break to all processes of a console, as it sends Ctrl-C."""
    program = tmp_path / "renderer.py"
    program.write_text(process.PROGRAM.read_text().replace("SIGBREAK", "SIGUSR2"))
    monkeypatch.setattr(process, "PROGRAM", program)
    process._end_renderer()
    assert prepared()
    started = current().pid
    os.kill(started, signal.SIGUSR2)
    assert prepared()
    assert current().pid == started
    process._end_renderer()


ANSWERS = {
    "no JSON": "print('a')",
    "a list": "print('[1]')",
    "no text": 'print(\'{"text": 1, "places": []}\')',
    "places beyond": 'print(\'{"text": "a", "places": [[0, 2]]}\')',
    "places backwards": 'print(\'{"text": "ab", "places": [[1, 0]]}\')',
    "a deep list": "print('[' * 99999)",
    "no end": "\nwhile True: print('a' * 9999, end='')",
    "bytes": "sys.stdout.buffer.write(b'\\xff\\n')",
    "nothing": "pass",
    "an end": "os.kill(os.getpid(), 11)",
}


@pytest.mark.parametrize("what", ANSWERS)
def test_what_is_no_answer_is_a_refusal(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys\n{ANSWERS[what]}\n")
    monkeypatch.setattr(process, "PROGRAM", program)
    monkeypatch.setattr(process, "LONGEST_LINE", 1 << 20)
    process._end_renderer()
    with pytest.raises(
        DataError, match=r"answers something else|ends the process in which it is rendered"
    ):
        prepared()
    monkeypatch.undo()
    assert prepared()


def test_nothing_of_the_environment_but_language_and_time_zone_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process._end_renderer()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert prepared()
    content = Path(f"/proc/{current().pid}/environ").read_bytes()
    assert b"TZ=Asia/Tokyo" in content and b"hf_secret" not in content
    process._end_renderer()


def test_kept_tokens_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lema.data.cache.SMALL", 0)
    data = tmp_path / "chats.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        * 3
    )
    first = prepare_data(data, word_tokenizer(), max_length=64, cache=tmp_path / "kept")
    process._end_renderer()
    monkeypatch.setattr(process, "_Process", None)  # which would fail if it were called
    again = prepare_data(data, word_tokenizer(), max_length=64, cache=tmp_path / "kept")
    assert [row["input_ids"] for row in again] == [row["input_ids"] for row in first]


def forked_rows(number: int) -> None:
    assert prepared()
    assert current().pid != number


def test_a_process_that_was_forked_has_its_own(tmp_path: Path) -> None:
    assert prepared()
    number = current().pid
    run_forked(forked_rows, [(number,)], 1, tmp_path, 60)
    assert prepared()
    assert current().pid == number


PARENT = """
import os, sys, threading
sys.path[:0] = {paths!r}
from test_template_process import current, prepared
prepared()
print(current().pid, flush=True)
{then}
"""
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "then",
    [
        "sys.stdin.read()",
        "sys.exit()",
        f"threading.Timer(0.1, os._exit, (1,)).start(); prepared({LOOP!r})",
    ],
    ids=["killed", "ended", "while it renders"],
)
def test_it_ends_with_its_parent(then: str) -> None:
    code = PARENT.format(paths=sys.path, then=then)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        number = int(parent.stdout.readline())
        try:
            descriptor = os.pidfd_open(number)
        except ProcessLookupError:
            return  # it has ended already
        if "stdin" in then:
            parent.kill()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000)
        os.close(descriptor)


def test_a_date_is_told_though_the_clock_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    set_day(monkeypatch, "2026-11-28")
    tokenizer = word_tokenizer("{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    assert open_template(tokenizer, None, ROW).render(CHAT, ROW).startswith("28 Nov 2026")
    assert (
        open_template(tokenizer, None, ROW, "2020-02-29")
        .render(CHAT, ROW)
        .startswith("29 Feb 2020")
    )


GROWING = (
    "{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% set n.a = n.a + [(i ~ 'x') * "
    "100000] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "told"), [(LOOP, r"0\.5 seconds"), (GROWING + LOOP, "256 MiB")]
)
def test_a_process_that_sets_itself_no_bounds_is_looked_at(
    template: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where there is no timer and no bound of the address space."""
    program = tmp_path / "renderer.py"
    text = process.PROGRAM.read_text().replace('hasattr(signal, "setitimer")', "False")
    program.write_text(text.replace("/proc/self/statm", "/no/such/file"))
    monkeypatch.setattr(process, "PROGRAM", program)
    monkeypatch.setattr(process, "bounds_itself", lambda: False)
    monkeypatch.setattr("lema.data.chat.template.MAX_SECONDS", 0.5 if "sec" in told else 60.0)
    monkeypatch.setattr("lema.data.chat.template.MAX_BYTES", 256 << 20)
    process._end_renderer()
    with pytest.raises(DataError, match=told):
        prepared(template + TEMPLATE)
    monkeypatch.undo()
    assert prepared()
