"""`lema chat`: lines in, answers out, with history, commands, and a way to stop an answer."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import CHATS, TEXTS, config_writer, lema, write_rows
from smallrun import opened, settings, tokenizer

from lema.data import prepare_data
from lema.errors import ConfigError, DataError
from lema_tools.chat.answers import Answer, Answers
from lema_tools.chat.conversation import Conversation, save
from lema_tools.chat.model import ChatModel
from lema_tools.chat.session import Session
from lema_tools.generation.compared import side_by_side

Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Chat over a pipe; return what came on standard output and on standard error."""

    def run(text: str, *arguments: Any, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        capfd.readouterr()
        assert lema("chat", *arguments) == code
        captured = capfd.readouterr()
        return captured.out, captured.err

    return run


@pytest.fixture
def config(llama: Path, tmp_path: Path) -> Path:
    write_rows(tmp_path / "data.jsonl", CHATS)
    return config_writer(llama, tmp_path)()


def answered(config: Path, messages: list[dict[str, str]], tmp_path: Path) -> str:
    """What `lema generate` makes of a chat."""
    prompts = write_rows(tmp_path / "asked.jsonl", [{"messages": messages}])
    out = tmp_path / "answered.jsonl"
    out.unlink(missing_ok=True)
    assert (
        lema("generate", config, "--prompts", prompts, "--output", out, "--max-new-tokens", 6) == 0
    )
    return str(json.loads(out.read_text())["completion"])


def test_lines_of_a_pipe_are_turns_of_one_chat(config: Path, tmp_path: Path, talk: Talk) -> None:
    chat = tmp_path / "chat.json"
    asked = ["--system", "grind", "--max-new-tokens", 6]
    printed, said = talk(f"corn?\nmill?\n/save {chat}\n/undo\n/help\n", config, *asked)
    assert f"(saved to {chat})" in said and "/reset" in said
    (row,) = json.loads(chat.read_text())
    messages = row["messages"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert messages[0]["content"] == "grind"
    for number in (2, 4):
        expected = answered(config, messages[:number], tmp_path)
        assert messages[number]["content"] == expected
    assert printed == "".join(messages[number]["content"] + "\n" for number in (2, 4))
    rows = prepare_data(chat, tokenizer(), max_length=128)
    assert rows.counts.rows == 1 and rows.forms == ("chat",)


def test_commands_change_the_chat() -> None:
    chat = Conversation("be brief")
    chat.ask("a")
    chat.answer("b")
    chat.ask("c")
    chat.answer(" ")
    assert [message["content"] for message in chat.messages()] == ["be brief", "a", "b"]
    assert chat.undo() and not chat.undo()
    assert chat.messages() == [{"role": "system", "content": "be brief"}]


def test_a_chat_is_added_to_a_file_of_chats_and_to_nothing_else(tmp_path: Path) -> None:
    chat = Conversation()
    with pytest.raises(ConfigError, match="nothing to save"):
        save(chat, tmp_path / "chat.jsonl")
    chat.ask("a")
    chat.answer("b")
    for _ in range(2):
        save(chat, tmp_path / "chat.jsonl")
    lines = (tmp_path / "chat.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"] for line in lines] == [chat.messages()] * 2
    with pytest.raises(ConfigError, match="saved as JSON"):
        save(chat, tmp_path / "chat.txt")


def test_the_oldest_turns_of_a_long_chat_are_left_out_and_a_long_message_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    with opened(settings(llama, tmp_path)) as model:
        answers = Answers(model, {}, max_new_tokens=4, keys_values="device", seed=1)
        chat = Conversation()
        for _ in range(8):
            chat.ask("the miller of mill 3 grinds corn")
            chat.answer("by the river")
        chat.ask("who?")
        parts = list[str]()
        answer = answers.answer(chat, threading.Event(), parts.append)
        assert answer.left_out > 0 and answer.left_out % 2 == 0
        assert "".join(parts) == answer.text + "\n"
        chat.ask("xyz" * 128)
        with pytest.raises(DataError, match="more than the 128"):
            answers.answer(chat, threading.Event(), parts.append)


def test_the_base_model_answers_without_the_adapter(llama: Path, tmp_path: Path) -> None:
    chat = Conversation()
    chat.ask("who grinds corn?")
    with opened(settings(llama, tmp_path)) as model:
        with torch.no_grad():
            for parameter in model.get_trainable_parameters():
                parameter.mul_(20)
        answers = Answers(model, {}, max_new_tokens=8, keys_values="device", seed=1)
        silent = threading.Event(), lambda _: None
        compared = [answers.answer(chat, *silent, of_base=of_base) for of_base in (True, False)]
        again = answers.answer(chat, *silent)
    with opened(settings(llama, tmp_path), adapter=False) as base:
        alone = Answers(base, {}, max_new_tokens=8, keys_values="device", seed=1)
        assert alone.answer(chat, threading.Event(), lambda _: None) == compared[0]
    assert compared[0] != compared[1] == again


class Waiting(Answers):
    """Answers with one word for ever, until it is stopped."""

    def __init__(self) -> None:
        self.count = 0

    def answer(
        self, conversation: Conversation, stopped: threading.Event, show: Any, **_: Any
    ) -> Answer:
        self.count += 1
        show("word ")
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stopped.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)
        return Answer("word", 0)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("go on\nand again\n"))
    chat = Conversation()
    answers = Waiting()
    before = signal.getsignal(signal.SIGINT)
    model = ChatModel(lambda _: answers, None)
    Session(model, chat, compares=False, name="model").run()
    assert answers.count == 2 and capsys.readouterr().err == "(stopped)\n" * 2
    assert [message["content"] for message in chat.turns] == ["go on", "word", "and again", "word"]
    assert signal.getsignal(signal.SIGINT) is before


def test_two_answers_stand_side_by_side() -> None:
    lines = list(side_by_side(("base model", "adapter"), ("one two three", "four"), 23))
    assert lines == [
        "base model | adapter",
        "---------- | -------",
        "one two    | four",
        "three      |",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base"], "there is no adapter to compare"),
        (["--base", "--merged", "m"], "a merged model has no adapter"),
        (["--top-k", "3"], "no effect without sampling"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], said: str, config: Path, talk: Talk
) -> None:
    assert said in talk("", config, *arguments, code=2)[1]


def test_a_model_without_a_template_does_not_chat(llama: Path, tmp_path: Path, talk: Talk) -> None:
    import shutil

    base = shutil.copytree(llama, tmp_path / "bare")
    (base / "chat_template.jinja").unlink()
    write_rows(tmp_path / "data.jsonl", TEXTS)
    said = talk("hello\n", config_writer(base, tmp_path)(), code=2)[1]
    assert "no chat template" in said and "fix:" in said


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '[' + m.role + ']' + m.content }}{% endfor %}[assistant]"
)
LEAVES_OUT = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ '[' + m.role + ']' + m.content }}"
    "{% endif %}{% endfor %}[assistant]"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [(NO_SYSTEM, "no system role"), (LEAVES_OUT, "leaves a system message out")],
)
def test_a_system_message_that_the_template_does_not_take_is_not_kept(
    template: str, said: str, llama: Path, tmp_path: Path, talk: Talk
) -> None:
    write_rows(tmp_path / "data.jsonl", CHATS)
    config = config_writer(llama, tmp_path)(chat_template=template)
    own = ["--max-new-tokens", 4]
    plain, _ = talk("corn?\n", config, *own)
    lines = "/system be brief\n/system\ncorn?\n"
    printed, notes = talk(lines, config, *own, code=ConfigError.exit_code)
    assert said in notes and "where: /system" in notes and "(there is no system message)" in notes
    assert printed == plain
    printed, notes = talk("corn?\n", config, *own, "--system", "be brief", code=2)
    assert printed == "" and said in notes and "where: --system" in notes


def test_a_system_message_is_taken_away_again(config: Path, tmp_path: Path, talk: Talk) -> None:
    chat = tmp_path / "chat.json"
    lines = f"/system grind\n/reset\n/system\ncorn?\n/system -\n/system\ncorn?\n/save {chat}\n"
    _, notes = talk(lines, config, "--max-new-tokens", 4)
    assert "\ngrind\n" in notes and "(there is no system message)" in notes
    (row,) = json.loads(chat.read_text())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert "/system -" in talk("/help\n", config)[1]


def test_a_system_message_that_leaves_no_room_is_not_kept(config: Path, talk: Talk) -> None:
    lines = f"/system {'xyz' * 128}\ncorn?\n"
    printed, notes = talk(lines, config, "--max-new-tokens", 4, code=ConfigError.exit_code)
    assert "no message fits the 128 positions" in notes and printed.count("\n") == 1


def test_a_line_of_a_pipe_that_fails_leaves_the_others(config: Path, talk: Talk) -> None:
    lines = f"corn?\n{'xyz' * 128}\nmill?\n/save chat.txt\n"
    printed, notes = talk(lines, config, "--max-new-tokens", 4, code=DataError.exit_code)
    assert printed.count("\n") == 2
    assert "more than the 128" in notes and "saved as JSON" in notes


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_at_a_terminal_text_is_streamed_and_ctrl_d_ends(llama: Path) -> None:
    import fcntl
    import pty
    import termios

    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "lema", "chat", str(llama), "--max-new-tokens", "8"]
    process = subprocess.Popen(
        command,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(secondary)
    seen = b""

    def until(word: bytes, again: bytes = b"") -> None:
        """Read as far as a word; keys that were lost meanwhile are pressed again."""
        nonlocal seen
        while word not in seen:
            if again and not select.select([primary], [], [], 5)[0]:
                os.write(primary, again)
                continue
            seen += os.read(primary, 4096)
        seen = seen.partition(word)[2]

    with closing(os.fdopen(primary, "rb", closefd=True)):
        until(b"> ")
        os.write(primary, b"who grinds corn?\n")
        until(b"> ")
        os.write(primary, b"\x03")
        # Python notes Ctrl-C between its prompt and its wait for a key only at the next key.
        until(b"ends)", again=b"\x03")
        os.write(primary, b"\x04")
        assert process.wait(timeout=60) == 0
